//! Everything that can go wrong between a command and an answer.

use std::path::PathBuf;

/// Why a model could not be fetched, loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The weights' files.
    #[error(transparent)]
    Weights(#[from] kvern_weights::Error),
    /// The model.
    #[error(transparent)]
    Model(#[from] kvern_models::Error),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] kvern_engine::Error),
    /// Tokenizer or template.
    #[error(transparent)]
    Text(#[from] kvern_text::Error),
    /// The CPU backend.
    #[error(transparent)]
    Cpu(#[from] kvern_cpu::Error),
    /// The GPU backend.
    #[error(transparent)]
    Cuda(#[from] kvern_cuda::Error),
    /// Nothing of this name.
    #[error("no model `{name}`: it is neither a file, nor a directory, nor one of {}. {hint}", known.join(", "))]
    NoModel {
        /// What was asked for.
        name: String,
        /// Names that `pull` knows.
        known: Vec<&'static str>,
        /// What to do instead.
        hint: &'static str,
    },
    /// A file or directory of ours cannot be read or written.
    #[error("cannot {action} {path}: {source}{hint}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
        /// What to do, beginning with a separator; may be empty.
        hint: &'static str,
    },
    /// A model could not be fetched.
    #[error("cannot fetch `{name}`: {what}")]
    Fetch {
        /// The model.
        name: &'static str,
        /// What went wrong.
        what: String,
    },
    /// A device that this build or machine does not have.
    #[error("device `{asked}` is not available: {what}")]
    Device {
        /// What was asked for.
        asked: String,
        /// Why not, and what there is.
        what: &'static str,
    },
    /// A `--kv` preset that does not exist.
    #[error("`{asked}` is no --kv preset; there are {}", known.join(", "))]
    Preset {
        /// What was asked for.
        asked: String,
        /// What there is.
        known: Vec<&'static str>,
    },
    /// An input file is not what a command needs.
    #[error("{path} is not {expected}: {what}")]
    Input {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// What is wrong with it.
        what: String,
    },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>, source: std::io::Error) -> Self {
        Self::Io { action, path: path.into(), source, hint: "" }
    }
}
