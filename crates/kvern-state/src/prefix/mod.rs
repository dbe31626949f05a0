//! The prefix index: rows that have been computed, by their tokens, so that a later row can begin where they are.
//!
//! **What.** An entry is a frozen row with its tokens and [`Identity`]. It has a copy in one or more tiers: as a [`Row`] whose pages it shares with
//! running rows, as an [`Image`] in the host's memory, as a checkpoint file. A lookup gives the state of the longest prefix at which every
//! group of the row can resume: anywhere in a row of full attention, at an entry's own end where there are windows that have moved on or
//! recurrent states.
//!
//! **Why entries are rows.** A row is already the thing that shares pages, drops the front of a window, and knows where it can be cut. The index
//! adds a tree and a budget, and no second notion of a block.
//!
//! **Invariants.** Tokens are compared, not only hashed. A file is an entry's copy only once it is whole. Each tier keeps within its bytes; what leaves
//! one moves to the next if that has room, the least recently used first.
//!
//! ```
//! use kvern_state::{Codec, GroupSpec, Identity, Limits, Pool, PrefixIndex, StateSpec};
//! let group = GroupSpec::attention(1, 1, 16, 16, (Codec::F16, Codec::F16));
//! let pool = Pool::new(StateSpec::new(16, vec![group])?, 1 << 20);
//! let mut index = PrefixIndex::new(pool.spec(), Limits::default())?;
//! assert!(index.lookup(&Identity::default(), &[1, 2, 3]).is_none());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod events;
mod tree;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_128;

use self::events::{Blocks, Holding};
pub use self::events::{Event, Tier};
use self::tree::{Id, Tree};
use self::writer::{Writer, Written};
use crate::image::{PARTIAL, token_bytes};
use crate::{GroupSpec, Identity, Image, ImageError, Kind, PageId, Row, StateSpec};

/// The ending of checkpoint files.
const ENDING: &str = "kvern";
/// When a file that is still being written has been left behind.
const ABANDONED: Duration = Duration::from_hours(1);

/// How much an index may hold.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Bytes of pages that entries hold, shared or not.
    pub device: u64,
    /// Bytes of images in memory.
    pub host: u64,
    /// Bytes of checkpoint files.
    pub disk: u64,
    /// Where checkpoint files are, and those of earlier runs are found again; without it there are none.
    pub directory: Option<PathBuf>,
}

/// State that a lookup found.
#[derive(Debug)]
pub struct Hit {
    /// Tokens that need not be computed.
    pub tokens: usize,
    /// Their state.
    pub state: Found,
}

/// Where the state is.
#[derive(Debug)]
pub enum Found {
    /// A row of exactly those tokens, sharing the entry's pages.
    Row(Row),
    /// An image of at least those tokens, from which a row is to be restored and cut.
    Image(Arc<Image>),
}

#[derive(Debug)]
struct Entry {
    identity: Arc<Identity>,
    tokens: Arc<[u32]>,
    device: Option<Row>,
    host: Option<Arc<Image>>,
    /// On its way to the disk.
    leaving: Option<Arc<Image>>,
    disk: Option<(PathBuf, u64)>,
    /// When it was last wanted.
    used: u64,
}

impl Entry {
    fn is_gone(&self) -> bool {
        self.device.is_none() && self.host.is_none() && self.leaving.is_none() && self.disk.is_none()
    }

    fn is_in(&self, tier: Tier) -> bool {
        match tier {
            Tier::Device => self.device.is_some(),
            Tier::Host => self.host.is_some(),
            Tier::Disk => self.disk.is_some(),
        }
    }
}

/// Makes an image of an entry's row; nothing when that fails, and the entry is lost.
pub type Freeze<'a> = &'a mut dyn FnMut(&Row, &Identity, &[u32]) -> Option<Image>;

