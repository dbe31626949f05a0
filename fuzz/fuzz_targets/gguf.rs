//! GGUF files: whatever the bytes, parsing and decoding end in a value or a typed error.

#![no_main]

use std::path::Path;

use kvern_text::Text;
use kvern_weights::{Checkpoint, Error, Mapping};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut checkpoint) = Checkpoint::from_gguf(&Mapping::from_bytes(Path::new("fuzz.gguf"), bytes.to_vec())) else {
        return;
    };
    let names: Vec<String> = checkpoint.names().map(String::from).collect();
    for name in names {
        if let Err(Error::Shape { found, .. }) = checkpoint.take(&name, &[]) {
            if let Ok(tensor) = checkpoint.take(&name, &found) {
                tensor.to_vec();
            }
        }
    }
    let _ = Text::load(checkpoint.source());
});
