//! What can be wrong with a model file.

use std::path::PathBuf;

/// Why a model's weights could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file or directory could not be opened or read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// What was being read.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The path holds no model that Kvern knows.
    #[error("{path} is not a model: {expected}")]
    NotAModel {
        /// What was looked at.
        path: PathBuf,
        /// What would have been accepted.
        expected: &'static str,
    },
    /// The file's structure is damaged.
    #[error("{path} is damaged: {what} at byte {offset}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where in the file the damage was noticed.
        offset: u64,
        /// What was wrong.
        what: String,
    },
    /// A JSON file beside the weights is not what it should be.
    #[error("{path} is not valid: {what}")]
    Json {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        what: String,
    },
    /// A metadata entry is absent or of another type.
    #[error("metadata `{key}` should be {expected}, found {found}")]
    Metadata {
        /// The entry's key.
        key: String,
        /// The type or value wanted.
        expected: &'static str,
        /// What the file has.
        found: String,
    },
    /// A tensor's element type is none that Kvern reads.
    #[error("tensor `{name}` has the type {found}, which Kvern does not read")]
    UnknownType {
        /// The tensor.
        name: String,
        /// Its type as the file gives it.
        found: String,
    },
    /// The graph needs a tensor that the file lacks.
    #[error("tensor `{name}` is missing")]
    Missing {
        /// The tensor.
        name: String,
    },
    /// The file has tensors that the graph never asked for.
    #[error("{count} tensors belong to no part of this model, the first is `{first}`")]
    Unused {
        /// How many.
        count: usize,
        /// The first of them in name order.
        first: String,
    },
    /// A tensor's shape is not what the configuration implies.
    #[error("tensor `{name}` should have the shape {expected:?}, found {found:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// The shape that the configuration implies, outermost first.
        expected: Vec<usize>,
        /// The shape in the file, outermost first.
        found: Vec<usize>,
    },
    /// A quantized tensor's codes, scales and biases do not fit each other.
    #[error("quantized tensor `{name}`: {what}")]
    Quantization {
        /// The tensor.
        name: String,
        /// What does not fit.
        what: String,
    },
}
