//! `kvern inspect`: what a model is, and what fits.

use std::collections::BTreeMap;

use kvern::{Cache, Codec, Error};
use kvern_state::{GroupSpec, StateSpec};
use kvern_weights::Checkpoint;
use serde_json::json;

use crate::cli::RunArgs;
use crate::output::{load_for, print, print_json};

/// Presets that the table compares.
const PRESETS: [Codec; 3] = [Codec::F32, Codec::Bf16, Codec::F16];

pub fn run(model: &str, run: &RunArgs) -> Result<(), Error> {
    let path = Cache::from_env().resolve(model, |_| ())?;
    let checkpoint = Checkpoint::open(&path)?;
    let mut encodings = BTreeMap::<String, usize>::new();
    let names: Vec<String> = checkpoint.names().map(String::from).collect();
    for name in &names {
        *encodings.entry(checkpoint.encoding_name(name).unwrap_or_default()).or_default() += 1;
    }
    let runtime = load_for(model, run)?;
    let info = runtime.info();
    let budget = runtime.engine.usage().budget;
    let groups = info.spec.groups().iter().map(|group| {
        json!({
            "kind": "attention", "layers": group.layers, "kv_heads": group.kv_heads,
            "k_dim": group.k_dim, "v_dim": group.v_dim, "k": group.k.raw().name(), "v": group.v.raw().name(),
        })
    });
    let groups: Vec<_> = groups.collect();
    let presets = PRESETS.iter().map(|&codec| {
        let groups: Vec<GroupSpec> =
            info.spec.groups().iter().map(|group| GroupSpec { k: codec, v: codec, ..group.clone() }).collect();
        let bytes: usize = groups.iter().map(GroupSpec::column_bytes).sum();
        let spec = StateSpec::new(info.spec.page(), groups);
        (codec.raw().name(), bytes, spec.map_or(0, |spec| spec.tokens_in(budget)))
    });
    let presets: Vec<_> = presets.collect();
    let report = json!({
        "path": path,
        "architecture": info.architecture,
        "layers": info.layers,
        "hidden": info.hidden,
        "heads": info.heads,
        "vocab": info.vocab,
        "context": info.context,
        "file_bytes": checkpoint.bytes(),
        "weight_bytes": info.weight_bytes,
        "tensors": encodings,
        "groups": groups,
        "state_budget_bytes": budget,
        "presets": presets.iter().map(|(name, bytes, tokens)| json!({
            "kv": name, "bytes_per_token": bytes, "tokens_in_budget": tokens,
        })).collect::<Vec<_>>(),
        "backend": kvern_backend::Backend::describe(runtime.engine.backend()),
    });
    if run.json {
        return print_json(&report);
    }
    let mut text = format!(
        "{}\n{}: {} layers, hidden {}, {} heads, vocabulary {}, context {}\n",
        path.display(),
        info.architecture,
        info.layers,
        info.hidden,
        info.heads,
        info.vocab,
        info.context,
    );
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let kinds: Vec<String> = encodings.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    text += &format!(
        "file {:.1} MiB, packed {:.1} MiB; tensors: {}\n",
        mib(checkpoint.bytes()),
        mib(info.weight_bytes as u64),
        kinds.join(", ")
    );
    for group in info.spec.groups() {
        text += &format!(
            "state: attention, {} layers, {} key/value heads of {} and {}\n",
            group.layers, group.kv_heads, group.k_dim, group.v_dim,
        );
    }
    text += &format!("\n  --kv   bytes/token   tokens in {:.0} MiB\n", mib(budget));
    for (name, bytes, tokens) in presets {
        text += &format!("  {name:<6} {bytes:>11}   {tokens}\n");
    }
    print(&text)
}
