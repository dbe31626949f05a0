//! Checkpoints of state: whatever the bytes, loading and restoring end in a row or a typed error.
//!
//! The input is tried as a file as it is. Since a file's hashes stop nearly everything, it is also taken as a list of changes to the manifest of a whole
//! file, whose hashes are then made right again: what remains to be refused is what makes no sense.

#![no_main]

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use kvern_backend::{Backend, Reference, freeze, thaw};
use kvern_state::{Codec, GroupSpec, Identity, Image, Manifest, Pool, StateSpec, Window};
use kvern_weights::Mapping;
use libfuzzer_sys::fuzz_target;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use xxhash_rust::xxh3::xxh3_128;

fn spec() -> StateSpec {
    let attention = GroupSpec::attention(2, 1, 4, 16, (Codec::F16, Codec::F32));
    let groups = vec![
        attention.clone().windowed(Window { size: 9, sinks: 2 }),
        attention.clone().late(5, vec![Codec::F32, Codec::Bf16]),
        GroupSpec::recurrent(1, &[("state", 6)]),
        attention.companion(1),
    ];
    StateSpec::new(16, groups).unwrap()
}

fn parse(bytes: Vec<u8>) -> Option<Image> {
    let mapping: Arc<Mapping> = Mapping::from_bytes(Path::new("fuzz.kvern"), bytes);
    Image::parse(&mapping).ok()
}

/// Restores into a small pool; whatever happens, nothing is left in use.
fn restore(image: &Image) {
    let backend = Reference::new();
    let pool = Pool::new(spec(), 1 << 20);
    let mut pages = backend.pages(pool.spec()).unwrap();
    let identity = image.manifest().identity.clone();
    if let Ok(row) = thaw(&backend, &mut pages, &pool, image, &identity) {
        let again = freeze(&backend, &pages, &row, identity, image.tokens()).unwrap();
        assert_eq!(again.state_hash(), image.state_hash());
    }
    assert_eq!(pool.usage().used, 0);
}

/// A whole file with this manifest, as far as its sizes can be met, and right hashes.
fn file(mut manifest: Manifest, data: &[u8]) -> Option<Vec<u8>> {
    let hash = |bytes: &[u8]| format!("{:032x}", xxh3_128(bytes));
    let tokens = vec![7u8; manifest.tokens.min(200) * 4];
    manifest.tokens_hash = hash(&tokens);
    let mut contents: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (index, group) in manifest.groups.iter_mut().enumerate() {
        let stored = group.sinks.checked_add(group.columns.saturating_sub(group.start))?;
        for plane in &mut group.planes {
            let column = plane.heads.checked_mul(plane.dim)?.checked_mul(if plane.codec == "f32@1" { 4 } else { 2 })?;
            let size = group.layers.checked_mul(stored)?.checked_mul(column).filter(|&size| size < 1 << 20)?;
            let bytes: Vec<u8> = data.iter().copied().chain([0]).cycle().take(size).collect();
            plane.hash = hash(&bytes);
            let name = format!("{index}.{}", plane.name);
            // A writer has no two tensors of one name.
            if contents.iter().any(|(other, ..)| *other == name) {
                return None;
            }
            contents.push((name, vec![group.layers, stored, column], bytes));
        }
    }
    let json = serde_json::to_string(&manifest).ok()?;
    let metadata = HashMap::from([("kvern.hash".into(), hash(json.as_bytes())), ("kvern.checkpoint".into(), json)]);
    let mut tensors = vec![("tokens".to_string(), TensorView::new(Dtype::U32, vec![tokens.len() / 4], &tokens).ok()?)];
    for (name, shape, bytes) in &contents {
        tensors.push((name.clone(), TensorView::new(Dtype::U8, shape.clone(), bytes).ok()?));
    }
    safetensors::serialize(tensors, Some(metadata)).ok()
}

fuzz_target!(|input: &[u8]| {
    if let Some(image) = parse(input.to_vec()) {
        restore(&image);
    }
    let pool = Pool::new(spec(), 1 << 20);
    let empty = Image::capture(&pool.row(), Identity::default(), &[], |_| Ok::<(), kvern_state::Error>(())).unwrap();
    let mut manifest = empty.manifest().clone();
    // A row of some tokens that fits, before the changes.
    let [tokens, changes @ ..] = input else { return };
    let tokens = usize::from(*tokens % 40);
    manifest.tokens = tokens;
    for (own, group) in manifest.groups.iter_mut().zip(pool.spec().groups()) {
        own.columns = if own.kind == "recurrent" { usize::from(tokens > 0) } else { group.columns(tokens) };
        own.start = group.window.map_or(0, |window| window.start(own.columns + 1).min(own.columns));
        own.sinks = group.window.map_or(0, |window| window.sinks.min(own.start));
        own.encoded = group.encodes(own.columns);
        for (plane, of) in own.planes.iter_mut().zip(group.planes(own.encoded)) {
            plane.codec = of.codec.version();
        }
    }
    for change in changes.chunks_exact(4) {
        let value = [0, 1, 2, 5, 9, 16, 1 << 16, usize::MAX, usize::MAX / 2][usize::from(change[3]) % 9];
        let groups = manifest.groups.len().max(1);
        let Some(group) = manifest.groups.get_mut(usize::from(change[0]) % groups) else { break };
        let planes = group.planes.len().max(1);
        let plane = group.planes.get_mut(usize::from(change[1]) % planes);
        match (change[2] % 13, plane) {
            (0, _) => group.columns = value,
            (1, _) => group.start = value,
            (2, _) => group.sinks = value,
            (3, _) => group.layers = value,
            (4, _) => group.encoded = !group.encoded,
            (5, _) => group.window = (value > 2).then_some((value, value)),
            (6, _) => group.lag = (value > 2).then_some(value),
            (7, Some(plane)) => plane.dim = value,
            (8, Some(plane)) => plane.heads = value,
            (9, Some(plane)) => plane.codec = ["f32@1", "f16@1", "f16@2", ""][value % 4].into(),
            (10, Some(plane)) => plane.name = ["k", "v", "state", "tokens"][value % 4].into(),
            (11, _) => drop(group.planes.pop()),
            (12, _) => manifest.tokens = value,
            _ => {}
        }
    }
    if let Some(image) = file(manifest, changes).and_then(parse) {
        restore(&image);
    }
});
