//! What every crate of Kvern shares: element types, aligned buffers and the errors of allocating them.
//!
//! **Why.** Kernels read weights and state in whole vector registers, so their buffers start at a cache-line border;
//! and an engine with byte budgets must learn of a failed allocation as a value, not as an abort.
//!
//! **Invariants.** A [`Buffer`] is aligned to [`ALIGN`] bytes, is fully initialised (zeros) and never moves while it lives.
//!
//! ```
//! use kvern_base::Buffer;
//! let mut buffer = Buffer::zeroed(100)?;
//! buffer.view_mut::<f32>()[3] = 1.5;
//! assert_eq!(buffer.view::<f32>()[3], 1.5);
//! # Ok::<(), kvern_base::AllocError>(())
//! ```

mod buffer;
mod element;

pub use buffer::{ALIGN, AllocError, Buffer};
pub use element::{Element, Raw};
pub use half::{bf16, f16};
