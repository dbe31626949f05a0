//! Freezing rows: state out of a backend's pages into an [`Image`], and back.
//!
//! ```
//! use kvern_backend::{Backend, Reference, freeze, thaw};
//! use kvern_state::{Codec, GroupSpec, Identity, Pool, StateSpec};
//! let group = GroupSpec::attention(2, 1, 16, 16, (Codec::F16, Codec::F16));
//! let pool = Pool::new(StateSpec::new(16, vec![group])?, 1 << 20);
//! let backend = Reference::new();
//! let mut pages = backend.pages(pool.spec())?;
//! let image = freeze(&backend, &pages, &pool.row(), Identity::default(), &[])?;
//! assert_eq!(thaw(&backend, &mut pages, &pool, &image, &Identity::default())?.len(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use kvern_state::{Identity, Image, Pool, Row};

use crate::{Backend, Error, Part};

/// Copies a row's state out. The row is as it was, and may have company in its pages.
///
/// # Errors
/// The backend's, or [`kvern_state::Error::Count`] when `tokens` are not as many as the row's.
pub fn freeze<B: Backend>(
    backend: &B,
    pages: &B::Pages,
    row: &Row,
    identity: Identity,
    tokens: &[u32],
) -> Result<Image, Error> {
    let tables: Vec<_> = (0..row.pool().spec().groups().len()).map(|group| row.table(group)).collect();
    Image::capture(row, identity, tokens, |piece| {
        let part = Part { layer: piece.layer, plane: piece.plane };
        backend.export(pages, part, &tables[piece.group], piece.columns, piece.bytes)
    })
}

/// A row with an image's state, which stays as it is and may be restored again.
///
/// # Errors
/// [`Error::Image`] when it does not fit the pool or the identity, or the backend's. No page is kept then.
pub fn thaw<B: Backend>(
    backend: &B,
    pages: &mut B::Pages,
    pool: &Pool,
    image: &Image,
    identity: &Identity,
) -> Result<Row, Error> {
    let (row, pieces) = image.row(pool, identity)?;
    let tables: Vec<_> = (0..pool.spec().groups().len()).map(|group| row.table(group)).collect();
    for piece in pieces {
        let part = Part { layer: piece.layer, plane: piece.plane };
        backend.import(pages, part, &tables[piece.group], piece.columns, piece.bytes)?;
    }
    Ok(row)
}
