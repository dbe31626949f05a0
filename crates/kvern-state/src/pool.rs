//! The pool: page identities, reference counts and the byte budget.
//!
//! A page's life is its handles' life: [`Pool`] hands out a [`Page`], clones of it share the identity, and dropping the last one
//! returns the identity to the pool. A leak is not representable.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Row, StateSpec};

/// Hands out pages within a byte budget. Clones are the same pool.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    spec: StateSpec,
    budget: u64,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    used: u64,
    promised: u64,
    groups: Vec<Identities>,
}

/// The page numbers of one group: those below `next` are either held or in `free`.
#[derive(Debug, Default)]
struct Identities {
    next: u32,
    free: Vec<u32>,
}

/// What a pool holds at one moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of pages in use.
    pub used: u64,
    /// Bytes promised to admitted rows and not yet in use.
    pub promised: u64,
    /// The whole budget.
    pub budget: u64,
}

/// A shared handle to one page of one group.
#[derive(Debug, Clone)]
pub struct Page(Arc<Held>);

#[derive(Debug)]
struct Held {
    pool: Arc<Shared>,
    group: usize,
    id: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut books = self.pool.books();
        books.used -= self.pool.spec.page_bytes(self.group);
        books.groups[self.group].free.push(self.id);
    }
}

impl Page {
    /// The page's number within its group; backends index their storage by it.
    pub fn id(&self) -> u32 {
        self.0.id
    }

    /// Whether another handle to this page exists.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        // The books are consistent at every unlock, so a panic elsewhere does not spoil them.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// A pool of pages for `spec` that never exceeds `budget` bytes.
    pub fn new(spec: StateSpec, budget: u64) -> Self {
        let groups = spec.groups().iter().map(|_| Identities::default()).collect();
        Self(Arc::new(Shared { spec, budget, books: Mutex::new(Books { used: 0, promised: 0, groups }) }))
    }

    /// The state that the pool's rows hold.
    pub fn spec(&self) -> &StateSpec {
        &self.0.spec
    }

    /// An empty row.
    pub fn row(&self) -> Row {
        Row::new(self.clone())
    }

    /// Bytes in use and promised.
    pub fn usage(&self) -> Usage {
        let books = self.0.books();
        Usage { used: books.used, promised: books.promised, budget: self.0.budget }
    }

    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Sets `bytes` aside.
    pub(crate) fn promise(&self, bytes: u64) -> Result<(), Error> {
        let mut books = self.0.books();
        self.check(&books, bytes)?;
        books.promised += bytes;
        Ok(())
    }

    /// Returns what [`Self::promise`] set aside.
    pub(crate) fn release(&self, bytes: u64) {
        self.0.books().promised -= bytes;
    }

    fn check(&self, books: &Books, needed: u64) -> Result<(), Error> {
        let free = self.0.budget - books.used - books.promised;
        if needed > free { Err(Error::Budget { needed, free, budget: self.0.budget }) } else { Ok(()) }
    }

    /// One page of `group`, paid from `promised` as far as it goes and else from the free budget.
    pub(crate) fn page(&self, group: usize, promised: &mut u64) -> Result<Page, Error> {
        let bytes = self.0.spec.page_bytes(group);
        let mut books = self.0.books();
        let paid = bytes.min(*promised);
        self.check(&books, bytes - paid)?;
        books.promised -= paid;
        *promised -= paid;
        books.used += bytes;
        let identities = &mut books.groups[group];
        let id = identities.free.pop().unwrap_or_else(|| {
            identities.next += 1;
            identities.next - 1
        });
        Ok(Page(Arc::new(Held { pool: self.0.clone(), group, id })))
    }
}
