//! The layer table of `docs/architecture.md`: no crate imports one above it.

use std::fs;
use std::path::PathBuf;

/// From the lowest layer to the highest; the same order as in the table.
const LAYERS: [&str; 10] = [
    "kvern-base",
    "kvern-weights",
    "kvern-state",
    "kvern-backend",
    "kvern-cpu",
    "kvern-cuda",
    "kvern-models",
    "kvern-text",
    "kvern-engine",
    "kvern",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Crates of ours that a manifest names under `[dependencies]`; tests may use what they like.
fn imports(manifest: &str) -> Vec<String> {
    let section = manifest.split("\n[").find(|section| section.starts_with("dependencies]")).unwrap_or_default();
    let names = section.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| name.starts_with("kvern")).map(String::from).collect()
}

#[test]
fn no_crate_imports_upwards() {
    let mut found: Vec<String> = fs::read_dir(root().join("crates"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    let mut known = LAYERS.map(String::from).to_vec();
    known.sort();
    assert_eq!(found, known, "every crate has its place in the table");
    for (layer, name) in LAYERS.iter().enumerate() {
        let manifest = fs::read_to_string(root().join("crates").join(name).join("Cargo.toml")).unwrap();
        for import in imports(&manifest) {
            let below = LAYERS.iter().position(|known| *known == import).unwrap();
            assert!(below < layer, "{name} imports {import}, which is not below it");
        }
    }
    // A backend's kernels and the graphs know each other only through the trait.
    let models = fs::read_to_string(root().join("crates/kvern-models/Cargo.toml")).unwrap();
    assert!(!imports(&models).contains(&"kvern-cpu".into()));
}

#[test]
fn the_table_in_the_documentation_is_this_one() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let named: Vec<&str> = rows.filter(|name| LAYERS.contains(name)).collect();
    assert_eq!(named, LAYERS);
}

#[test]
fn unsafe_code_stays_behind_its_fence() {
    for name in LAYERS {
        let directory = root().join("crates").join(name).join("src");
        let fenced = ["kvern-base", "kvern-weights", "kvern-cpu", "kvern-cuda"].contains(&name);
        let forbids = ["lib.rs", "main.rs"]
            .map(|file| directory.join(file))
            .iter()
            .filter(|path| path.exists())
            .all(|path| fs::read_to_string(path).unwrap().contains("#![forbid(unsafe_code)]"));
        assert_eq!(forbids, !fenced, "{name}");
    }
}
