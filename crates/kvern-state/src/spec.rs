//! What a model declares about its state.

use crate::{Codec, Error};

/// A set of layers whose state is paged together. This slice has full attention; other kinds join as groups of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// Number of layers.
    pub layers: usize,
    /// Key/value heads of each layer.
    pub kv_heads: usize,
    /// Values in one head's key.
    pub k_dim: usize,
    /// Values in one head's value.
    pub v_dim: usize,
    /// How keys are stored.
    pub k: Codec,
    /// How values are stored.
    pub v: Codec,
}

impl GroupSpec {
    /// Bytes that one token occupies over all layers of the group.
    pub fn column_bytes(&self) -> usize {
        self.layers * self.kv_heads * (self.k.bytes(self.k_dim) + self.v.bytes(self.v_dim))
    }
}

/// The state of one row: its groups and the page size that they share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSpec {
    page: usize,
    groups: Vec<GroupSpec>,
}

impl StateSpec {
    /// Groups whose pages hold `page` tokens each.
    ///
    /// # Errors
    /// [`Error::Spec`] when `page` is not a power of two or a group has no columns.
    pub fn new(page: usize, groups: Vec<GroupSpec>) -> Result<Self, Error> {
        if !page.is_power_of_two() {
            return Err(Error::Spec { group: 0, what: "a page must hold a power of two of tokens" });
        }
        if let Some(group) = groups.iter().position(|group| group.column_bytes() == 0) {
            return Err(Error::Spec { group, what: "layers, heads and dimensions must not be zero" });
        }
        Ok(Self { page, groups })
    }

    /// Tokens of one page.
    pub fn page(&self) -> usize {
        self.page
    }

    /// The groups.
    pub fn groups(&self) -> &[GroupSpec] {
        &self.groups
    }

    /// Pages of one group that a row of `tokens` tokens holds.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page)
    }

    /// Bytes of one page of a group.
    pub fn page_bytes(&self, group: usize) -> u64 {
        (self.groups[group].column_bytes() * self.page) as u64
    }

    /// Bytes that a row of `tokens` tokens occupies, exactly: whole pages of every group.
    pub fn row_bytes(&self, tokens: usize) -> u64 {
        let pages = self.pages_for(tokens) as u64;
        (0..self.groups.len()).map(|group| pages * self.page_bytes(group)).sum()
    }

    /// The longest row that `bytes` can hold, in tokens.
    pub fn tokens_in(&self, bytes: u64) -> usize {
        let pages = bytes / self.row_bytes(1).max(1);
        usize::try_from(pages).unwrap_or(usize::MAX).saturating_mul(self.page)
    }
}
