//! What this machine can do at most: the limits that benchmarks are measured against.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvern_backend::Limits;
use kvern_base::{AllocError, Buffer};

use crate::Cpu;
use crate::isa::{Isa, Kernel};

/// Bytes that the reading test streams: far past any cache of one machine's share.
const STREAM: usize = 512 << 20;

/// Measures both limits, with all threads of a backend: reading memory, and integer dot products in registers. Takes about half a second.
pub(crate) fn measure(cpu: &Cpu) -> Result<Limits, AllocError> {
    let mut stream = Buffer::zeroed(STREAM)?;
    // Written once, so that every page exists.
    stream.view_mut::<u64>().iter_mut().step_by(512).for_each(|word| *word = 1);
    let blocks = stream.bytes().as_chunks::<64>().0;
    let read = best(3, || {
        cpu.pool().run(blocks.len(), 1 << 14, |range| cpu.set().run(Sum { blocks: &blocks[range] }));
    });
    const ROUNDS: usize = 1 << 20;
    let threads = cpu.pool().threads();
    let dot = best(3, || cpu.pool().run(threads, 1, |_| cpu.set().run(Dots { rounds: ROUNDS })));
    let operations = (threads * ROUNDS * CHAINS * 64 * 2) as f64;
    Ok(Limits { read_gb_s: STREAM as f64 / read.as_secs_f64() / 1e9, dot_gops: operations / dot.as_secs_f64() / 1e9 })
}

fn best(times: usize, mut run: impl FnMut()) -> Duration {
    (0..times)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .min()
        .unwrap_or_default()
}

struct Sum<'a> {
    blocks: &'a [[u8; 64]],
}

impl Kernel for Sum<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let mut sums = [isa.splat_i(0); 4];
        for blocks in self.blocks.as_chunks::<4>().0 {
            for (sum, block) in sums.iter_mut().zip(blocks) {
                *sum = isa.dot::<7>(*sum, isa.bytes(block), [1; 4]);
            }
        }
        black_box(sums.map(|sum| isa.sum(isa.to_f32(sum))));
    }
}

/// Independent chains of dot products: enough to hide their latency.
const CHAINS: usize = 12;

struct Dots {
    rounds: usize,
}

impl Kernel for Dots {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let codes = isa.bytes(&black_box([3; 64]));
        let mut sums = [isa.splat_i(0); CHAINS];
        for _ in 0..self.rounds {
            for sum in &mut sums {
                *sum = isa.dot::<7>(*sum, codes, [1, -1, 1, -1]);
            }
        }
        black_box(sums.map(|sum| isa.sum(isa.to_f32(sum))));
    }
}
