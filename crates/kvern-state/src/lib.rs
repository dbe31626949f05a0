//! The state layer: what a running request remembers, as rows of reference-counted pages.
//!
//! **What.** A [`Row`] holds, for each group of layers, a table of [`Page`] handles and a length. A [`Batch`] is a list of rows
//! that changes only by transactions. This crate keeps the books; the bytes behind a page belong to a backend.
//!
//! **Why.** Batching, forking, speculating and rolling back become edits of tables. Nothing is copied but the one tail page that
//! two rows share when one of them appends, and nothing that can fail happens after a transaction's `commit` begins.
//!
//! **Invariants.**
//! - A page is referenced by the tables that hold its handle and by nothing else; dropping the last handle frees it.
//! - `table.len() == pages_for(row.len())` for every group of a row between transactions.
//! - A column below a row's length is never written again while any handle to its page exists elsewhere.
//! - `used + promised <= budget`, in bytes, at all times.
//!
//! ```
//! use kvern_state::{Batch, Codec, GroupSpec, Pool, StateSpec};
//! let group = GroupSpec { layers: 2, kv_heads: 1, k_dim: 16, v_dim: 16, k: Codec::F16, v: Codec::F16 };
//! let pool = Pool::new(StateSpec::new(16, vec![group])?, 1 << 20);
//! let mut batch = Batch::new(&pool);
//! batch.prepare_admit(vec![(pool.row(), 40)])?.commit();
//! let append = batch.prepare_append(&[20])?; // reserves two pages
//! let plan = append.plan(&[7; 20], &[19])?; // what a backend executes
//! assert_eq!(plan.segments[0].tables[0].len(), 2);
//! append.commit();
//! assert_eq!(batch.rows()[0].len(), 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod batch;
mod codec;
mod error;
mod plan;
mod pool;
mod row;
mod spec;

pub use batch::{Admission, Append, Batch, Refused, Round};
pub use codec::Codec;
pub use error::Error;
pub use plan::{PageCopy, Segment, StepPlan};
pub use pool::{Page, Pool, Usage};
pub use row::{Read, Row};
pub use spec::{GroupSpec, StateSpec};
