//! The prefix index: against a list of rows that is searched in the plainest way, and at its limits.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use common::{Naive, Store, groups};
use kvern_state::{
    Batch, Codec, Error, Event, Found, GroupSpec, Hit, Identity, Image, ImageError, Limits, Pool, PrefixIndex, Row,
    StateSpec, Tier, Window,
};
use proptest::prelude::*;

/// Rows that are computed by appending tags to a store.
struct World {
    pool: Pool,
    store: Store,
}

impl World {
    fn new(spec: StateSpec) -> Self {
        Self { pool: Pool::new(spec, 1 << 30), store: Store::default() }
    }

    /// Goes on from a row that holds the beginning of `tokens`.
    fn compute(&mut self, row: Row, tokens: &[u32], chunk: usize) -> Row {
        let mut batch = Batch::new(&self.pool);
        batch.prepare_admit(vec![(row, tokens.len())]).unwrap().commit();
        loop {
            let row = &batch.rows()[0];
            let count = chunk.min(tokens.len() - row.len()).min(row.room());
            if count == 0 {
                return batch.extract(0).unwrap();
            }
            let own = &tokens[row.len()..row.len() + count];
            let append = batch.prepare_append(&[count]).unwrap();
            self.store.execute(self.pool.spec(), &append.plan(own, &[]).unwrap());
            append.commit();
        }
    }

    fn index(&self, limits: Limits) -> PrefixIndex {
        PrefixIndex::new(self.pool.spec(), limits).unwrap()
    }
}

fn in_pages() -> Limits {
    Limits { device: u64::MAX, ..Limits::default() }
}

fn full() -> GroupSpec {
    GroupSpec::attention(1, 1, 2, 2, (Codec::F16, Codec::F16))
}

fn world(group: GroupSpec) -> World {
    World::new(StateSpec::new(4, vec![group]).unwrap())
}

/// An image whose bytes do not matter.
fn image(row: &Row, identity: &Identity, tokens: &[u32]) -> Option<Image> {
    let fill = |piece: kvern_state::Piece<&mut [u8]>| -> Result<(), Error> {
        piece.bytes.fill(1);
        Ok(())
    };
    Image::capture(row, identity.clone(), tokens, fill).ok()
}

fn tokens(hit: Option<Hit>) -> usize {
    hit.map_or(0, |hit| hit.tokens)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    /// The longest position at which every group of some kept row can resume, with exactly the state of a row computed afresh.
    #[test]
    fn a_lookup_finds_what_a_search_of_all_rows_would(
        page in prop::sample::select(vec![4usize, 8]),
        choice in prop::collection::vec(0usize..10, 1..4),
        size in 4usize..20,
        start in 1usize..20,
        // Few different tokens, so that prompts share beginnings.
        prompts in prop::collection::vec((prop::collection::vec(0u32..2, 1..40), any::<bool>(), 1usize..30), 1..12),
    ) {
        let mut world = World::new(StateSpec::new(page, groups(&choice, size, start)).unwrap());
        let spec = world.pool.spec().clone();
        let mut index = world.index(in_pages());
        let identities = [false, true].map(|salted| Identity { salt: salted.to_string(), ..Identity::default() });
        let mut all: Vec<(bool, Vec<u32>, Row)> = Vec::new();
        for (prompt, salted, cut) in prompts {
            let identity = &identities[usize::from(salted)];
            let wanted = all.iter().filter(|(other, ..)| *other == salted).flat_map(|(_, tokens, row)| {
                let shared = tokens.iter().zip(&prompt[..prompt.len() - 1]).take_while(|(a, b)| a == b).count();
                (1..=shared).rev().find(|&len| row.resumable(len))
            });
            let (wanted, hit) = (wanted.max().unwrap_or(0), index.lookup(identity, &prompt));
            let found = hit.as_ref().map_or(0, |hit| hit.tokens);
            prop_assert_eq!(found, wanted);
            let row = match hit {
                Some(Hit { state: Found::Row(row), .. }) => row,
                _ => world.pool.row(),
            };
            let mut naive = Naive::new(&spec);
            naive.append(&spec, &prompt[..found], true);
            naive.check(&world.store, &row);
            // What is computed from there is what a cold row computes, at a snapshot on the way and at the end.
            let middle = found.max(cut.min(prompt.len()));
            let row = world.compute(row, &prompt[..middle], 7);
            if middle > 0 {
                index.insert(identity, &prompt[..middle], row.fork());
                all.push((salted, prompt[..middle].to_vec(), row.fork()));
            }
            let row = world.compute(row, &prompt, 5);
            let mut naive = Naive::new(&spec);
            naive.append(&spec, &prompt, true);
            naive.check(&world.store, &row);
            index.insert(identity, &prompt, row.fork());
            all.push((salted, prompt, row));
        }
        let pool = world.pool.clone();
        drop((index, all));
        prop_assert_eq!(pool.usage().used, 0);
    }

    /// Whoever follows the events knows what the index holds.
    #[test]
    fn events_tell_what_is_held_in_every_tier(
        windowed in any::<bool>(),
        steps in prop::collection::vec((prop::collection::vec(0u32..2, 1..40), 0u64..4), 1..25),
    ) {
        let group = if windowed { full().windowed(Window { size: 9, sinks: 0 }) } else { full() };
        let mut world = world(group);
        let mut index = world.index(Limits { device: 600, host: 400, ..Limits::default() });
        index.watch();
        let mut held: BTreeSet<(Tier, usize, u64)> = BTreeSet::new();
        let mut follow = |events: Vec<Event>| {
            for event in events {
                match event {
                    Event::Stored { blocks, parent, tokens, size, tier, group, salt, .. } => {
                        assert_eq!((tokens.len(), size, salt.as_str()), (blocks.len() * size, 4, "s"));
                        assert!(windowed || parent.is_none_or(|parent| held.contains(&(tier, group, parent))));
                        blocks.iter().for_each(|&block| assert!(held.insert((tier, group, block)), "stored twice"));
                    }
                    Event::Removed { blocks, tier, group } => {
                        blocks.iter().for_each(|&block| assert!(held.remove(&(tier, group, block)), "never stored"));
                    }
                    Event::Cleared => held.clear(),
                }
            }
            held.len()
        };
        let identity = Identity { salt: "s".into(), ..Identity::default() };
        for (prompt, demotions) in steps {
            let row = world.compute(world.pool.row(), &prompt, 50);
            index.insert(&identity, &prompt, row);
            for _ in 0..demotions {
                index.demote(&mut image);
            }
            index.shrink(&mut image);
            follow(index.events());
            prop_assert!(index.bytes(Tier::Device) <= 600 && index.bytes(Tier::Host) <= 400);
        }
        while index.demote(&mut |_, _, _| None) {}
        follow(index.events());
        index.clear();
        prop_assert_eq!(index.events().pop(), Some(Event::Cleared));
        prop_assert_eq!(world.pool.usage().used, 0);
    }
}

