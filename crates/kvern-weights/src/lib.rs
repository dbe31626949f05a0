//! Model files: named tensors and metadata from GGUF files and safetensors directories, plain or MLX-quantized.
//!
//! **Why.** A model file comes from somebody else. Every count, length, offset and shape in it is checked before anything is
//! allocated or read; a tensor that the model does not find, or that no part of the model asked for, is an error that names it,
//! since both mean that the graph and the file disagree.
//!
//! **Invariants.** A [`Tensor`] lies wholly inside its mapped file and its byte length fits its shape. All quantized formats are
//! read through one form, [`Affine`] groups: `w = scale * (code - zero) + bias`. Dropping a tensor lets the system reclaim the
//! file pages that it covered, so that a loader which repacks tensor by tensor never holds a model twice.
//!
//! ```no_run
//! let mut checkpoint = kvern_weights::Checkpoint::open("model.gguf".as_ref())?;
//! let norm = checkpoint.take("output_norm.weight", &[576])?.to_vec();
//! checkpoint.finish()?; // names every tensor that was never taken
//! # Ok::<(), kvern_weights::Error>(())
//! ```

mod checkpoint;
mod error;
pub mod gguf;
mod mapping;
mod mlx;
mod quant;
mod safetensors;
mod tensor;

pub use checkpoint::{Checkpoint, Source};
pub use error::Error;
pub use mapping::Mapping;
pub use quant::{Affine, BlockFormat};
pub use tensor::{Encoding, Tensor};
