//! The engine: requests of token ids in, tokens out.
//!
//! **What.** [`Engine`] owns a model, its state and a running batch. Each [`Engine::step`] runs one ragged forward pass, in which some rows
//! read a piece of their prompt and the others generate a token, and samples.
//!
//! **Why.** Rows never meet inside a backend, so one step may mix them freely: what a row generates does not depend on its company.
//!
//! **Invariants.** An admitted request has all the state it can need promised, so it never fails for want of memory half-way. A row's
//! tokens are a function of its request alone. What is kept of ended rows shortens later ones and changes no bit of them.
//!
//! ```no_run
//! # fn f(mut engine: kvern_engine::Engine) -> Result<(), kvern_engine::Error> {
//! let id = engine.submit(kvern_engine::Request::new(vec![1, 2, 3], 16))?;
//! while !engine.is_idle() {
//!     for event in engine.step()? {
//!         println!("{id:?}: {event:?}");
//!     }
//! }
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

mod engine;
mod error;
mod executor;
mod memory;
mod prefixes;
mod sampler;

pub use engine::{Engine, EngineOptions, Event, Finish, Request, RequestId, Token};
pub use error::Error;
pub use memory::available as available_memory;
pub use sampler::{Sampling, log_softmax, sample};