/// Frozen rows by their tokens.
#[derive(Debug)]
pub struct PrefixIndex {
    spec: StateSpec,
    limits: Limits,
    trees: HashMap<Arc<Identity>, Tree>,
    entries: BTreeMap<Id, Entry>,
    /// References that entries have to pages.
    held: HashMap<PageId, u32>,
    bytes: [u64; 3],
    writer: Option<Writer>,
    clock: u64,
    next: Id,
    blocks: Option<Blocks>,
    failures: Vec<ImageError>,
}

impl PrefixIndex {
    /// An index over the files that its directory holds, if it has one.
    ///
    /// # Errors
    /// [`ImageError::Io`] when the directory cannot be made or read.
    pub fn new(spec: &StateSpec, limits: Limits) -> Result<Self, ImageError> {
        let mut index = Self {
            spec: spec.clone(),
            limits,
            trees: HashMap::new(),
            entries: BTreeMap::new(),
            held: HashMap::new(),
            bytes: [0; 3],
            writer: None,
            clock: 0,
            next: 0,
            blocks: None,
            failures: Vec::new(),
        };
        if let Some(directory) = index.limits.directory.clone() {
            let io = |action| {
                let path = directory.clone();
                move |source| ImageError::Io { action, path, source }
            };
            fs::create_dir_all(&directory).map_err(io("make"))?;
            index.writer = Some(Writer::new().map_err(io("write to"))?);
            let mut files = Vec::new();
            for file in fs::read_dir(&directory).map_err(io("read"))? {
                let path = file.map_err(io("read"))?.path();
                let Ok(metadata) = fs::metadata(&path) else { continue };
                let Ok(modified) = metadata.modified() else { continue };
                match path.extension().and_then(|ending| ending.to_str()) {
                    Some(ENDING) => files.push((modified, metadata.len(), path)),
                    // What a process that died was writing; a young one may belong to a process that lives.
                    Some(PARTIAL) if modified.elapsed().is_ok_and(|age| age > ABANDONED) => {
                        let _ = fs::remove_file(&path);
                    }
                    _ => {}
                }
            }
            files.sort();
            for (_, bytes, path) in files {
                match Image::peek(&path) {
                    Ok((manifest, tokens)) => {
                        let id = index.entry(&manifest.identity, &tokens);
                        index.set_disk(id, Some((path, bytes)));
                    }
                    // A file of another program or of an interrupted one is left where it is.
                    Err(error) => index.failures.push(error),
                }
            }
            index.shrink_disk();
        }
        Ok(index)
    }

    /// Records what changes from now on, for [`Self::events`].
    pub fn watch(&mut self) {
        self.blocks.get_or_insert_default();
    }

    /// What has changed since the last call.
    pub fn events(&mut self) -> Vec<Event> {
        self.blocks.as_mut().map(|blocks| std::mem::take(&mut blocks.events)).unwrap_or_default()
    }

    /// Files that could not be written or read since the last call. Their entries are gone.
    pub fn failures(&mut self) -> Vec<ImageError> {
        self.poll(false);
        std::mem::take(&mut self.failures)
    }

    /// Bytes held in a tier.
    pub fn bytes(&self, tier: Tier) -> u64 {
        self.bytes[tier as usize]
    }

    /// Entries, in whatever tier.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True without entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Finds the longest reusable prefix of `tokens` that leaves at least one of them to compute, and makes its entry the most recently used.
    pub fn lookup(&mut self, identity: &Identity, tokens: &[u32]) -> Option<Hit> {
        self.poll(false);
        let wanted = &tokens[..tokens.len().saturating_sub(1)];
        loop {
            let tree = self.trees.get(identity)?;
            let fits = |id: Id, len: usize| self.can_stand(&self.entries[&id], len);
            let (id, len) = tree.find(wanted, fits)?;
            self.clock += 1;
            let clock = self.clock;
            let entry = self.entries.get_mut(&id)?;
            entry.used = clock;
            if let Some(row) = &entry.device
                && row.resumable(len)
            {
                let mut row = row.fork();
                if row.truncate(len).is_ok() {
                    return Some(Hit { tokens: len, state: Found::Row(row) });
                }
            }
            if let Some(image) = entry.host.clone().or_else(|| entry.leaving.clone()) {
                return Some(Hit { tokens: len, state: Found::Image(image) });
            }
            let (path, _) = entry.disk.clone()?;
            match Image::load(&path) {
                Ok(image) if *image.tokens() == *entry.tokens && image.resumable(&self.spec, len) => {
                    return Some(Hit { tokens: len, state: Found::Image(Arc::new(image)) });
                }
                outcome => {
                    // Damaged, or another file than the one that was indexed: a miss, and never asked again.
                    self.failures.extend(outcome.err());
                    self.set_disk(id, None);
                    self.forget_if_gone(id);
                }
            }
        }
    }

