//! What the engine can refuse.

/// Why a request or a step failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model.
    #[error(transparent)]
    Model(kvern_models::Error),
    /// The backend.
    #[error(transparent)]
    Backend(kvern_backend::Error),
    /// A key or value of a row is not finite, and its codec has no code for it.
    #[error(
        "state of row {row} at position {column} in layer {layer} of group {group} is not finite, and cannot be encoded; the --kv presets f32, f16 and bf16 store what is"
    )]
    NotFinite {
        /// The row's index among those of a step.
        row: usize,
        /// The group of layers.
        group: usize,
        /// The layer within the group.
        layer: usize,
        /// The column.
        column: usize,
    },
    /// The state layer.
    #[error(transparent)]
    State(#[from] kvern_state::Error),
    /// A checkpoint, or the directory of checkpoints.
    #[error(transparent)]
    Image(#[from] kvern_state::ImageError),
    /// No state is kept for a list of tokens.
    #[error("no state is kept for these {tokens} tokens")]
    NoState {
        /// Number of tokens.
        tokens: usize,
    },
    /// A prompt of no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt leaves no room for a token.
    #[error("the prompt has {tokens} tokens, the context holds {context} (one must be left to generate)")]
    Context {
        /// Tokens of the prompt.
        tokens: usize,
        /// The longest row.
        context: usize,
    },
    /// The request could never be admitted.
    #[error(
        "a request of {tokens} tokens needs {needed} bytes of state, the budget is {budget} bytes; ask for fewer tokens, a smaller --kv preset or a larger --state-memory"
    )]
    Memory {
        /// Tokens of prompt and answer.
        tokens: usize,
        /// Bytes of state.
        needed: u64,
        /// The budget.
        budget: u64,
    },
    /// A token id that the model does not have.
    #[error("token {token} is outside the vocabulary of {vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Number of ids.
        vocab: usize,
    },
    /// A sampling parameter out of range.
    #[error("{name} should be {expected}, found {found}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// Its range.
        expected: &'static str,
        /// Its value.
        found: f32,
    },
}

impl From<kvern_backend::Error> for Error {
    fn from(error: kvern_backend::Error) -> Self {
        match error {
            kvern_backend::Error::NotFinite { row, group, layer, column } => {
                Self::NotFinite { row, group, layer, column }
            }
            error => Self::Backend(error),
        }
    }
}

impl From<kvern_models::Error> for Error {
    fn from(error: kvern_models::Error) -> Self {
        match error {
            kvern_models::Error::Backend(error) => error.into(),
            error => Self::Model(error),
        }
    }
}
