//! `kvern generate`: plain completion.

use std::time::Instant;

use kvern::{Error, Generation, Runtime};
use serde_json::{Value, json};

use crate::cli::{GenerateArgs, RunArgs};
use crate::output::{busy, load_for, print, print_json};

pub fn run(args: &GenerateArgs, run: &RunArgs) -> Result<(), Error> {
    let mut runtime = load_for(&args.model.model, run)?;
    let start = Instant::now();
    let mut prompt = args.resume.as_ref().map_or(Ok(Vec::new()), |path| runtime.resume(path))?;
    let resume = start.elapsed();
    if let Some(text) = &args.prompt {
        // What follows on a checkpoint is no beginning of a text.
        let first = prompt.is_empty();
        prompt.extend(runtime.text.tokenizer.encode(text, first)?);
    }
    let sampling = args.sampling.sampling(args.logprobs.then_some(0));
    let mut written = Ok(());
    let generation =
        runtime.generate(&prompt.clone().into(), args.max_tokens, &sampling, &args.sampling.stop, |piece| {
            if !run.json && written.is_ok() {
                written = print(piece);
            }
        })?;
    written?;
    if let Some(path) = &args.save {
        let tokens = [prompt, generation.tokens.clone()].concat();
        busy(format!("writing {}", path.display()), || runtime.save(&tokens, path))?;
    }
    runtime.flush()?;
    if !run.json {
        return print("\n");
    }
    let mut report = report(&generation, &runtime);
    if args.resume.is_some() {
        report["timings"]["resume_s"] = json!(resume.as_secs_f64());
    }
    print_json(&report)
}

/// The JSON object of a generation.
pub fn report(generation: &Generation, runtime: &Runtime) -> Value {
    let mut report = json!({
        "text": generation.text,
        "tokens": generation.tokens,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "finish_reason": generation.finish,
        "timings": {
            "load_s": runtime.load_time.as_secs_f64(),
            "prefill_s": generation.prefill.as_secs_f64(),
            "decode_s": generation.decode.as_secs_f64(),
        },
    });
    if generation.logprobs.iter().any(Option::is_some) {
        report["logprobs"] = json!(generation.logprobs);
    }
    report
}
