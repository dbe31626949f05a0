//! The pool: page numbers, reference counts and the byte budget.
//!
//! A page's life is its references' life. A [`PageList`] owns one reference to each page that it lists: clones count up, drops count down, and the
//! last reference returns the number to the pool. A leak is not representable. Counts are plain integers behind one lock that a list takes once, so
//! forking or dropping a long row costs an addition for each page and nothing else.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Row, StateSpec};

/// Hands out pages within a byte budget. Clones are the same pool.
#[derive(Debug, Clone)]
pub struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    spec: StateSpec,
    budget: u64,
    /// Bytes of a page, by class.
    bytes: Vec<u64>,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    used: u64,
    promised: u64,
    classes: Vec<Numbers>,
}

/// The page numbers of one class: `counts[id]` references to each, those with none in `free`.
#[derive(Debug, Default)]
struct Numbers {
    counts: Vec<u32>,
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

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        // The books are consistent at every unlock, so a panic elsewhere does not spoil them.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, books: &Books, needed: u64) -> Result<(), Error> {
        let free = self.budget - books.used - books.promised;
        if needed > free { Err(Error::Budget { needed, free, budget: self.budget }) } else { Ok(()) }
    }
}

impl Pool {
    /// A pool of pages for `spec` that never exceeds `budget` bytes.
    pub fn new(spec: StateSpec, budget: u64) -> Self {
        let classes = spec.classes().iter().map(|_| Numbers::default()).collect();
        let bytes = spec.classes().iter().map(crate::Class::bytes).collect();
        let books = Mutex::new(Books { used: 0, promised: 0, classes });
        Self(Arc::new(Shared { spec, budget, bytes, books }))
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
        self.0.check(&books, bytes)?;
        books.promised += bytes;
        Ok(())
    }

    /// Sets aside as much of `bytes` as is free, and says how much that was.
    pub(crate) fn promise_some(&self, bytes: u64) -> u64 {
        if bytes == 0 {
            return 0;
        }
        let mut books = self.0.books();
        let some = bytes.min(self.0.budget - books.used - books.promised);
        books.promised += some;
        some
    }

    /// Returns what was set aside.
    pub(crate) fn release(&self, bytes: u64) {
        self.0.books().promised -= bytes;
    }

    /// No pages, of a class.
    pub(crate) fn no_pages(&self, class: usize) -> PageList {
        PageList { pool: self.clone(), class, ids: Vec::new() }
    }

    /// `count` pages of `class`, paid from `promised` as far as it goes and else from the free budget; all or none.
    pub(crate) fn allocate(&self, class: usize, count: usize, promised: &mut u64) -> Result<PageList, Error> {
        let mut list = self.no_pages(class);
        if count == 0 {
            return Ok(list);
        }
        let bytes = self.0.bytes[class] * count as u64;
        let mut books = self.0.books();
        let paid = bytes.min(*promised);
        self.0.check(&books, bytes - paid)?;
        books.promised -= paid;
        *promised -= paid;
        books.used += bytes;
        let numbers = &mut books.classes[class];
        list.ids.reserve_exact(count);
        for _ in 0..count {
            let id = numbers.free.pop().unwrap_or_else(|| {
                numbers.counts.push(0);
                numbers.counts.len() as u32 - 1
            });
            numbers.counts[id as usize] = 1;
            list.ids.push(id);
        }
        drop(books);
        Ok(list)
    }
}

/// Owned references to pages of one class, in the order of what they hold.
#[derive(Debug)]
pub struct PageList {
    pool: Pool,
    class: usize,
    ids: Vec<u32>,
}

impl PageList {
    /// The page numbers; backends index their storage by class and number.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The class of the pages.
    pub fn class(&self) -> usize {
        self.class
    }

    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether another reference to the last page exists.
    pub(crate) fn shares_last(&self) -> bool {
        self.ids.last().is_some_and(|&id| self.pool.0.books().classes[self.class].counts[id as usize] > 1)
    }

    /// Appends pages of the same class.
    pub(crate) fn append(&mut self, mut other: Self) {
        debug_assert_eq!(self.class, other.class);
        self.ids.append(&mut other.ids);
    }

    /// Gives the pages in `range` back.
    pub(crate) fn release(&mut self, range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        let bytes = self.pool.0.bytes[self.class];
        let mut books = self.pool.0.books();
        let Books { used, classes, .. } = &mut *books;
        let numbers = &mut classes[self.class];
        for id in self.ids.drain(range) {
            let count = &mut numbers.counts[id as usize];
            *count -= 1;
            if *count == 0 {
                numbers.free.push(id);
                *used -= bytes;
            }
        }
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        if len < self.ids.len() {
            self.release(len..self.ids.len());
        }
    }
}

impl Clone for PageList {
    fn clone(&self) -> Self {
        let ids = self.ids.clone();
        let mut books = self.pool.0.books();
        let counts = &mut books.classes[self.class].counts;
        ids.iter().for_each(|&id| counts[id as usize] += 1);
        drop(books);
        Self { pool: self.pool.clone(), class: self.class, ids }
    }
}

impl Drop for PageList {
    fn drop(&mut self) {
        self.release(0..self.ids.len());
    }
}