    /// Whether some copy of an entry can stand for its first `len` tokens.
    fn can_stand(&self, entry: &Entry, len: usize) -> bool {
        let image = entry.host.as_ref().or(entry.leaving.as_ref());
        // What a file holds is read when it is chosen; until then only that much is known.
        let anywhere =
            |group: &GroupSpec| group.kind != Kind::Recurrent && group.window.is_none() && group.late.is_none();
        len == entry.tokens.len()
            || entry.device.as_ref().is_some_and(|row| row.resumable(len))
            || image.is_some_and(|image| image.resumable(&self.spec, len))
            || (entry.disk.is_some() && self.spec.groups().iter().all(anywhere))
    }

    /// Keeps a frozen row for its tokens. Entries that it can stand for are dropped.
    pub fn insert(&mut self, identity: &Identity, tokens: &[u32], row: Row) {
        self.poll(false);
        if tokens.len() != row.len() || tokens.is_empty() || *row.pool().spec() != self.spec {
            return;
        }
        let covers = |longer: &Row, shorter: &Row| longer.min_reusable() <= shorter.min_reusable();
        if let Some(tree) = self.trees.get(identity) {
            // A longer entry may stand for this one already.
            let longer = tree.find(tokens, |id, len| {
                let longer = self.entries[&id].device.as_ref();
                len == tokens.len() && longer.is_some_and(|longer| covers(longer, &row))
            });
            if let Some((id, _)) = longer {
                self.clock += 1;
                if let Some(entry) = self.entries.get_mut(&id) {
                    entry.used = self.clock;
                }
                return;
            }
            let covered = |&(id, len): &(Id, usize)| {
                let shorter = self.entries[&id].device.as_ref();
                len < tokens.len() && shorter.is_some_and(|shorter| covers(&row, shorter))
            };
            let covered: Vec<Id> = tree.prefixes(tokens).filter(covered).map(|(id, _)| id).collect();
            for id in covered {
                self.set_device(id, None);
                self.forget_if_gone(id);
            }
        }
        let id = self.entry(identity, tokens);
        self.set_device(id, Some(row));
    }

    /// The entry of these tokens, new if there is none, as the most recently used.
    fn entry(&mut self, identity: &Identity, tokens: &[u32]) -> Id {
        self.clock += 1;
        let identity = match self.trees.get_key_value(identity) {
            Some((identity, _)) => identity.clone(),
            None => Arc::new(identity.clone()),
        };
        let tree = self.trees.entry(identity.clone()).or_insert_with(Tree::new);
        let existing = tree.prefixes(tokens).next().filter(|(_, len)| *len == tokens.len()).map(|(id, _)| id);
        if let Some(entry) = existing.and_then(|id| self.entries.get_mut(&id)) {
            entry.used = self.clock;
        }
        if let Some(id) = existing {
            return id;
        }
        self.next += 1;
        let (tokens, used) = (Arc::<[u32]>::from(tokens), self.clock);
        tree.insert(&tokens, self.next);
        let entry = Entry { identity, tokens, device: None, host: None, leaving: None, disk: None, used };
        self.entries.insert(self.next, entry);
        self.next
    }