#[test]
fn what_is_wanted_stays_longest() {
    let mut world = world(full());
    let page = world.pool.spec().classes()[0].bytes();
    // Room for three rows of a page.
    let mut index = world.index(Limits { device: 3 * page, ..Limits::default() });
    let prompt = |i: u32| vec![i, i, i, i];
    let identity = Identity::default();
    let wanted = |index: &mut PrefixIndex, i: u32| tokens(index.lookup(&identity, &[i, i, i, i, 9]));
    for i in 1..=3 {
        let row = world.compute(world.pool.row(), &prompt(i), 4);
        index.insert(&identity, &prompt(i), row);
    }
    assert_eq!(wanted(&mut index, 1), 4, "now the most recently used");
    let row = world.compute(world.pool.row(), &prompt(4), 4);
    index.insert(&identity, &prompt(4), row);
    index.shrink(&mut image);
    let found: Vec<usize> = (1..=4).map(|i| wanted(&mut index, i)).collect();
    assert_eq!(found, [4, 0, 4, 4]);
    assert_eq!((world.pool.usage().used, index.bytes(Tier::Device)), (3 * page, 3 * page));
}

#[test]
fn a_shared_beginning_is_held_and_counted_once() {
    let mut world = world(full());
    let mut index = world.index(in_pages());
    let identity = Identity::default();
    let system: Vec<u32> = (0..40).collect();
    let base = world.compute(world.pool.row(), &system, 40);
    for tail in 100..116 {
        let prompt = [system.clone(), vec![tail; 4]].concat();
        let row = world.compute(base.fork(), &prompt, 4);
        index.insert(&identity, &prompt, row);
    }
    let page = world.pool.spec().classes()[0].bytes();
    assert_eq!(index.bytes(Tier::Device), (10 + 16) * page);
    assert_eq!(world.pool.usage().used, (10 + 16) * page);
}

#[test]
fn every_field_of_an_identity_counts() {
    let mut world = world(full());
    let mut index = world.index(in_pages());
    let of = |model: &str, adapter: &str, policy: &str, salt: &str| Identity {
        model: model.into(),
        adapter: adapter.into(),
        policy: policy.into(),
        salt: salt.into(),
    };
    let row = world.compute(world.pool.row(), &[1, 2, 3, 4], 4);
    index.insert(&of("m", "ab", "p", "c"), &[1, 2, 3, 4], row);
    for other in [of("m", "a", "p", "bc"), of("n", "ab", "p", "c"), of("m", "ab", "q", "c"), of("m", "ab", "p", "")] {
        assert_eq!(tokens(index.lookup(&other, &[1, 2, 3, 4, 5])), 0);
    }
    assert_eq!(tokens(index.lookup(&of("m", "ab", "p", "c"), &[1, 2, 3, 4, 5])), 4);
    assert_eq!(tokens(index.lookup(&of("m", "ab", "p", "c"), &[1, 2, 3, 4])), 3, "one token is left to compute");
    assert_eq!(tokens(index.lookup(&of("m", "ab", "p", "c"), &[])), 0);
}

