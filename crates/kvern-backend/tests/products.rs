//! Matrix products against the reference backend, at sizes around every tile edge, for every format, instruction set and number of
//! threads.

mod common;
#[path = "../../../tests/support/subjects.rs"]
mod subjects;

use common::{Noise, difference, tensor, values};
use kvern_backend::{Backend, Reference};
use kvern_base::{Raw, bf16, f16};
use kvern_cpu::KernelSet;
use kvern_weights::{BlockFormat, Encoding, Tensor};
use subjects::{Set, cpu, on, sets};

fn formats() -> Vec<Encoding> {
    use BlockFormat::*;
    let raw = [Raw::F32, Raw::F16, Raw::Bf16].map(Encoding::Raw);
    let blocks = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4K, Q5K, Q6K, Mxfp4].map(Encoding::Block);
    raw.into_iter().chain(blocks).collect()
}

/// A weight of random codes and sensible scales.
fn weight(encoding: &Encoding, outputs: usize, inputs: usize, seed: u64) -> Tensor {
    let mut noise = Noise(seed);
    let bytes = match encoding {
        Encoding::Raw(Raw::F32) => (0..outputs * inputs).flat_map(|_| noise.value().to_le_bytes()).collect(),
        Encoding::Raw(Raw::F16) => {
            (0..outputs * inputs).flat_map(|_| f16::from_f32(noise.value()).to_le_bytes()).collect()
        }
        Encoding::Raw(Raw::Bf16) => {
            (0..outputs * inputs).flat_map(|_| bf16::from_f32(noise.value()).to_le_bytes()).collect()
        }
        Encoding::Block(format) => {
            let mut bytes: Vec<u8> =
                (0..outputs * inputs / format.block() * format.bytes()).map(|_| noise.bits() as u8).collect();
            for block in bytes.chunks_exact_mut(format.bytes()) {
                let mut scale =
                    |at: usize| block[at..at + 2].copy_from_slice(&f16::from_f32(noise.value() / 64.0).to_le_bytes());
                match format {
                    BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4K | BlockFormat::Q5K => {
                        scale(0);
                        scale(2);
                    }
                    BlockFormat::Q6K => scale(208),
                    // A power of two near 1/64.
                    BlockFormat::Mxfp4 => block[0] = 119 + block[0] % 4,
                    _ => scale(0),
                }
            }
            bytes
        }
        Encoding::Mlx(_) | Encoding::Mxfp4(_) => {
            unreachable!("tensors in parts come from files; see the weights' own tests")
        }
    };
    Tensor::in_memory("w", &[outputs, inputs], encoding.clone(), bytes).unwrap()
}

fn product<B: Backend>(backend: &B, weight: Tensor, bias: Option<Tensor>, x: &[f32], add: bool) -> Vec<f32> {
    let (outputs, inputs, rows) = (weight.rows(), weight.cols(), x.len() / weight.cols());
    let linear = backend.linear(weight, bias).unwrap();
    let x = tensor(backend, x, inputs);
    let mut out = backend.tensor(rows, outputs).unwrap();
    backend.resize(&mut out, rows).unwrap();
    backend.project(&x, &mut [(&linear, &mut out)]).unwrap();
    if add {
        backend.project_add(&x, &linear, &mut out).unwrap();
    }
    backend.download(&out).unwrap()
}

/// Root mean square.
fn rms(x: &[f32]) -> f32 {
    (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32).sqrt()
}

/// Largest difference over what a product of such weights and activations typically is; by chance, one product may be near zero.
fn distance(got: &[f32], want: &[f32], weight: &Tensor, x: &[f32]) -> f32 {
    let typical = (weight.cols() as f32).sqrt() * rms(&weight.to_vec()) * rms(x);
    difference(got, want) / typical
}

/// How far a product may be from exact arithmetic, relative to a typical one.
fn bound(set: Set, encoding: &Encoding) -> f32 {
    match (set, encoding) {
        (_, Encoding::Raw(Raw::F32)) | (Set::Cpu(_), Encoding::Raw(_)) => 2e-6,
        // Activations of a quantized product have 16 bits for their group's range.
        (Set::Cpu(_), _) => 1e-4,
        // Activations have the mantissa of the weights' type: 8 bits, or 11.
        (Set::Cuda, Encoding::Raw(Raw::Bf16)) => 1e-2,
        (Set::Cuda, _) => 2e-3,
    }
}

#[test]
fn products_agree_with_the_reference() {
    for (index, encoding) in formats().iter().enumerate() {
        let inputs = if matches!(encoding, Encoding::Raw(_)) { 77 } else { 512 };
        for outputs in [1, 15, 16, 17, 33, 64, 100] {
            for rows in [1, 2, 3, 5, 6, 7, 13] {
                let x = values(index as u64 * 1000 + (outputs * rows) as u64, rows * inputs);
                let make = || weight(encoding, outputs, inputs, 5);
                let want = product(&Reference::new(), make(), None, &x, false);
                for set in sets() {
                    let got = on!(set, 2, false, |backend| product(backend, make(), None, &x, false));
                    let error = distance(&got, &want, &make(), &x);
                    let bound = bound(set, encoding);
                    assert!(error < bound, "{encoding} {outputs}x{inputs}, {rows} rows, {}: {error}", set.name());
                    let exact = on!(set, 2, true, |backend| product(backend, make(), None, &x, false));
                    let error = distance(&exact, &want, &make(), &x);
                    // A sum of 512 products in f32.
                    assert!(error < 1e-5, "{encoding} exact, {}: {error}", set.name());
                }
            }
        }
    }
}

