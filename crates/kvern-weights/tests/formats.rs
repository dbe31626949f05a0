//! Decoding of every format against what its own writer decodes.

use std::fs;
use std::path::PathBuf;

use kvern_weights::{Checkpoint, Tensor};
use safetensors::SafeTensors;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/weights").join(name)
}

/// Values of the tensor `name` in a safetensors file, read by another library.
fn golden(file: &[u8], name: &str) -> Vec<f32> {
    let file = SafeTensors::deserialize(file).unwrap();
    let data = file.tensor(name).unwrap().data();
    data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn check(tensor: &Tensor, want: &[f32]) {
    let got = tensor.to_vec();
    assert_eq!(got.len(), want.len());
    // A code of zero under a negative scale may be either zero.
    let differ = got.iter().zip(want).position(|(got, want)| got != want);
    assert_eq!(differ, None, "{}", tensor.name());
    if let Some(affine) = tensor.affine() {
        let groups = tensor.cols() / affine.group;
        let (mut codes, mut scales, mut biases) = (vec![0; tensor.cols()], vec![0.0; groups], vec![0.0; groups]);
        tensor.decode_groups(1, &mut codes, &mut scales, &mut biases);
        assert!(codes.iter().all(|&code| u32::from(code) < 1 << affine.bits), "{}", tensor.name());
        assert!(affine.biased || biases.iter().all(|&bias| bias == 0.0), "{}", tensor.name());
    }
}

#[test]
fn gguf_formats_decode_as_their_writer_does() {
    let goldens = fs::read(fixture("formats.safetensors")).unwrap();
    let mut checkpoint = Checkpoint::open(&fixture("formats.gguf")).unwrap();
    let names: Vec<String> = checkpoint.names().map(String::from).collect();
    assert_eq!(names.len(), 11);
    for name in names {
        check(&checkpoint.take(&name, &[3, 256]).unwrap(), &golden(&goldens, &name));
    }
    checkpoint.finish().unwrap();
}

#[test]
fn mlx_formats_decode_as_their_writer_does() {
    let goldens = fs::read(fixture("mlx.safetensors")).unwrap();
    let mut checkpoint = Checkpoint::open(&fixture("mlx")).unwrap();
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64, 128] {
            for dtype in ["f32", "bf16"] {
                let name = format!("b{bits}g{group}{dtype}");
                let tensor = checkpoint.take(&format!("{name}.weight"), &[3, 256]).unwrap();
                let affine = tensor.affine().unwrap();
                assert_eq!((affine.bits, affine.group), (bits, group), "inferred from shapes alone");
                check(&tensor, &golden(&goldens, &name));
            }
        }
    }
    checkpoint.finish().unwrap();
}

#[test]
fn rows_can_be_read_in_another_order() {
    let mut checkpoint = Checkpoint::open(&fixture("formats.gguf")).unwrap();
    let straight = checkpoint.take("Q4_1", &[3, 256]).unwrap().to_vec();
    let turned = checkpoint.take("Q4_1", &[3, 256]).unwrap().with_row_order(vec![2, 0, 1]).to_vec();
    assert_eq!(turned[..256], straight[512..]);
    assert_eq!(turned[256..], straight[..512]);
}

#[test]
fn missing_unused_and_misshapen_tensors_are_named() {
    let mut checkpoint = Checkpoint::open(&fixture("formats.gguf")).unwrap();
    let error = checkpoint.take("nothing.weight", &[1]).unwrap_err();
    assert_eq!(error.to_string(), "tensor `nothing.weight` is missing");
    let error = checkpoint.take("Q8_0", &[256, 3]).unwrap_err();
    assert_eq!(error.to_string(), "tensor `Q8_0` should have the shape [256, 3], found [3, 256]");
    let error = checkpoint.finish().unwrap_err();
    assert_eq!(error.to_string(), "11 tensors belong to no part of this model, the first is `BF16`");
    let mut checkpoint = Checkpoint::open(&fixture("mlx")).unwrap();
    let error = checkpoint.take("b4g64f32.weight", &[3, 200]).unwrap_err();
    assert!(error.to_string().starts_with("quantized tensor `b4g64f32.weight`"), "{error}");
}
