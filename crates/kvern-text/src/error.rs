//! What can be wrong with tokenizers and templates.

use std::path::PathBuf;

/// Why text could not be turned into tokens or back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A tokenizer file is missing or damaged.
    #[error("cannot read the tokenizer {path}: {what}")]
    File {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        what: String,
    },
    /// GGUF metadata of another type than expected.
    #[error(transparent)]
    Weights(#[from] kvern_weights::Error),
    /// A GGUF tokenizer that cannot be rebuilt.
    #[error("the file's tokenizer has {key} `{found}`; Kvern rebuilds {known}")]
    Unknown {
        /// The metadata key.
        key: &'static str,
        /// Its value.
        found: String,
        /// What could be rebuilt.
        known: &'static str,
    },
    /// Tokenizing or detokenizing failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// The model has no chat template.
    #[error("this model has no chat template; use `generate` for plain completion")]
    NoTemplate,
    /// The chat template failed, or refused the messages.
    #[error("chat template: {0}")]
    Template(String),
}

impl From<tokenizers::Error> for Error {
    fn from(error: tokenizers::Error) -> Self {
        Self::Tokenizer(error.to_string())
    }
}
