//! What the engine keeps of rows, and how new rows begin from it.

use kvern_state::{Found, Hit, Identity, Image, PrefixIndex, Row};

use crate::executor::Executor;
use crate::{Engine, Error};

/// Makes images of rows for the index.
fn freezer(executor: &dyn Executor) -> impl FnMut(&Row, &Identity, &[u32]) -> Option<Image> {
    |row, identity, tokens| executor.freeze(row, identity, tokens).ok()
}

impl Engine {
    /// Whose state this engine computes, for a salt.
    pub fn identity(&self, salt: &str) -> Identity {
        Identity { salt: salt.into(), ..self.identity.clone() }
    }

    /// The index of what is kept.
    pub fn prefixes(&mut self) -> &mut PrefixIndex {
        &mut self.index
    }

    /// A row to begin `tokens` with, and how many of them it holds already: at least one is left to compute.
    pub(crate) fn begin(&mut self, tokens: &[u32], salt: &str) -> (Row, usize) {
        let identity = self.identity(salt);
        while let Some(Hit { tokens: cached, state }) = self.index.lookup(&identity, tokens) {
            match state {
                Found::Row(row) => return (row, cached),
                Found::Image(image) => {
                    if let Ok(mut row) = self.executor.thaw(self.batch.pool(), &image, &identity) {
                        self.index.insert(&identity, image.tokens(), row.fork());
                        if row.truncate(cached).is_ok() {
                            return (row, cached);
                        }
                    } else if self.make_room() {
                        continue;
                    }
                    break;
                }
            }
        }
        (self.batch.pool().row(), 0)
    }

    /// Keeps the state of a running row as it is now.
    pub(crate) fn keep(&mut self, row: usize) {
        let (state, sequence) = (&self.batch.rows()[row], &self.running[row]);
        let identity = self.identity(&sequence.salt);
        self.index.insert(&identity, &sequence.tokens[..state.len()], state.fork());
    }

    /// Gives up the pages of what was kept longest without use. False when nothing is kept in pages.
    pub(crate) fn make_room(&mut self) -> bool {
        let Self { index, executor, .. } = self;
        index.demote(&mut freezer(executor.as_ref()))
    }

    /// Brings what is kept within its limits.
    pub(crate) fn tidy(&mut self) {
        let Self { index, executor, .. } = self;
        index.shrink(&mut freezer(executor.as_ref()));
    }

    /// Writes what is kept to the directory of checkpoints, if there is one, and waits for it.
    ///
    /// # Errors
    /// The first write that failed.
    pub fn flush(&mut self) -> Result<(), Error> {
        let Self { index, executor, .. } = self;
        Ok(index.flush(&mut freezer(executor.as_ref()))?)
    }

    /// The state after `tokens`, or after as many of them as are kept; the others are its pending ones.
    ///
    /// # Errors
    /// [`Error::NoState`] when nothing of them is kept, or the backend's.
    pub fn image(&mut self, tokens: &[u32], salt: &str) -> Result<Image, Error> {
        // A row begins with one token left to compute; here that is one that nobody asks for.
        let (row, cached) = self.begin(&[tokens, &[0]].concat(), salt);
        if cached == 0 {
            return Err(Error::NoState { tokens: tokens.len() });
        }
        let (done, pending) = tokens.split_at(cached);
        Ok(self.executor.freeze(&row, &self.identity(salt), done)?.with_pending(pending))
    }

    /// Keeps the state of an image, so that requests whose prompts begin with its tokens need not compute them. The image stays as it is.
    ///
    /// # Errors
    /// [`kvern_state::ImageError::Mismatch`] for state of another model or policy, [`kvern_state::Error::Budget`] when there is no room for it.
    pub fn restore(&mut self, image: &Image) -> Result<(), Error> {
        let identity = self.identity(&image.manifest().identity.salt);
        image.check(self.batch.pool(), &identity)?;
        loop {
            match self.executor.thaw(self.batch.pool(), image, &identity) {
                Ok(row) => {
                    self.index.insert(&identity, image.tokens(), row);
                    return Ok(());
                }
                Err(error) if !self.make_room() => return Err(error.into()),
                Err(_) => {}
            }
        }
    }
}
