//! What a backend can refuse.

use kvern_base::AllocError;
use kvern_state::{PageId, Segment, StateSpec, StepPlan};

/// Why a backend could not do something.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Memory ran out.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The state layer.
    #[error(transparent)]
    State(#[from] kvern_state::Error),
    /// A checkpoint.
    #[error(transparent)]
    Image(#[from] kvern_state::ImageError),
    /// A device, in its own words.
    #[error(transparent)]
    Device(Box<dyn std::error::Error + Send + Sync>),
    /// An operand has the wrong shape: the graph is wrong.
    #[error("{verb}: {what} should be {expected}, found {found}")]
    Shape {
        /// The verb.
        verb: &'static str,
        /// Which property of which operand.
        what: &'static str,
        /// The value wanted.
        expected: usize,
        /// The value found.
        found: usize,
    },
    /// A verb names a group of another kind than it works on: the graph is wrong.
    #[error("{verb}: group {group} is of the wrong kind ({found})")]
    Kind {
        /// The verb.
        verb: &'static str,
        /// The group.
        group: usize,
        /// What the group is.
        found: &'static str,
    },
    /// The backend has no kernel for this.
    #[error("{what} of {found} is not supported by this backend, which needs {needs}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Its value.
        found: String,
        /// What would do.
        needs: &'static str,
    },
    /// The backend has no kernel for a verb that the graph needs.
    #[error("this backend has no kernel for the verb `{verb}`")]
    Verb {
        /// The verb.
        verb: &'static str,
    },
    /// A key or value has no code. Rows that share the step have lost nothing: a step that fails has not happened.
    #[error(
        "state of row {row} at position {column} in layer {layer} of group {group} is not finite, and cannot be encoded"
    )]
    NotFinite {
        /// The row's index in the batch.
        row: usize,
        /// The group.
        group: usize,
        /// The layer within the group.
        layer: usize,
        /// The row's column.
        column: usize,
    },
    /// A token id is outside the embedding table.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Rows of the table.
        vocab: usize,
    },
}

impl Error {
    /// [`Error::NotFinite`], for a column of a page that a step encodes late.
    pub fn not_finite_in(plan: &StepPlan, spec: &StateSpec, page: PageId, layer: usize, column: usize) -> Self {
        let class = &spec.classes()[page.class];
        let index = |segment: &Segment| {
            let table = &segment.columns(class.group)?.table;
            table.pages().find(|&(_, id)| table.class == page.class && id == page.id).map(|(index, _)| index)
        };
        let found = plan.segments.iter().enumerate().find_map(|(row, segment)| Some((row, index(segment)?)));
        let (row, index) = found.unwrap_or_default();
        Self::NotFinite { row, group: class.group, layer, column: index * class.columns + column }
    }

    /// Checks one property of an operand.
    ///
    /// # Errors
    /// [`Error::Shape`] when the two differ.
    pub fn check(verb: &'static str, what: &'static str, expected: usize, found: usize) -> Result<(), Self> {
        if expected == found { Ok(()) } else { Err(Self::Shape { verb, what, expected, found }) }
    }
}
