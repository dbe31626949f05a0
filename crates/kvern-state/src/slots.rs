//! The recurrent state of one group in one row.
//!
//! A state is never written in place: a step reads one slot and writes others, so a step that fails or is dropped leaves the row as it was. In
//! a round every position gets a slot, and committing chooses one.

use crate::Error;
use crate::plan::{PageId, States, Table};
use crate::pool::{PageList, Pool};

/// States of one group: one with nothing in work, and in a round one for each position besides.
#[derive(Debug, Clone)]
pub(crate) struct Slots {
    group: usize,
    pages: PageList,
    /// Tokens that each state has seen, ascending.
    seen: Vec<usize>,
}

/// The states that one append writes.
#[derive(Debug)]
pub(crate) struct Growth {
    pages: PageList,
    seen: Vec<usize>,
}

impl Slots {
    pub(crate) fn new(pool: &Pool, group: usize) -> Self {
        Self { group, pages: pool.no_pages(pool.spec().class(group, false)), seen: Vec::new() }
    }

    pub(crate) fn pages(&self) -> &PageList {
        &self.pages
    }

    pub(crate) fn table(&self) -> Table {
        let ids = self.pages.ids().last().copied().into_iter().collect();
        Table { class: self.pages.class(), ids, ..Table::default() }
    }

    /// Takes the slot of a row of `len` tokens, into a group that has none.
    pub(crate) fn make_room(&mut self, pool: &Pool, len: usize) -> Result<(), Error> {
        self.seen = if len == 0 { Vec::new() } else { vec![len] };
        self.pages = pool.allocate(self.pages.class(), self.seen.len(), &mut 0)?;
        Ok(())
    }

    /// Whether the state after `len` tokens is here.
    pub(crate) fn resumable(&self, len: usize) -> bool {
        self.seen.contains(&len)
    }

    /// Room for the states of `count` tokens after the first `len`: of each in a round, else of the last.
    pub(crate) fn prepare(
        &self,
        pool: &Pool,
        len: usize,
        count: usize,
        provisional: bool,
        promised: &mut u64,
    ) -> Result<Growth, Error> {
        let seen: Vec<usize> = match (count, provisional) {
            (0, _) => Vec::new(),
            (_, true) => (len + 1..=len + count).collect(),
            (_, false) => vec![len + count],
        };
        let pages = pool.allocate(pool.spec().class(self.group, false), seen.len(), promised)?;
        Ok(Growth { pages, seen })
    }

    pub(crate) fn span(&self, len: usize, growth: &Growth, fresh: &mut Vec<PageId>) -> States {
        let class = self.pages.class();
        fresh.extend(growth.pages.ids().iter().map(|&id| PageId { class, id }));
        let to = growth.seen.iter().zip(growth.pages.ids()).map(|(seen, &id)| (seen - len, id)).collect();
        States { from: self.pages.ids().last().copied(), to, class }
    }

    pub(crate) fn commit(&mut self, growth: Growth, provisional: bool) {
        if growth.seen.is_empty() {
            return;
        }
        if !provisional {
            self.pages.truncate(0);
            self.seen.clear();
        }
        self.pages.append(growth.pages);
        self.seen.extend(growth.seen);
    }

    /// Keeps the state after `len` tokens, which [`Self::resumable`] or the open round allows.
    pub(crate) fn cut(&mut self, len: usize) {
        let keep = self.seen.iter().position(|&seen| seen == len);
        let keep = keep.map_or(0..0, |at| at..at + 1);
        self.pages.truncate(keep.end);
        self.pages.release(0..keep.start);
        self.seen.truncate(keep.end);
        self.seen.drain(..keep.start);
    }
}
