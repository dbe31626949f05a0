//! `kvern perplexity`: how well a model predicts a text, and how far it is from another model or state.
//!
//! The text is cut into chunks that are read independently; every token of a chunk but the first is predicted. The divergence is
//! KL(other ‖ model) of the distributions at each position, in nats.

use std::fs;

use kvern::{Codec, Error, KvPolicy, Options, Runtime};
use kvern_engine::log_softmax;
use serde_json::json;

use crate::cli::{PerplexityArgs, RunArgs};
use crate::output::{bar, load, print, print_json};

/// Tokens of one step; all of them have logits.
const STEP: usize = 128;

/// What a pass over the text adds up.
#[derive(Default)]
struct Totals {
    /// Sum of -log p of the predicted tokens.
    loss: f64,
    predicted: usize,
    divergences: Vec<f64>,
    agreements: usize,
}

pub fn run(args: &PerplexityArgs, run: &RunArgs) -> Result<(), Error> {
    let text = fs::read(&args.file).map_err(|source| Error::Io {
        action: "read",
        path: args.file.clone(),
        source,
        hint: "",
    })?;
    let text = String::from_utf8(text).map_err(|e| Error::Input {
        path: args.file.clone(),
        expected: "a UTF-8 text",
        what: e.to_string(),
    })?;
    let options = run.options();
    let mut model = load(&args.model.model, &options)?;
    let mut other = other(args, &options)?;
    let mut tokens = model.prompt(&text)?;
    tokens.truncate(args.limit.unwrap_or(usize::MAX));
    if tokens.len() < 2 {
        let what = format!("it has {} tokens, two are needed", tokens.len());
        return Err(Error::Input { path: args.file.clone(), expected: "a text to predict", what });
    }
    let mut totals = Totals::default();
    let bar = bar(tokens.len() as u64, "perplexity");
    for chunk in tokens.chunks(args.chunk.max(2)) {
        totals.add(chunk, &mut model, other.as_mut())?;
        bar.inc(chunk.len() as u64);
    }
    bar.finish_and_clear();
    totals.report(run)
}

/// The other side of the comparison: a named model, or the same weights with `f32` state if a preset was asked for.
fn other(args: &PerplexityArgs, options: &Options<'_>) -> Result<Option<Runtime>, Error> {
    let name = match &args.against {
        Some(name) => name,
        None if options.kv != KvPolicy::default() || args.against_exact => &args.model.model,
        None => return Ok(None),
    };
    let kv = KvPolicy { codecs: Some((Codec::F32, Codec::F32)), ..KvPolicy::default() };
    let options = Options { kv, exact: args.against_exact, ..options.clone() };
    load(name, &options).map(Some)
}

impl Totals {
    fn add(&mut self, chunk: &[u32], model: &mut Runtime, other: Option<&mut Runtime>) -> Result<(), Error> {
        let mut reference: Vec<Vec<f32>> = Vec::new();
        if let Some(other) = other {
            other.engine.score(chunk, STEP, |_, logits| {
                log_softmax(logits);
                reference.push(logits.to_vec());
            })?;
        }
        model.engine.score(chunk, STEP, |position, logits| {
            log_softmax(logits);
            if let Some(&next) = chunk.get(position + 1) {
                self.loss -= f64::from(logits[next as usize]);
                self.predicted += 1;
            }
            if let Some(reference) = reference.get(position) {
                let divergence =
                    reference.iter().zip(&*logits).map(|(p, q)| f64::from(*p).exp() * (f64::from(*p) - f64::from(*q)));
                self.divergences.push(divergence.sum());
                self.agreements += usize::from(best(reference) == best(logits));
            }
        })?;
        Ok(())
    }

    fn report(mut self, run: &RunArgs) -> Result<(), Error> {
        let ppl = (self.loss / self.predicted.max(1) as f64).exp();
        let mut report = json!({ "ppl": ppl, "tokens": self.predicted });
        let mut text = format!("perplexity {ppl:.4} over {} tokens\n", self.predicted);
        if !self.divergences.is_empty() {
            let count = self.divergences.len();
            self.divergences.sort_by(f64::total_cmp);
            let mean = self.divergences.iter().sum::<f64>() / count as f64;
            let p99 = self.divergences[(count - 1) * 99 / 100];
            let agreement = self.agreements as f64 / count as f64;
            report["kl_mean"] = mean.into();
            report["kl_p99"] = p99.into();
            report["top1_agreement"] = agreement.into();
            text += &format!(
                "divergence mean {mean:.3e}, 99th percentile {p99:.3e}; same best token {:.2} %\n",
                agreement * 100.0
            );
        }
        if run.json { print_json(&report) } else { print(&text) }
    }
}

fn best(values: &[f32]) -> Option<usize> {
    (0..values.len()).max_by(|&a, &b| values[a].total_cmp(&values[b]).then(b.cmp(&a)))
}
