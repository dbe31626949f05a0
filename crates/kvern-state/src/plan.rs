//! What one step of a model is to compute, in terms that every backend understands.

/// One row's share of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Index of the row's first token among the step's tokens.
    pub start: usize,
    /// Tokens of the row in this step; may be zero.
    pub count: usize,
    /// Tokens of the row before this step.
    pub past: usize,
    /// Page numbers by group, covering `past + count` tokens.
    pub tables: Vec<Vec<u32>>,
}

/// A page whose bytes must be copied before the step writes into the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The group.
    pub group: usize,
    /// The page to read.
    pub from: u32,
    /// The page to write.
    pub to: u32,
}

/// One step over a ragged batch: no padding, no masks; visibility follows from positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPlan {
    /// Token ids of all rows, one row after another: `[T]`.
    pub tokens: Vec<u32>,
    /// Absolute position of each token: `[T]`.
    pub positions: Vec<u32>,
    /// The rows.
    pub segments: Vec<Segment>,
    /// Indices into the tokens at which logits are wanted, ascending.
    pub outputs: Vec<u32>,
    /// Copies to make first.
    pub copies: Vec<PageCopy>,
}
