//! What can be wrong with a model.

/// Why a model could not be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The weights' files.
    #[error(transparent)]
    Weights(#[from] kvern_weights::Error),
    /// The backend.
    #[error(transparent)]
    Backend(#[from] kvern_backend::Error),
    /// The state that the configuration implies.
    #[error(transparent)]
    State(#[from] kvern_state::Error),
    /// No graph of this name.
    #[error("the architecture `{found}` is not supported; Kvern has {}", known.join(", "))]
    Architecture {
        /// The name in the checkpoint.
        found: String,
        /// The names that are known.
        known: Vec<&'static str>,
    },
    /// A configuration field is absent, or has a value that no graph has.
    #[error("configuration field `{field}` should be {expected}, found {found}")]
    Config {
        /// The field.
        field: String,
        /// What would do.
        expected: &'static str,
        /// What the checkpoint has.
        found: String,
    },
    /// The caller stopped the loading.
    #[error("loading was stopped")]
    Stopped,
}
