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
    assert_eq!(names.len(), 12);
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
    assert_eq!(error.to_string(), "12 tensors belong to no part of this model, the first is `BF16`");
    let mut checkpoint = Checkpoint::open(&fixture("mlx")).unwrap();
    let error = checkpoint.take("b4g64f32.weight", &[3, 200]).unwrap_err();
    assert!(error.to_string().starts_with("quantized tensor `b4g64f32.weight`"), "{error}");
}

/// A value of FP4 (OCP Microscaling Formats 1.0, table 5).
fn fp4(code: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

#[test]
fn mxfp4_in_two_tensors_decodes_as_the_format_says() {
    let path = fixture("../models/gpt_oss");
    let file = fs::read(path.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let side = |part: &str| file.tensor(&format!("{name}_{part}")).unwrap().data().to_vec();
    let (blocks, scales) = (side("blocks"), side("scales"));
    let value = |at: usize| {
        let byte = blocks[at / 2];
        fp4(if at.is_multiple_of(2) { byte & 15 } else { byte >> 4 }) * 2f32.powi(i32::from(scales[at / 32]) - 127)
    };
    let want: Vec<f32> = (0..2 * blocks.len()).map(value).collect();
    let mut checkpoint = Checkpoint::open(&path).unwrap();
    check(&checkpoint.take(name, &[6, 64, 64]).unwrap(), &want);
    let error = checkpoint.take(name, &[6, 64, 48]).unwrap_err().to_string();
    assert!(error.contains("no whole number of blocks"), "{error}");
    let error = checkpoint.take(name, &[6, 32, 64]).unwrap_err().to_string();
    assert!(
        error.contains("gate_up_proj_blocks` should have the shape [6, 32, 2, 16], found [6, 64, 2, 16]"),
        "{error}"
    );
}

#[test]
fn rows_and_columns_in_another_order_are_those_of_the_file() {
    let checkpoint = || Checkpoint::open(&fixture("formats.gguf")).unwrap();
    let (rows, cols) = (3, 256);
    for name in ["F16", "BF16", "Q4_1", "Q8_0", "Q6_K", "MXFP4"] {
        let take = || checkpoint().take(name, &[rows, cols]).unwrap();
        let plain = take().to_vec();
        let stacked = Tensor::stack(vec![take(), take()]).unwrap().with_row_order(vec![5, 0, 1]);
        let row = |row: usize| &plain[row * cols..][..cols];
        check(&stacked, &[row(2), row(0), row(1)].concat());
        let turned = take().transposed(rows).unwrap();
        assert_eq!(turned.shape(), [cols, rows]);
        let want: Vec<f32> =
            (0..cols).flat_map(|col| (0..rows).map(move |row| (row, col))).map(|(r, c)| row(r)[c]).collect();
        check(&turned, &want);
        let runs = take().with_column_runs(&[1, 3, 0, 2], 64).unwrap();
        let want: Vec<f32> =
            (0..rows).flat_map(|r| [1, 3, 0, 2].map(|run| &row(r)[run * 64..][..64])).flatten().copied().collect();
        check(&runs, &want);
        assert!(take().with_column_runs(&[0, 1, 2], 64).is_err(), "{name}: three runs of 64 are not 256");
        assert!(take().transposed(2).is_err(), "{name}: three rows are no pairs");
    }
    let cut = checkpoint().take("Q8_0", &[rows, cols]).unwrap().with_column_runs(&(0..16).collect::<Vec<_>>(), 16);
    assert!(cut.is_err(), "runs of 16 cut groups of 32");
    let other = Tensor::stack(["Q8_0", "Q4_1"].map(|name| checkpoint().take(name, &[rows, cols]).unwrap()).into());
    assert!(other.unwrap_err().to_string().contains("it is Q4_1"), "one stack has one encoding");
}
