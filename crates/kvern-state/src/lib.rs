//! The state layer: what a running request remembers, as rows of reference-counted pages.
//!
//! **What.** A [`Row`] holds, for each group of layers, references to pages and a number of columns, or the slot of a recurrent state. A [`Batch`]
//! is a list of rows that changes only by transactions. This crate keeps the books; the bytes behind a page belong to a backend.
//!
//! **Why.** Batching, forking, speculating and rolling back become edits of tables. Nothing is copied but the one tail page that
//! two rows share when one of them appends, and nothing that can fail happens after a transaction's `commit` begins.
//!
//! **Invariants.**
//! - A page is referenced by the lists that count it and by nothing else; dropping the last frees it.
//! - Between transactions, a row holds the pages that a later query can see and no others: its bytes are `spec.row_bytes(row.len())`.
//! - A column below a row's length is never written again while anybody else holds its page; a recurrent state is never written again.
//! - `used + promised <= budget`, in bytes, at all times.
//!
//! ```
//! use kvern_state::{Batch, Codec, GroupSpec, Pool, StateSpec};
//! let group = GroupSpec::attention(2, 1, 16, 16, (Codec::F16, Codec::F16));
//! let pool = Pool::new(StateSpec::new(16, vec![group])?, 1 << 20);
//! let mut batch = Batch::new(&pool);
//! batch.prepare_admit(vec![(pool.row(), 40)])?.commit();
//! let append = batch.prepare_append(&[20])?; // reserves two pages
//! let plan = append.plan(&[7; 20], &[19])?; // what a backend executes
//! assert_eq!(plan.fresh.len(), 2);
//! append.commit();
//! assert_eq!(batch.rows()[0].len(), 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod batch;
mod codec;
mod columns;
mod error;
mod image;
mod plan;
mod pool;
mod prefix;
mod row;
mod slots;
mod spec;

pub use batch::{Admission, Append, Batch, Refused, Round};
pub use codec::{Codec, Coding, MIDDLE, Preset, Scale, rotation};
pub use columns::Read;
pub use error::Error;
pub use image::{GroupManifest, Identity, Image, ImageError, Manifest, Piece, PlaneManifest, Stretch};
pub use plan::{Columns, Draw, PageCopy, PageId, Pending, Segment, Span, States, StepPlan, Table, View, Visible};
pub use pool::{PageList, Pool, Usage};
pub use prefix::{Event, Found, Freeze, Hit, Limits, PrefixIndex, Tier};
pub use row::Row;
pub use spec::{Class, Demand, GroupSpec, Kind, Late, Plane, Slot, StateSpec, Window};
