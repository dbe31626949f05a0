//! Damaged files: always a typed error or a file that is still consistent, never a panic, never a huge allocation.

use std::fs;
use std::path::{Path, PathBuf};

use kvern_weights::{Checkpoint, Error, Mapping};
use proptest::prelude::*;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// Parses bytes as GGUF and, where that works, decodes everything.
fn read(bytes: Vec<u8>) -> Result<usize, Error> {
    let mut checkpoint = Checkpoint::from_gguf(&Mapping::from_bytes(Path::new("test.gguf"), bytes))?;
    let names: Vec<String> = checkpoint.names().map(String::from).collect();
    for name in &names {
        // A damaged shape is consistent with the file's length, so decoding must stay in bounds.
        match checkpoint.take(name, &[3, 256]) {
            Ok(tensor) => drop(tensor.to_vec()),
            Err(Error::Shape { found, .. }) => drop(checkpoint.take(name, &found)?.to_vec()),
            Err(error) => return Err(error),
        }
    }
    Ok(names.len())
}

#[test]
fn every_truncation_is_an_error() {
    let whole = fs::read(fixture("weights/formats.gguf")).unwrap();
    assert_eq!(read(whole.clone()).unwrap(), 12);
    for length in (0..whole.len() - 32).step_by(7) {
        let error = read(whole[..length].to_vec()).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. } | Error::NotAModel { .. }), "{length}: {error}");
    }
}

#[test]
fn absurd_counts_and_lengths_are_refused_before_allocation() {
    let whole = fs::read(fixture("weights/formats.gguf")).unwrap();
    let patched = |at: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        read(bytes).unwrap_err().to_string()
    };
    // Tensor count, metadata count, and the length of the first key.
    for at in [8, 16, 24] {
        for value in [u64::MAX, 1 << 62, 1 << 40, 1 << 20] {
            assert!(patched(at, value).contains("is more than the file can hold"), "{at}: {value}");
        }
    }
}

#[test]
fn versions_and_foreign_files_are_refused() {
    let mut bytes = fs::read(fixture("weights/formats.gguf")).unwrap();
    bytes[4] = 9;
    assert!(read(bytes).unwrap_err().to_string().contains("version 9"));
    assert!(matches!(read(b"PK\x03\x04 not a model".to_vec()), Err(Error::NotAModel { .. })));
    assert!(matches!(read(Vec::new()), Err(Error::NotAModel { .. })));
    assert!(matches!(Checkpoint::open(Path::new("/no/such/model")), Err(Error::Io { .. })));
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(Checkpoint::open(empty.path()), Err(Error::Io { .. })), "no config.json");
    fs::write(empty.path().join("config.json"), "{").unwrap();
    assert!(matches!(Checkpoint::open(empty.path()), Err(Error::Json { .. })));
    fs::write(empty.path().join("config.json"), "{}").unwrap();
    assert!(matches!(Checkpoint::open(empty.path()), Err(Error::NotAModel { .. })), "no weights");
}

#[test]
fn a_tensor_type_that_is_not_read_is_named() {
    let mut bytes = fs::read(fixture("weights/formats.gguf")).unwrap();
    // A description: name length, name, dimension count, two dimensions, type.
    let name = bytes.windows(4).position(|window| window == b"Q8_0").unwrap();
    let kind = name + 4 + 4 + 16;
    assert_eq!(bytes[kind], 8);
    bytes[kind] = 99;
    let error = read(bytes).unwrap_err();
    assert_eq!(error.to_string(), "tensor `Q8_0` has the type number 99, which Kvern does not read");
}

#[test]
fn the_files_of_a_directory_are_one_model() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("config.json"), "{}").unwrap();
    fs::copy(fixture("models/llama/model.safetensors"), directory.path().join("model-00001-of-00002.safetensors"))
        .unwrap();
    fs::copy(fixture("weights/formats.safetensors"), directory.path().join("model-00002-of-00002.safetensors"))
        .unwrap();
    let mut checkpoint = Checkpoint::open(directory.path()).unwrap();
    checkpoint.take("model.norm.weight", &[32]).unwrap();
    checkpoint.take("Q4_K", &[3, 256]).unwrap();
}

#[test]
fn damaged_safetensors_are_errors() {
    let whole = fs::read(fixture("models/llama/model.safetensors")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("config.json"), "{}").unwrap();
    let open = |bytes: &[u8]| {
        fs::write(directory.path().join("model.safetensors"), bytes).unwrap();
        Checkpoint::open(directory.path())
    };
    assert!(open(&whole).is_ok());
    for length in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        assert!(matches!(open(&whole[..length]), Err(Error::Damaged { .. })), "{length}");
    }
    for header in [u64::MAX, 1 << 40, whole.len() as u64] {
        let mut bytes = whole.clone();
        bytes[..8].copy_from_slice(&header.to_le_bytes());
        assert!(matches!(open(&bytes), Err(Error::Damaged { .. })), "{header}");
    }
    // Other files beside the model's are none of its weights, unless there is no telling them apart.
    fs::write(directory.path().join("other.safetensors"), &whole).unwrap();
    assert!(open(&whole).is_ok());
    fs::rename(directory.path().join("model.safetensors"), directory.path().join("one.safetensors")).unwrap();
    assert!(Checkpoint::open(directory.path()).unwrap_err().to_string().contains("also stands in another file"));
    // An index says which files they are.
    let index = directory.path().join("model.safetensors.index.json");
    fs::write(&index, r#"{"weight_map":{"model.norm.weight":"one.safetensors"}}"#).unwrap();
    assert!(Checkpoint::open(directory.path()).is_ok());
    for bad in [r#"{}"#, r#"{"weight_map":{"a":1}}"#, r#"{"weight_map":{"a":"../one.safetensors"}}"#, "{"] {
        fs::write(&index, bad).unwrap();
        assert!(matches!(Checkpoint::open(directory.path()), Err(Error::Json { .. })), "{bad}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn flipped_bits_never_panic(flips in prop::collection::vec((0usize..3000, 0u8..8), 1..6)) {
        let mut bytes = fs::read(fixture("weights/formats.gguf")).unwrap();
        for (at, bit) in flips {
            bytes[at] ^= 1 << bit;
        }
        let _outcome = read(bytes);
    }
}
