//! What attention takes per token of context, for encoded state beside bf16 state.
//!
//! ```text
//! KVERN_ISA=avx2 cargo bench -p kvern-cpu --bench attention -- [DEPTH [THREADS]] [PRESET ...]
//! ```
//!
//! One step of one token a row over DEPTH columns of two shapes of heads, for one row and eight. Presets take turns, so that a noisy machine slows all of
//! them, and medians are compared. Layers are many enough that no cache holds their state.

use std::time::Instant;

use kvern_backend::{Attention, Backend, Slot};
use kvern_cpu::{Cpu, CpuOptions};
use kvern_state::{Batch, GroupSpec, Pool, Preset, StateSpec, StepPlan};

const PRESETS: [&str; 11] = ["bf16", "f16", "k8v8", "q8", "k8v4", "k8v3", "q4", "k5v4", "k4v4", "k4v3", "k4v2"];
/// Bytes of state to read before any is read again.
const SPREAD: usize = 256 << 20;
const TURNS: usize = 9;

/// Query heads, heads of keys and values, and their dimension.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

/// State of a preset with a step to attend.
struct Subject<'a> {
    cpu: &'a Cpu,
    pages: <Cpu as Backend>::Pages,
    step: StepPlan,
    layers: usize,
    bytes: f64,
}

fn tensor(cpu: &Cpu, rows: usize, width: usize, salt: u64) -> <Cpu as Backend>::Tensor {
    let mut state = salt.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..rows * width).map(|_| random()).collect();
    let mut tensor = cpu.tensor(rows, width).expect("memory");
    cpu.resize(&mut tensor, rows).expect("the size it was made for");
    cpu.upload(&values, &mut tensor).expect("as many values");
    tensor
}

impl<'a> Subject<'a> {
    fn new(cpu: &'a Cpu, name: &str, shape: Shape, rows: usize, depth: usize) -> Self {
        let codecs = Preset::codecs(name).expect("a preset");
        let raw = shape.kv_heads * shape.dim * 4 * rows * depth;
        let layers = SPREAD.div_ceil(raw);
        let group = GroupSpec::attention(layers, shape.kv_heads, shape.dim, shape.dim, codecs);
        let spec = StateSpec::new(64, vec![group]).expect("a sound spec");
        let pool = Pool::new(spec.clone(), 1 << 40);
        let mut pages = cpu.pages(&spec).expect("a layout");
        let mut batch = Batch::new(&pool);
        let rows_of = (0..rows).map(|_| (pool.row(), depth + 1)).collect();
        batch.prepare_admit(rows_of).expect("room").commit();
        // A row's tokens repeat, which takes no less time.
        let chunk = 512;
        let planes = [1, 2].map(|salt| tensor(cpu, chunk * rows, shape.kv_heads * shape.dim, salt));
        let planes = [&planes[0], &planes[1]];
        for _ in 0..depth / chunk {
            let append = batch.prepare_append(&vec![chunk; rows]).expect("room");
            let plan = append.plan(&vec![0; chunk * rows], &[]).expect("as many tokens");
            let step = cpu.begin(plan, &mut pages).expect("memory");
            for layer in 0..layers {
                cpu.append(&step, &mut pages, Slot { group: 0, layer }, &planes).expect("finite values");
            }
            append.commit();
        }
        let append = batch.prepare_append(&vec![1; rows]).expect("room");
        let plan = append.plan(&vec![0; rows], &[]).expect("as many tokens");
        let step = cpu.begin(plan, &mut pages).expect("memory");
        let last = [3, 4].map(|salt| tensor(cpu, rows, shape.kv_heads * shape.dim, salt));
        for layer in 0..layers {
            let slot = Slot { group: 0, layer };
            cpu.append(&step, &mut pages, slot, &[&last[0], &last[1]]).expect("finite values");
        }
        append.commit();
        let bytes = spec.classes()[0].planes.iter().map(|plane| plane.column_bytes()).sum::<usize>() as f64;
        Self { cpu, pages, step, layers, bytes }
    }

    /// Seconds per row, layer and token of context.
    fn time(&self, shape: Shape, rows: usize, depth: usize) -> f64 {
        let q = tensor(self.cpu, rows, shape.heads * shape.dim, 5);
        let mut out = tensor(self.cpu, rows, shape.heads * shape.dim, 6);
        let start = Instant::now();
        for layer in 0..self.layers {
            let slot = Slot { group: 0, layer };
            let attention = Attention { slot, heads: shape.heads, scale: 0.09, softcap: None };
            self.cpu.attend(&self.step, &self.pages, attention, None, &q, &mut out).expect("shapes that fit");
        }
        start.elapsed().as_secs_f64() / (self.layers * rows * depth) as f64
    }
}

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|name| Preset::codecs(name).is_some()).collect();
    let others =
        PRESETS.iter().filter(|name| **name == "bf16" || asked.is_empty() || asked.iter().any(|asked| asked == *name));
    let presets: Vec<&str> = others.copied().collect();
    let numbers: Vec<usize> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    let depth = numbers.first().map_or(8192, |depth| depth.next_multiple_of(512));
    let isa = std::env::var("KVERN_ISA").ok();
    let cpu = Cpu::new(&CpuOptions { threads: numbers.get(1).copied(), isa, ..CpuOptions::default() }).expect("a CPU");
    println!("{}, {depth} tokens of context", cpu.describe());
    for shape in [Shape { heads: 9, kv_heads: 3, dim: 64 }, Shape { heads: 32, kv_heads: 8, dim: 128 }] {
        for rows in [1, 8] {
            println!("{} heads over {} of {}, {rows} rows", shape.heads, shape.kv_heads, shape.dim);
            let subjects: Vec<Subject<'_>> =
                presets.iter().map(|name| Subject::new(&cpu, name, shape, rows, depth)).collect();
            let mut times = vec![Vec::new(); presets.len()];
            for _ in 0..TURNS {
                for (subject, times) in subjects.iter().zip(&mut times) {
                    times.push(subject.time(shape, rows, depth));
                }
            }
            let median = |times: &mut Vec<f64>| {
                times.sort_by(f64::total_cmp);
                times[TURNS / 2]
            };
            let medians: Vec<f64> = times.iter_mut().map(median).collect();
            for ((name, subject), &time) in presets.iter().zip(&subjects).zip(&medians) {
                let (ratio, rate) = (time / medians[0], subject.bytes / time / 1e9);
                println!(
                    "    {name:6} {:8.2} ns a token  {ratio:5.2} of bf16  {:5.0} bytes a token  {rate:5.1} GB/s",
                    time * 1e9,
                    subject.bytes
                );
            }
        }
    }
}
