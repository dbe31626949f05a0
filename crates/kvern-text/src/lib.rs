//! Text in and out: tokenizers, chat templates, incremental detokenizing, stop strings.
//!
//! **What.** A [`Tokenizer`] comes from a directory's `tokenizer.json` or is rebuilt from GGUF metadata; a [`ChatTemplate`] renders
//! messages as the model was trained to see them; a [`TextStream`] turns token ids back into text piece by piece.
//!
//! **Why.** Everything between these borders is token ids. Text that a user wrote and control tokens are told apart here, and only here.
//!
//! **Invariants.** Emitted text is valid UTF-8 and never taken back; the pieces of a stream, joined, are what decoding all ids at once
//! gives, cut before the first stop string.
//!
//! ```no_run
//! let checkpoint = kvern_weights::Checkpoint::open("model.gguf".as_ref())?;
//! let text = kvern_text::Text::load(checkpoint.source())?;
//! let ids = text.tokenizer.encode("Hello", true)?;
//! assert_eq!(text.tokenizer.decode(&ids)?, "Hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod chat;
mod error;
mod gguf;
mod stream;
mod tokenizer;

pub use chat::{ChatTemplate, Message};
pub use error::Error;
pub use stream::TextStream;
pub use tokenizer::{Text, Tokenizer};
