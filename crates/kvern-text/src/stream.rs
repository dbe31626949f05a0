//! [`TextStream`]: token ids in, text out, piece by piece.
//!
//! Text is decoded in a window of the last few tokens, because a token may be part of a character, and some decoders treat the
//! beginning of a text in a special way. A piece is emitted when its characters are complete and it cannot be the beginning of a stop
//! string any more.
//!
//! ```
//! # fn f(tokenizer: &kvern_text::Tokenizer, ids: &[u32]) -> Result<(), kvern_text::Error> {
//! let mut stream = kvern_text::TextStream::new(vec!["\n\n".into()]);
//! for &id in ids {
//!     print!("{}", stream.push(tokenizer, id)?);
//!     if stream.stopped() {
//!         break;
//!     }
//! }
//! print!("{}", stream.finish());
//! # Ok(()) }
//! ```

use crate::{Error, Tokenizer};

/// A character has at most four bytes, so more undecodable tokens than this are not a character that is still coming.
const INCOMPLETE: usize = 4;

/// Turns token ids into text as they come.
#[derive(Debug, Default)]
pub struct TextStream {
    /// The window: ids whose text was emitted (context), then ids whose text was not.
    ids: Vec<u32>,
    /// Number of context ids.
    context: usize,
    /// Decoded text that may begin a stop string.
    held: String,
    stops: Vec<String>,
    stopped: bool,
}

impl TextStream {
    /// A stream that ends before the first of `stops`; empty strings never match.
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), ..Self::default() }
    }

    /// Whether a stop string has been met; later pieces are empty.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Takes one id; gives the text that is now certain.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String, Error> {
        if self.stopped {
            return Ok(String::new());
        }
        self.ids.push(id);
        let before = tokenizer.decode(&self.ids[..self.context])?;
        let all = tokenizer.decode(&self.ids)?;
        let fresh = self.ids.len() - self.context;
        if all.ends_with(char::REPLACEMENT_CHARACTER) && fresh < INCOMPLETE {
            return Ok(String::new());
        }
        // A decoder that rewrites what it said before would break this; none of a causal text's does.
        if let Some(piece) = all.strip_prefix(before.as_str()) {
            self.held.push_str(piece);
        }
        self.ids.drain(..self.context);
        self.context = self.ids.len();
        Ok(self.release())
    }

    /// Gives what was held back; the stream is over.
    pub fn finish(&mut self) -> String {
        if self.stopped { String::new() } else { std::mem::take(&mut self.held) }
    }

    /// Text that no stop string can reach any more.
    fn release(&mut self) -> String {
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.stopped = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let begins_stop = |tail: &str| self.stops.iter().any(|stop| stop.starts_with(tail));
        let safe = self.held.char_indices().map(|(at, _)| at).find(|&at| begins_stop(&self.held[at..]));
        let rest = self.held.split_off(safe.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }
}