fn on_disk(directory: &Path) -> Limits {
    Limits { disk: 1 << 20, directory: Some(directory.into()), ..Limits::default() }
}

fn files(directory: &Path) -> Vec<std::path::PathBuf> {
    fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()).collect()
}

#[test]
fn files_are_found_again_and_damaged_ones_are_misses() {
    let directory = tempfile::tempdir().unwrap();
    let mut world = world(full());
    let identity = Identity::default();
    let mut index = world.index(on_disk(directory.path()));
    for first in 1..=3 {
        let prompt = vec![first; 6];
        let row = world.compute(world.pool.row(), &prompt, 6);
        index.insert(&identity, &prompt, row);
        index.shrink(&mut image);
    }
    index.flush(&mut image).unwrap();
    assert_eq!((files(directory.path()).len(), index.bytes(Tier::Device), world.pool.usage().used), (3, 0, 0));
    drop(index);
    // A stray file, one of another program, and what a killed process left.
    fs::write(directory.path().join("notes.txt"), "x").unwrap();
    fs::write(directory.path().join("other.kvern"), "x").unwrap();
    let old = fs::File::create(directory.path().join(".row.kvern.1-0.partial")).unwrap();
    old.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(7200)).unwrap();
    fs::write(directory.path().join(".row.kvern.1-1.partial"), "x").unwrap();
    let mut index = world.index(on_disk(directory.path()));
    assert_eq!(index.len(), 3);
    assert!(matches!(index.failures().as_slice(), [ImageError::Damaged { .. }]));
    let hit = index.lookup(&identity, &[1, 1, 1, 1, 7]).unwrap();
    assert!(matches!(hit, Hit { tokens: 4, state: Found::Image(_) }));
    drop(hit);
    // One file loses its end, another a bit: misses, reported once, gone.
    for path in files(directory.path()).iter().filter(|path| fs::metadata(path).unwrap().len() > 100).take(2) {
        let mut bytes = fs::read(path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    let found: Vec<usize> = (1..=3).map(|first| tokens(index.lookup(&identity, &[first; 9]))).collect();
    assert_eq!(found.iter().filter(|&&found| found == 6).count(), 1, "{found:?}");
    assert_eq!((index.failures().len(), index.len()), (2, 1));
    assert_eq!((1..=3).map(|first| tokens(index.lookup(&identity, &[first; 9]))).sum::<usize>(), 6);
    assert!(index.failures().is_empty(), "a file that is gone is not asked again");
    index.clear();
    let mut left: Vec<_> = files(directory.path()).iter().map(|path| path.file_name().unwrap().to_owned()).collect();
    left.sort();
    let others = [".row.kvern.1-1.partial", "notes.txt", "other.kvern"];
    assert_eq!(left, others, "files of the index are removed, and what a process left behind long ago");
}

#[test]
fn a_write_that_fails_is_reported_and_never_served() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("cache");
    let mut world = world(full());
    let identity = Identity::default();
    let mut index = world.index(on_disk(&place));
    // The directory goes away beneath the index.
    fs::remove_dir_all(&place).unwrap();
    let row = world.compute(world.pool.row(), &[1; 6], 6);
    index.insert(&identity, &[1; 6], row);
    assert!(matches!(index.flush(&mut image), Err(ImageError::Io { .. })));
    assert_eq!(tokens(index.lookup(&identity, &[1; 9])), 6, "the row itself is still there");
    index.shrink(&mut image);
    index.flush(&mut image).ok();
    assert_eq!(tokens(index.lookup(&identity, &[1; 9])), 0);
    assert!(index.is_empty() && world.pool.usage().used == 0);
}

#[test]
fn the_disk_keeps_within_its_limit_too() {
    let directory = tempfile::tempdir().unwrap();
    let mut world = world(full());
    let mut index = world.index(Limits { disk: 4000, ..on_disk(directory.path()) });
    for first in 0..20 {
        let row = world.compute(world.pool.row(), &[first; 6], 6);
        index.insert(&Identity::default(), &[first; 6], row);
        index.flush(&mut image).unwrap();
    }
    let bytes: u64 = files(directory.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(bytes <= 4000 && bytes > 1000 && bytes == index.bytes(Tier::Disk), "{bytes}");
}