#[test]
fn bias_and_accumulation_agree_with_the_reference() {
    for encoding in formats() {
        let (outputs, inputs, rows) = (37, 256, 3);
        let x = values(3, rows * inputs);
        let bias: Vec<f32> = values(4, outputs).into_iter().map(|x| 20.0 * x).collect();
        let bias = || {
            let bytes = bias.iter().flat_map(|x| x.to_le_bytes()).collect();
            Some(Tensor::in_memory("b", &[outputs], Encoding::Raw(Raw::F32), bytes).unwrap())
        };
        let make = || weight(&encoding, outputs, inputs, 9);
        let want = product(&Reference::new(), make(), bias(), &x, true);
        for set in sets() {
            let got = on!(set, 1, false, |backend| product(backend, make(), bias(), &x, true));
            let error = distance(&got, &want, &make(), &x);
            // The product counts twice, and so does its error; the bias is large, and so is one rounding step of a sum with it.
            assert!(error < 2.0 * bound(set, &encoding) + 1e-5, "{encoding}, {}: {error}", set.name());
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_512_on_any_number_of_threads() {
    for encoding in formats() {
        let (outputs, inputs, rows) = (100, 512, 512);
        let x = values(11, rows * inputs);
        for set in sets() {
            let run = |threads: usize, rows: std::ops::Range<usize>| {
                let x = &x[rows.start * inputs..rows.end * inputs];
                let weight = weight(&encoding, outputs, inputs, 2);
                on!(set, threads, false, |backend| product(backend, weight, None, x, false))
            };
            let whole = run(1, 0..rows);
            for threads in [2, 5] {
                assert!(whole == run(threads, 0..rows), "{encoding}, {}: {threads} threads", set.name());
            }
            // Alone, and in groups around the sizes at which kernels change.
            for (row, count) in [
                (0, 1),
                (1, 1),
                (255, 1),
                (511, 1),
                (3, 7),
                (5, 8),
                (8, 9),
                (1, 17),
                (2, 33),
                (7, 64),
                (6, 65),
                (9, 130),
            ] {
                let some = run(2, row..row + count);
                let want = &whole[row * outputs..(row + count) * outputs];
                assert!(some == want, "{encoding}, {}: {count} rows from {row}", set.name());
            }
        }
    }
}

/// More tiles than a device works on at a time, and sums longer than what it fetches at a time.
#[test]
fn large_matrices_agree_with_the_reference_and_keep_the_bits_of_rows() {
    use BlockFormat::*;
    let encodings = [Encoding::Raw(Raw::Bf16), Encoding::Block(Q4_0), Encoding::Block(Q8_0), Encoding::Block(Q6K)];
    for (outputs, inputs) in [(9001, 256), (33, 9216)] {
        for encoding in &encodings {
            let x = values(21, 70 * inputs);
            let make = || weight(encoding, outputs, inputs, 6);
            let want = product(&Reference::new(), make(), None, &x[..2 * inputs], false);
            for set in sets() {
                let run = |first: usize, rows: usize| {
                    let x = &x[first * inputs..(first + rows) * inputs];
                    on!(set, 2, false, |backend| product(backend, make(), None, x, false))
                };
                let whole = run(0, 70);
                let error = distance(&whole[..2 * outputs], &want, &make(), &x);
                // The largest of a hundred times as many errors as above.
                assert!(error < 2.0 * bound(set, encoding), "{encoding} {outputs}x{inputs}, {}: {error}", set.name());
                for (first, rows) in [(0, 1), (7, 0), (69, 1), (5, 8), (9, 9), (3, 40)] {
                    let same = run(first, rows) == whole[first * outputs..(first + rows) * outputs];
                    assert!(same, "{encoding} {outputs}x{inputs}, {}: {rows} rows from {first}", set.name());
                }
            }
        }
    }
}

#[test]
fn packing_loses_nothing() {
    for encoding in formats() {
        let (outputs, inputs) = (19, 256);
        let want = weight(&encoding, outputs, inputs, 4).to_vec();
        for exact in [false, true] {
            let backend = cpu(KernelSet::available()[0], 1, exact);
            let linear = backend.linear(weight(&encoding, outputs, inputs, 4), None).unwrap();
            for (output, want) in want.chunks_exact(inputs).enumerate() {
                let mut row = vec![0.0; inputs];
                linear.row(output, &mut row);
                assert!(row == want, "{encoding}, exact {exact}, row {output}");
            }
        }
    }
}
