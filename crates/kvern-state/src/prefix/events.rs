//! What an index tells whoever wants to know which prefixes it holds: a router in front of several workers, say.
//!
//! A *block* is a page's worth of tokens. Its hash covers the identity and every token up to its end, so equal hashes mean equal prefixes on
//! every worker. A block counts as stored in a tier as long as any entry there holds its columns.

use std::collections::HashMap;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::Identity;
use crate::image::token_bytes;

/// Where a copy of some state is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// In pages, ready to be attended.
    Device,
    /// In the host's memory, as an image.
    Host,
    /// In a checkpoint file.
    Disk,
}

/// A change of what an index holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Blocks that can be reused from now on.
    Stored {
        /// Their hashes, one following on the other.
        blocks: Vec<u64>,
        /// The block before the first.
        parent: Option<u64>,
        /// Their tokens.
        tokens: Vec<u32>,
        /// Tokens of a block.
        size: usize,
        /// Where they are.
        tier: Tier,
        /// The state's group.
        group: usize,
        /// Content hash of an adapter; empty without one.
        adapter: String,
        /// The caller's salt.
        salt: String,
    },
    /// Blocks that cannot be reused from there any more.
    Removed {
        /// Their hashes.
        blocks: Vec<u64>,
        /// Where they were.
        tier: Tier,
        /// The state's group.
        group: usize,
    },
    /// Everything is gone.
    Cleared,
}

/// The blocks of one group that an entry holds: all but those in front of a window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holding {
    pub(crate) group: usize,
    /// Column from which on all are held.
    pub(crate) start: usize,
    /// Column before which they end.
    pub(crate) end: usize,
}

/// Counts blocks by tier and group, and records what changes.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    counts: HashMap<(Tier, usize, u64), u32>,
    pub(crate) events: Vec<Event>,
}

/// Hashes of the whole blocks of some tokens.
pub(crate) fn hashes(identity: &Identity, tokens: &[u32], size: usize) -> Vec<u64> {
    let Identity { model, adapter, policy, salt } = identity;
    // Lengths keep fields apart that would read the same one after another.
    let named = [model, adapter, policy, salt].map(|field| format!("{}:{field}", field.len())).concat();
    let mut hash = xxh3_64(named.as_bytes());
    let blocks = tokens.chunks_exact(size).map(|block| {
        hash = xxh3_64_with_seed(&token_bytes(block), hash);
        hash
    });
    blocks.collect()
}

impl Blocks {
    /// Counts an entry's copy in a tier in or out.
    pub(crate) fn count(
        &mut self,
        identity: &Identity,
        tokens: &[u32],
        size: usize,
        holdings: &[Holding],
        tier: Tier,
        stored: bool,
    ) {
        let hashes = hashes(identity, tokens, size);
        for &Holding { group, start, end } in holdings {
            let mut run: Vec<usize> = Vec::new();
            for block in start.div_ceil(size)..(end / size).min(hashes.len()) {
                let count = self.counts.entry((tier, group, hashes[block])).or_default();
                *count = if stored { *count + 1 } else { *count - 1 };
                if *count == u32::from(stored) {
                    if stored && run.last().is_some_and(|last| last + 1 != block) {
                        self.record(identity, tokens, size, &hashes, std::mem::take(&mut run), (tier, group, stored));
                    }
                    run.push(block);
                }
                if !stored && self.counts[&(tier, group, hashes[block])] == 0 {
                    self.counts.remove(&(tier, group, hashes[block]));
                }
            }
            self.record(identity, tokens, size, &hashes, run, (tier, group, stored));
        }
    }

    fn record(
        &mut self,
        identity: &Identity,
        tokens: &[u32],
        size: usize,
        hashes: &[u64],
        run: Vec<usize>,
        (tier, group, stored): (Tier, usize, bool),
    ) {
        let (Some(&first), Some(&last)) = (run.first(), run.last()) else { return };
        let blocks = run.into_iter().map(|block| hashes[block]).collect();
        self.events.push(if stored {
            Event::Stored {
                blocks,
                parent: first.checked_sub(1).map(|parent| hashes[parent]),
                tokens: tokens[first * size..(last + 1) * size].to_vec(),
                size,
                tier,
                group,
                adapter: identity.adapter.clone(),
                salt: identity.salt.clone(),
            }
        } else {
            Event::Removed { blocks, tier, group }
        });
    }

    pub(crate) fn clear(&mut self) {
        self.counts.clear();
        self.events.push(Event::Cleared);
    }
}
