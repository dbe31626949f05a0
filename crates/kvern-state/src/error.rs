//! What a state operation can be refused for. A refused operation has changed nothing.

/// Why a state operation was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The byte budget cannot hold what was asked for.
    #[error("state needs {needed} more bytes, the budget of {budget} bytes has {free} left")]
    Budget {
        /// Bytes asked for.
        needed: u64,
        /// Bytes neither used nor promised.
        free: u64,
        /// The whole budget in bytes.
        budget: u64,
    },
    /// A list has another length than the batch has rows.
    #[error("expected one {what} for each of {expected} rows, found {found}")]
    Count {
        /// What the list holds.
        what: &'static str,
        /// Rows in the batch.
        expected: usize,
        /// Entries in the list.
        found: usize,
    },
    /// A row index is outside the batch or appears twice.
    #[error("row {index} is not one of {rows} rows, or is named twice")]
    NoRow {
        /// The index.
        index: usize,
        /// Rows in the batch.
        rows: usize,
    },
    /// More columns were to be kept than a round appended.
    #[error("row {row} cannot keep {keep} columns of the {appended} that the round appended")]
    Keep {
        /// The row.
        row: usize,
        /// Columns to keep.
        keep: usize,
        /// Columns appended since the round began.
        appended: usize,
    },
    /// An append would cross the length at which a row's encoding changes.
    #[error("{count} tokens cross the start of late encoding, which is {room} tokens away")]
    Crosses {
        /// Tokens to append.
        count: usize,
        /// Tokens that can be appended first.
        room: usize,
    },
    /// A row cannot be cut to a length.
    #[error("a row of {tokens} tokens cannot be cut to {len}: its state there is gone")]
    NotResumable {
        /// The length wanted.
        len: usize,
        /// The row's length.
        tokens: usize,
    },
    /// A draft was begun for rows that have no draft head's state.
    #[error("these rows hold no state of a draft head")]
    NoCompanion,
    /// A row belongs to another pool than the batch.
    #[error("a row of another pool cannot join this batch")]
    ForeignRow,
    /// A plan asks for logits at a token that the step does not have.
    #[error("output {index} is not one of the step's {tokens} tokens")]
    NoToken {
        /// The index.
        index: usize,
        /// Tokens of the step.
        tokens: usize,
    },
    /// A group's geometry cannot be stored.
    #[error("state group {group}: {what}")]
    Spec {
        /// The group's index.
        group: usize,
        /// What is wrong.
        what: &'static str,
    },
}
