//! `kvern logits`: the logits of one token list, for comparison with any other implementation.

use std::fs::{self, File};
use std::io::{BufWriter, Write};

use kvern::Error;
use serde_json::json;

use crate::cli::{LogitsArgs, RunArgs};
use crate::output::{bar, load_for, print_json};

/// Tokens of one step; all of them have logits.
const CHUNK: usize = 128;

pub fn run(args: &LogitsArgs, run: &RunArgs) -> Result<(), Error> {
    let read = |source| Error::Io { action: "read", path: args.tokens.clone(), source, hint: "" };
    let write = |source| Error::Io { action: "write", path: args.output.clone(), source, hint: "" };
    let text = fs::read(&args.tokens).map_err(read)?;
    let tokens: Vec<u32> = serde_json::from_slice(&text).map_err(|e| Error::Input {
        path: args.tokens.clone(),
        expected: "a JSON array of token ids",
        what: e.to_string(),
    })?;
    let mut runtime = load_for(&args.model.model, run)?;
    let vocab = runtime.info().vocab;
    let bytes = tokens.len() * vocab * size_of::<f32>();
    let mut header = json!({
        "logits": { "dtype": "F32", "shape": [tokens.len(), vocab], "data_offsets": [0, bytes] },
    })
    .to_string();
    // The data begins at a multiple of 8 bytes.
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::new(File::create(&args.output).map_err(write)?);
    file.write_all(&(header.len() as u64).to_le_bytes()).map_err(write)?;
    file.write_all(header.as_bytes()).map_err(write)?;
    let bar = bar(tokens.len() as u64, "logits");
    let mut written = Ok(());
    runtime.engine.score(&tokens, CHUNK, |position, logits| {
        bar.set_position(position as u64);
        for logit in logits.iter() {
            if written.is_ok() {
                written = file.write_all(&logit.to_le_bytes());
            }
        }
    })?;
    written.and_then(|()| file.flush()).map_err(write)?;
    bar.finish_and_clear();
    if run.json { print_json(&json!({ "tokens": tokens.len(), "vocab": vocab, "path": args.output })) } else { Ok(()) }
}
