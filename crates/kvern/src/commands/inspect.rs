//! `kvern inspect`: what a model is and what fits, or what a checkpoint of state holds.

use std::collections::BTreeMap;
use std::path::Path;

use kvern::{Cache, Codec, Error};
use kvern_state::{GroupSpec, Image, Kind, Preset, StateSpec};
use kvern_weights::Checkpoint;
use serde_json::{Value, json};

use crate::cli::RunArgs;
use crate::output::{load_for, print, print_json};

/// Raw codecs of both sides, which are presets too.
const RAW: [Codec; 3] = [Codec::F32, Codec::Bf16, Codec::F16];

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

pub fn run(model: &str, run: &RunArgs) -> Result<(), Error> {
    // A checkpoint of state is a file of its own kind; whatever else a file is, it is a model's.
    if Path::new(model).is_file() && Image::peek(Path::new(model)).is_ok() {
        return inspect_state(Path::new(model), run);
    }
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
    let groups: Vec<Value> = info.spec.groups().iter().map(group_json).collect();
    let raw = RAW.into_iter().map(|codec| (codec.name(), (codec, codec)));
    let coded = Preset::ALL.into_iter().map(|preset| (preset.name.to_owned(), (preset.keys, preset.values)));
    // Only attention has codes.
    let plain = info.spec.groups().iter().all(|group| group.kind != Kind::Latent);
    let presets = raw.chain(coded.filter(|_| plain)).map(|(name, codecs)| {
        let groups = info.spec.groups().iter().map(|group| with_codecs(group, codecs)).collect();
        let spec = StateSpec::new(info.spec.page(), groups);
        let spec = spec.as_ref().unwrap_or(&info.spec);
        // What each further token costs: a window's tokens take the place of others, a recurrent state is one.
        let growing =
            spec.classes().iter().filter(|class| class.columns > 1 && spec.groups()[class.group].window.is_none());
        let bytes: u64 = growing.map(|class| class.bytes() / class.columns as u64).sum();
        (name, bytes, spec.row_bytes(info.context), spec.tokens_in(budget, 1 << 40))
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
        "fingerprint": info.fingerprint,
        "file_bytes": checkpoint.bytes(),
        "weight_bytes": info.weights.bytes,
        "tensors": encodings,
        "groups": groups,
        "state_budget_bytes": budget,
        "presets": presets.iter().map(|(name, bytes, full, tokens)| json!({
            "kv": name, "bytes_per_token": bytes, "bytes_of_full_context": full, "tokens_in_budget": tokens,
        })).collect::<Vec<_>>(),
        "backend": runtime.engine.describe().0,
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
    let kinds: Vec<String> = encodings.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    text += &format!(
        "file {:.1} MiB, packed {:.1} MiB; tensors: {}\n",
        mib(checkpoint.bytes()),
        mib(info.weights.bytes as u64),
        kinds.join(", ")
    );
    for group in info.spec.groups() {
        let planes = group
            .planes
            .iter()
            .map(|plane| format!("{} {}x{} {}", plane.name, plane.heads, plane.dim, plane.codec.name()));
        let window = group.window.map_or(String::new(), |window| format!(", window {}", window.size));
        let planes = planes.collect::<Vec<_>>().join(", ");
        text += &format!("state: {}, {} layers: {planes}{window}\n", group.kind.name(), group.layers);
    }
    text += &format!("\n  --kv   bytes/token   MiB at {}   tokens in {:.0} MiB\n", info.context, mib(budget));
    for (name, bytes, full, tokens) in presets {
        text += &format!("  {name:<6} {bytes:>11}   {:>6.0}   {tokens}\n", mib(full));
    }
    print(&text)
}

/// A group with keys and values in other codecs.
fn with_codecs(group: &GroupSpec, (keys, values): (Codec, Codec)) -> GroupSpec {
    let mut group = GroupSpec { late: None, ..group.clone() };
    if group.kind != Kind::Recurrent {
        for (index, plane) in group.planes.iter_mut().enumerate() {
            plane.codec = if index == 0 { keys } else { values };
        }
    }
    group
}

fn group_json(group: &GroupSpec) -> Value {
    let planes = group.planes.iter().map(
        |plane| json!({ "name": plane.name, "heads": plane.heads, "dim": plane.dim, "codec": plane.codec.name() }),
    );
    json!({
        "kind": group.kind.name(),
        "layers": group.layers,
        "planes": planes.collect::<Vec<_>>(),
        "window": group.window.map(|window| json!({ "size": window.size, "sinks": window.sinks })),
        "late": group.late.as_ref().map(|late| json!({
            "start": late.start, "codecs": late.codecs.iter().map(|codec| codec.name()).collect::<Vec<_>>(),
        })),
        "lag": group.lag,
    })
}

fn inspect_state(path: &Path, run: &RunArgs) -> Result<(), Error> {
    // Every byte is checked, so that what is shown is what can be restored.
    let image = Image::load(path).map_err(kvern_engine::Error::from)?;
    let manifest = image.manifest();
    if run.json {
        return print_json(
            &json!({ "path": path, "bytes": image.bytes(), "state_hash": image.state_hash(), "manifest": manifest }),
        );
    }
    let mut text = format!(
        "{}\ncheckpoint of {} tokens (and {} to follow), {:.1} MiB, every hash right\nmodel {}\npolicy {}\n",
        path.display(),
        manifest.tokens,
        manifest.pending.len(),
        mib(image.bytes()),
        manifest.identity.model,
        manifest.identity.policy,
    );
    for group in &manifest.groups {
        let planes: Vec<String> =
            group.planes.iter().map(|p| format!("{} {}x{} {}", p.name, p.heads, p.dim, p.codec)).collect();
        let from = if group.start > 0 { format!(" from {}", group.start) } else { String::new() };
        text += &format!(
            "{}, {} layers, {} columns{from}: {}\n",
            group.kind,
            group.layers,
            group.columns,
            planes.join(", ")
        );
    }
    print(&text)
}
