//! `kvern bench`: speed, as a share of this machine's limits.
//!
//! Decoding reads all weights once a step and each row's state once; its limit is those bytes over the measured read rate. A prompt
//! multiplies every weight with every token; its limit is that many operations over the measured integer dot rate.

use std::time::Instant;

use kvern::Error;
use kvern_backend::Limits;
use kvern_engine::{Engine, Request};
use serde_json::{Value, json};

use crate::cli::{BenchArgs, RunArgs};
use crate::output::{busy, load_for, print, print_json};

pub fn run(args: &BenchArgs, run: &RunArgs) -> Result<(), Error> {
    let mut runtime = load_for(&args.model.model, run)?;
    let engine = &mut runtime.engine;
    let limits = busy("measuring the machine".into(), || engine.limits())?;
    let limits = limits.unwrap_or(Limits { read_gb_s: f64::NAN, dot_gops: f64::NAN });
    let (device, facts) = engine.describe();
    let mut machine = json!({ "device": device, "read_gb_s": limits.read_gb_s, "dot_gops": limits.dot_gops });
    for (name, value) in facts {
        // What is a number is one in the report.
        machine[name] = value.parse::<u64>().map_or(value.into(), Value::from);
    }
    let repeat = args.repeat.max(1);
    let (mut prefill, mut decode): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    for &tokens in &args.prompt {
        let what = format!("prompt of {tokens}");
        let rate = busy(what, || prompt_rate(engine, tokens, repeat))?;
        let limit = limits.dot_gops * 1e9 / (2.0 * engine.info().weights.layer_parameters as f64);
        prefill.push(json!({ "tokens": tokens, "tok_s": rate, "limit_share": rate / limit }));
    }
    for &depth in &args.depth {
        for &batch in &args.batch {
            let what = format!("{batch} rows at depth {depth}");
            let rate = busy(what, || decode_rate(engine, batch, depth, args.generate, repeat))?;
            let info = engine.info();
            let state = batch as f64 * info.spec.row_bytes(depth + args.generate / 2) as f64;
            let limit = batch as f64 * limits.read_gb_s * 1e9 / (info.weights.step_bytes as f64 + state);
            decode.push(json!({ "batch": batch, "depth": depth, "tok_s": rate, "limit_share": rate / limit }));
        }
    }
    let report = json!({ "machine": machine, "prefill": prefill, "decode": decode });
    if run.json {
        return print_json(&report);
    }
    let mut text = format!(
        "{}: reads {:.1} GB/s, {:.0} Gop/s\n",
        machine["device"].as_str().unwrap_or_default(),
        limits.read_gb_s,
        limits.dot_gops,
    );
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    for row in &report["prefill"].as_array().cloned().unwrap_or_default() {
        let share = number(&row["limit_share"]) * 100.0;
        text += &format!(
            "prompt {:>5}            {:>9.1} tok/s  {share:>5.1} % of the limit\n",
            row["tokens"],
            number(&row["tok_s"])
        );
    }
    for row in &report["decode"].as_array().cloned().unwrap_or_default() {
        let share = number(&row["limit_share"]) * 100.0;
        text += &format!(
            "decode {:>5} at {:>5}   {:>9.1} tok/s  {share:>5.1} % of the limit\n",
            row["batch"],
            row["depth"],
            number(&row["tok_s"]),
        );
    }
    print(&text)
}

/// Some token ids without structure.
fn tokens(count: usize, vocab: usize, salt: usize) -> Vec<u32> {
    (0..count).map(|i| ((i + 1) * 7919 + salt * 104_729) % vocab).map(|id| id as u32).collect()
}

/// Tokens per second of a prompt, up to its first token: the best of `repeat`.
fn prompt_rate(engine: &mut Engine, count: usize, repeat: usize) -> Result<f64, Error> {
    let prompt = tokens(count, engine.info().vocab, 0);
    let mut best = 0.0f64;
    for _ in 0..repeat {
        // What is kept of the last repetition would be taken up and not computed.
        engine.prefixes().clear();
        let start = Instant::now();
        engine.submit(Request::new(prompt.clone(), 1))?;
        while !engine.is_idle() {
            engine.step()?;
        }
        best = best.max(count as f64 / start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Tokens per second of `batch` rows together, each with `depth` tokens before the first timed step: the best of `repeat` runs of
/// `generate` steps, one after another.
fn decode_rate(engine: &mut Engine, batch: usize, depth: usize, generate: usize, repeat: usize) -> Result<f64, Error> {
    let vocab = engine.info().vocab;
    let mut ids = Vec::new();
    engine.prefixes().clear();
    for row in 0..batch {
        // Prompts end in different steps: rows that are ahead generate until the last one has read its prompt.
        let ahead = batch * depth.div_ceil(64) + 1;
        ids.push(engine.submit(Request::new(tokens(depth.max(1), vocab, row), ahead + generate * repeat))?);
    }
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < batch {
        seen.extend(engine.step()?.into_iter().map(|event| event.id));
    }
    let mut best = 0.0f64;
    for _ in 0..repeat {
        let (start, mut generated) = (Instant::now(), 0);
        for _ in 0..generate {
            generated += engine.step()?.len();
        }
        best = best.max(generated as f64 / start.elapsed().as_secs_f64());
    }
    ids.into_iter().for_each(|id| engine.cancel(id));
    Ok(best)
}
