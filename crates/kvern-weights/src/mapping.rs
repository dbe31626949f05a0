//! A read-only mapped file.
//!
//! The mapping must not be truncated by another program while it is read: the system answers such a read with SIGBUS, as it
//! does for every program that maps files.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::Error;

/// A file's bytes, or bytes standing in for a file.
#[derive(Debug)]
pub struct Mapping {
    path: PathBuf,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Mapping {
    /// Maps a whole file.
    ///
    /// # Errors
    /// [`Error::Io`] when it cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Arc<Self>, Error> {
        let io = |source| Error::Io { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Ok(Self::from_bytes(path, Vec::new()));
        }
        // SAFETY: the mapping is private and read-only; the module's head states what the file's owner must not do.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Arc::new(Self { path: path.to_path_buf(), bytes: Bytes::Mapped(map) }))
    }

    /// Wraps bytes that are already in memory; `path` is only for messages.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self { path: path.to_path_buf(), bytes: Bytes::Owned(bytes) })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Tells the system that a range will not be read again soon, so that its pages need not stay in memory.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &self.bytes {
            const PAGE: usize = 4096;
            let (start, end) = (range.start.next_multiple_of(PAGE), range.end - range.end % PAGE);
            if start < end {
                // SAFETY: the mapping is read-only and backed by the file, so a dropped page is read from the file again.
                let advice =
                    unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
                // A refusal only costs memory.
                drop(advice);
            }
        }
        #[cfg(not(unix))]
        drop(range);
    }
}