    /// Brings every tier within its limit.
    pub fn shrink(&mut self, freeze: Freeze<'_>) {
        self.poll(false);
        while self.bytes[Tier::Device as usize] > self.limits.device && self.demote(freeze) {}
        self.shrink_host();
        self.shrink_disk();
    }

    /// Frees the pages of the least recently used entry, which moves to the next tier. False when no entry holds pages.
    pub fn demote(&mut self, freeze: Freeze<'_>) -> bool {
        let Some(id) = self.oldest(Tier::Device) else { return false };
        let entry = &self.entries[&id];
        let elsewhere = entry.host.is_some() || entry.leaving.is_some() || entry.disk.is_some();
        let next = self.limits.host > 0 || self.writer.is_some();
        if let (false, true, Some(row)) = (elsewhere, next, &entry.device)
            && let Some(image) = freeze(row, &entry.identity, &entry.tokens)
        {
            self.set_host(id, Some(Arc::new(image)));
        }
        self.set_device(id, None);
        self.forget_if_gone(id);
        self.shrink_host();
        true
    }

    fn shrink_host(&mut self) {
        while self.bytes[Tier::Host as usize] > self.limits.host {
            let Some(id) = self.oldest(Tier::Host) else { return };
            if self.entries[&id].disk.is_none() {
                self.send(id, false);
            }
            self.set_host(id, None);
            self.forget_if_gone(id);
        }
    }

    fn shrink_disk(&mut self) {
        while self.bytes[Tier::Disk as usize] > self.limits.disk {
            let Some(id) = self.oldest(Tier::Disk) else { return };
            self.set_disk(id, None);
            self.forget_if_gone(id);
        }
    }

    /// Queues an entry's image for the disk.
    fn send(&mut self, id: Id, wait: bool) {
        let (Some(writer), Some(directory)) = (&mut self.writer, &self.limits.directory) else { return };
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let Some(image) = entry.host.clone().filter(|image| image.bytes() <= self.limits.disk) else { return };
        let name = xxh3_128(&[format!("{:?}", entry.identity).as_bytes(), &token_bytes(&entry.tokens)].concat());
        let path = directory.join(format!("{name:032x}.{ENDING}"));
        if writer.write(id, image.clone(), path, wait) {
            entry.leaving = Some(image);
        }
    }

    /// Writes every entry that has no file yet, and waits until all are written.
    ///
    /// # Errors
    /// The first failure; [`Self::failures`] has the others.
    pub fn flush(&mut self, freeze: Freeze<'_>) -> Result<(), ImageError> {
        self.poll(false);
        let ids: Vec<Id> = self.entries.keys().copied().collect();
        for id in ids {
            let Some(entry) = self.entries.get(&id) else { continue };
            if self.writer.is_none() || entry.disk.is_some() || entry.leaving.is_some() {
                continue;
            }
            let had = entry.host.clone();
            let image = had.clone().or_else(|| {
                entry.device.as_ref().and_then(|row| freeze(row, &entry.identity, &entry.tokens)).map(Arc::new)
            });
            self.set_host(id, image);
            self.send(id, true);
            self.set_host(id, had);
        }
        self.poll(true);
        self.shrink_disk();
        if self.failures.is_empty() { Ok(()) } else { Err(self.failures.remove(0)) }
    }

    /// Takes note of what has been written.
    fn poll(&mut self, wait: bool) {
        while let Some(Written { id, path, outcome }) = self.writer.as_mut().and_then(|writer| writer.next(wait)) {
            if let Some(entry) = self.entries.get_mut(&id) {
                entry.leaving = None;
            } else {
                // The entry was cleared meanwhile.
                let _ = fs::remove_file(&path);
                continue;
            }
            match outcome {
                Ok(bytes) => self.set_disk(id, Some((path, bytes))),
                Err(error) => self.failures.push(error),
            }
            self.shrink_disk();
            self.forget_if_gone(id);
        }
    }

