//! What a GPU takes for the steps of a model and for attention alone, by its own clock, against its own limits.
//!
//! ```text
//! cargo bench -p kvern --bench gpu -- MODEL [--rows 1,8,64] [--depth 64] [--prompt 4096] [--profile] [--attention]
//! ```
//!
//! Prints one JSON object. Steps are enqueued as the engine enqueues them, without looking at what they drew.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Parser;
use kvern_backend::{Attention, Backend, Slot};
use kvern_cuda::{Cuda, CudaOptions};
use kvern_models::{LoadOptions, Model, load};
use kvern_state::{Batch, Codec, Demand, Draw, GroupSpec, Pool, StateSpec, StepPlan};
use kvern_weights::Checkpoint;
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

#[derive(Parser)]
struct Args {
    /// A model.
    model: Option<PathBuf>,
    /// Rows that decode together.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    rows: Vec<usize>,
    /// Tokens of each row before the first timed step.
    #[arg(long, default_value_t = 64)]
    depth: usize,
    /// Tokens of a prompt, read in one step; 0 for none.
    #[arg(long, default_value_t = 4096)]
    prompt: usize,
    /// Also time each kernel of a step.
    #[arg(long)]
    profile: bool,
    /// Time attention alone, over 32 768 columns in bf16.
    #[arg(long)]
    attention: bool,
    /// Record no steps.
    #[arg(long)]
    eager: bool,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Steps of a timed run.
const STEPS: usize = 24;

fn main() -> Result<(), Failure> {
    let args = Args::parse();
    // `cargo test` builds and runs benches, too; without a model there is nothing to do.
    if args.model.is_none() && !args.attention {
        return Ok(());
    }
    let gpu = Cuda::new(&CudaOptions { eager: args.eager, ..CudaOptions::default() })?;
    let limits = gpu.limits()?.ok_or("no limits")?;
    let mut report = json!({
        "device": gpu.describe(), "read_gb_s": limits.read_gb_s, "mma_tflop_s": limits.dot_gops / 1e3,
    });
    if args.attention {
        report["attention"] =
            [1, 32].map(|rows| attention(&gpu, rows, limits.read_gb_s)).into_iter().collect::<Result<_, _>>()?;
    }
    if let Some(path) = &args.model {
        let max_tokens = args.prompt.max(args.rows.iter().copied().max().unwrap_or(1)).max(512);
        let options = LoadOptions { max_tokens, max_outputs: 256, ..LoadOptions::default() };
        let start = std::time::Instant::now();
        let mut model = load(&gpu, Checkpoint::open(path)?, &options)?;
        report["load_s"] = start.elapsed().as_secs_f64().into();
        report["weight_bytes"] = model.info().weights.step_bytes.into();
        for &rows in &args.rows {
            let step = decode(&gpu, model.as_mut(), rows, &args)?;
            let bytes = model.info().weights.step_bytes as f64;
            let mut line = json!({
                "rows": rows, "step_us": step * 1e6, "tok_s": rows as f64 / step, "weights_gb_s": bytes / step / 1e9,
                "share_of_read": bytes / step / 1e9 / limits.read_gb_s,
            });
            if args.profile {
                line["kernels"] = profile(&gpu, model.as_mut(), rows, &args)?;
            }
            report["decode"]
                .as_array_mut()
                .map(|list| list.push(line.clone()))
                .unwrap_or_else(|| report["decode"] = json!([line]));
        }
        if args.prompt > 0 {
            let seconds = prompt(&gpu, model.as_mut(), args.prompt)?;
            let flop = 2.0 * model.info().weights.layer_parameters as f64 * args.prompt as f64;
            report["prompt"] = json!({
                "tokens": args.prompt, "ms": seconds * 1e3, "tok_s": args.prompt as f64 / seconds,
                "weights_tflop_s": flop / seconds / 1e12,
            });
            if args.profile {
                let (_, kernels) = gpu.profile(|| prompt(&gpu, model.as_mut(), args.prompt))?;
                report["prompt"]["kernels"] = table(kernels);
            }
        }
    }
    println!("{report:#}");
    Ok(())
}

/// A batch of rows with state behind them.
struct Rows<'a> {
    gpu: &'a Cuda,
    batch: Batch,
    pages: <Cuda as Backend>::Pages,
}

impl<'a> Rows<'a> {
    fn new(gpu: &'a Cuda, spec: &StateSpec, rows: usize, tokens: usize) -> Result<Self, Failure> {
        let pool = Pool::new(spec.clone(), gpu.free_memory()?.unwrap_or(1 << 32));
        let mut batch = Batch::new(&pool);
        let demand = Demand { tokens, step: 4096, round: 0 };
        batch.prepare_admit((0..rows).map(|_| (pool.row(), demand)).collect())?.commit();
        Ok(Self { gpu, batch, pages: gpu.pages(spec)? })
    }

    /// Appends so many tokens to each row and runs the model; draws a token where each row ends.
    fn step(&mut self, model: &mut dyn Model<Cuda>, counts: &[usize]) -> Result<(), Failure> {
        let append = self.batch.prepare_append(counts)?;
        let total: usize = counts.iter().sum();
        let tokens: Vec<u32> = (0..total).map(|i| (i * 7919 + 13) as u32 % 30_000).collect();
        let ends = counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end as u32 - 1)
        });
        let outputs: Vec<u32> = ends.collect();
        let draw = Draw { temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0, uniform: 0.5 };
        let plan = StepPlan { draws: vec![Some(draw); outputs.len()], ..append.plan(&tokens, &outputs)? };
        let step = self.gpu.begin(plan, &mut self.pages)?;
        self.gpu.run(&step, &mut self.pages, |pages| {
            let logits = model.forward(self.gpu, &step, pages)?;
            Ok::<(), kvern_models::Error>(self.gpu.draw(&step, logits)?)
        })?;
        append.commit();
        Ok(())
    }
}

