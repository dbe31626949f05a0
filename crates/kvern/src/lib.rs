//! Kvern as a library: load a model, chat or complete, on this machine.
//!
//! ```no_run
//! use kvern::{Message, Options, Runtime, Sampling};
//! let mut runtime = Runtime::load("smollm2", &Options::default())?;
//! let prompt = runtime.chat_prompt(&[Message::new("user", "What is the capital of France?")])?;
//! let answer = runtime.generate(&prompt, 64, &Sampling::default(), &[], |piece| print!("{piece}"))?;
//! assert_eq!(answer.finish, kvern::Finish::Stop);
//! # Ok::<(), kvern::Error>(())
//! ```
//!
//! [`Runtime`] joins the crates below it: weights, model graph, engine and text. Each of them can be used on its own.

#![forbid(unsafe_code)]

mod builtin;
mod device;
mod error;
mod runtime;

pub use builtin::{Builtin, Cache, builtins};
pub use device::Device;
pub use error::Error;
pub use kvern_engine::{Finish, Sampling};
pub use kvern_models::KvPolicy;
pub use kvern_state::Codec;
pub use kvern_text::Message;
pub use runtime::{Generation, Options, Prompt, Runtime, kv_preset};