    /// Drops every entry and its file.
    pub fn clear(&mut self) {
        self.poll(true);
        for (path, _) in self.entries.values().filter_map(|entry| entry.disk.as_ref()) {
            let _ = fs::remove_file(path);
        }
        self.entries.clear();
        self.trees.clear();
        self.held.clear();
        self.bytes = [0; 3];
        if let Some(blocks) = &mut self.blocks {
            blocks.clear();
        }
    }

    fn oldest(&self, tier: Tier) -> Option<Id> {
        let there = self.entries.iter().filter(|(_, entry)| entry.is_in(tier));
        there.min_by_key(|(_, entry)| entry.used).map(|(id, _)| *id)
    }

    fn set_device(&mut self, id: Id, row: Option<Row>) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        for (row, stored) in [(entry.device.take(), false), (row, true)] {
            let Some(row) = row else { continue };
            for group in 0..self.spec.groups().len() {
                let pages = row.pages(group);
                for &id in pages.ids() {
                    let page = PageId { class: pages.class(), id };
                    let count = self.held.entry(page).or_default();
                    *count = if stored { *count + 1 } else { *count - 1 };
                    let bytes = self.spec.classes()[page.class].bytes();
                    match (stored, *count) {
                        (true, 1) => self.bytes[Tier::Device as usize] += bytes,
                        (false, 0) => {
                            self.bytes[Tier::Device as usize] -= bytes;
                            self.held.remove(&page);
                        }
                        _ => {}
                    }
                }
            }
            if let Some(blocks) = &mut self.blocks {
                let held = holdings(&self.spec, |group| row.columns(group));
                blocks.count(&entry.identity, &entry.tokens, self.spec.page(), &held, Tier::Device, stored);
            }
            entry.device = stored.then_some(row);
        }
    }

    fn set_host(&mut self, id: Id, image: Option<Arc<Image>>) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        for (image, stored) in [(entry.host.take(), false), (image, true)] {
            let Some(image) = image else { continue };
            let bytes = &mut self.bytes[Tier::Host as usize];
            *bytes = if stored { *bytes + image.bytes() } else { *bytes - image.bytes() };
            if let Some(blocks) = &mut self.blocks {
                let groups = &image.manifest().groups;
                let held = holdings(&self.spec, |group| groups[group].columns);
                blocks.count(&entry.identity, &entry.tokens, self.spec.page(), &held, Tier::Host, stored);
            }
            entry.host = stored.then_some(image);
        }
    }

    fn set_disk(&mut self, id: Id, file: Option<(PathBuf, u64)>) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        for (file, stored) in [(entry.disk.take(), false), (file, true)] {
            let Some((path, size)) = file else { continue };
            let bytes = &mut self.bytes[Tier::Disk as usize];
            *bytes = if stored { *bytes + size } else { *bytes - size };
            if let Some(blocks) = &mut self.blocks {
                let held = holdings(&self.spec, |group| self.spec.groups()[group].columns(entry.tokens.len()));
                blocks.count(&entry.identity, &entry.tokens, self.spec.page(), &held, Tier::Disk, stored);
            }
            if !stored {
                let _ = fs::remove_file(&path);
            }
            entry.disk = stored.then_some((path, size));
        }
    }

    fn forget_if_gone(&mut self, id: Id) {
        if let Some(entry) = self.entries.get(&id).filter(|entry| entry.is_gone()) {
            let (identity, tokens) = (entry.identity.clone(), entry.tokens.clone());
            self.entries.remove(&id);
            if let Some(tree) = self.trees.get_mut(&identity) {
                tree.remove(&tokens);
                if tree.is_empty() {
                    self.trees.remove(&identity);
                }
            }
        }
    }
}

/// What groups with columns hold of so many: all that the next query sees, sinks aside.
fn holdings(spec: &StateSpec, columns: impl Fn(usize) -> usize) -> Vec<Holding> {
    let groups = spec.groups().iter().enumerate().filter(|(_, spec)| spec.kind != Kind::Recurrent);
    groups
        .map(|(group, spec)| {
            let end = columns(group);
            Holding { group, start: spec.first_in_view(end), end }
        })
        .collect()
}
