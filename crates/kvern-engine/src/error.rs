//! What the engine can refuse.

/// Why a request or a step failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model.
    #[error(transparent)]
    Model(#[from] kvern_models::Error),
    /// The backend.
    #[error(transparent)]
    Backend(#[from] kvern_backend::Error),
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