/// Seconds of one step of `rows` rows.
fn decode(gpu: &Cuda, model: &mut dyn Model<Cuda>, rows: usize, args: &Args) -> Result<f64, Failure> {
    let mut rows = filled(gpu, model, rows, args)?;
    let ones = vec![1; rows.batch.rows().len()];
    for _ in 0..3 {
        rows.step(model, &ones)?;
    }
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let seconds = gpu.time(|| {
            for _ in 0..STEPS {
                rows.step(model, &ones)?;
            }
            Ok::<(), Failure>(())
        })?;
        best = best.min(seconds / STEPS as f64);
    }
    while !gpu.drawn()?.is_empty() {}
    Ok(best)
}

fn filled<'a>(gpu: &'a Cuda, model: &mut dyn Model<Cuda>, rows: usize, args: &Args) -> Result<Rows<'a>, Failure> {
    let mut rows = Rows::new(gpu, &model.info().spec.clone(), rows, args.depth + 4 * STEPS + 8)?;
    for row in 0..rows.batch.rows().len() {
        let mut counts = vec![0; rows.batch.rows().len()];
        counts[row] = args.depth;
        let append = rows.batch.prepare_append(&counts)?;
        let step = gpu.begin(append.plan(&vec![1; args.depth], &[])?, &mut rows.pages)?;
        model.forward(gpu, &step, &mut rows.pages)?;
        append.commit();
    }
    Ok(rows)
}

/// Time of each kernel of one step.
fn profile(gpu: &Cuda, model: &mut dyn Model<Cuda>, rows: usize, args: &Args) -> Result<Value, Failure> {
    let mut rows = filled(gpu, model, rows, args)?;
    let ones = vec![1; rows.batch.rows().len()];
    let (_, kernels) = gpu.profile(|| rows.step(model, &ones))?;
    while !gpu.drawn()?.is_empty() {}
    Ok(table(kernels))
}

fn table(kernels: Vec<(&'static str, f64)>) -> Value {
    let mut sums: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
    for (name, seconds) in kernels {
        let sum = sums.entry(name).or_default();
        *sum = (sum.0 + 1, sum.1 + seconds);
    }
    sums.into_iter()
        .map(|(name, (count, seconds))| json!({ "kernel": name, "count": count, "us": seconds * 1e6 }))
        .collect()
}

/// Seconds of a prompt in one step.
fn prompt(gpu: &Cuda, model: &mut dyn Model<Cuda>, tokens: usize) -> Result<f64, Failure> {
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let mut rows = Rows::new(gpu, &model.info().spec.clone(), 1, tokens + 1)?;
        best = best.min(gpu.time(|| rows.step(model, &[tokens]))?);
        while !gpu.drawn()?.is_empty() {}
    }
    Ok(best)
}

/// Decode attention of an 8 B model's layer (32 heads over 8, of 128 dimensions) at 32 768 columns, with several layers' state so that no cache helps.
fn attention(gpu: &Cuda, rows: usize, read: f64) -> Result<Value, Failure> {
    const COLUMNS: usize = 32_768;
    let layers = if rows == 1 { 4 } else { 1 };
    let group = GroupSpec::attention(layers, 8, 128, 128, (Codec::Bf16, Codec::Bf16));
    let spec = StateSpec::new(64, vec![group])?;
    let mut all = Rows::new(gpu, &spec, rows, COLUMNS + 8)?;
    let noise = |count: usize| -> Vec<f32> { (0..count).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect() };
    let mut kv = gpu.tensor(4096, 1024)?;
    gpu.resize(&mut kv, 4096)?;
    gpu.upload(&noise(4096 * 1024), &mut kv)?;
    for row in 0..rows {
        for append in 1..=COLUMNS / 4096 {
            let mut counts = vec![0; rows];
            // The last column is the query's own.
            let count = if append == COLUMNS / 4096 { 4095 } else { 4096 };
            counts[row] = count;
            gpu.resize(&mut kv, count)?;
            let append = all.batch.prepare_append(&counts)?;
            let step = gpu.begin(append.plan(&vec![0; count], &[])?, &mut all.pages)?;
            for layer in 0..layers {
                gpu.append(&step, &mut all.pages, Slot { group: 0, layer }, &[&kv, &kv])?;
            }
            append.commit();
        }
    }
    let append = all.batch.prepare_append(&vec![1; rows])?;
    let outputs: Vec<u32> = (0..rows as u32).collect();
    let step = gpu.begin(append.plan(&vec![0; rows], &outputs)?, &mut all.pages)?;
    let (count, _) = gpu.rows(&step);
    let mut tensors = [4096, 4096].map(|width| gpu.tensor(count, width));
    let [Ok(q), Ok(out)] = &mut tensors else { return Err("no memory".into()) };
    gpu.resize(q, count)?;
    gpu.resize(out, count)?;
    gpu.upload(&noise(count * 4096), q)?;
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let seconds = gpu.time(|| {
            for layer in (0..layers).cycle().take(16) {
                let slot = Slot { group: 0, layer };
                let attention = Attention { slot, heads: 32, scale: 0.088, softcap: None };
                gpu.attend(&step, &all.pages, attention, None, q, out)?;
            }
            Ok::<(), Failure>(())
        })?;
        best = best.min(seconds / 16.0);
    }
    let bytes = (rows * COLUMNS * 8 * 128 * 2 * 2) as f64;
    Ok(
        json!({ "rows": rows, "columns": COLUMNS, "us": best * 1e6, "gb_s": bytes / best / 1e9, "share_of_read": bytes / best / 1e9 / read }),
    )
}
