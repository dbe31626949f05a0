//! The columns of one group in one row: pages in order, and the policies that decide which pages there are.
//!
//! **Invariants**, when nothing is in work: the pages held are those that some later query can see, so a window's list has lost its front;
//! `pages.class` is the late one exactly when the late encoding has happened.

use crate::plan::{Columns as Span, PageCopy, PageId, Table};
use crate::pool::PageList;
use crate::{Error, Pool, Window};

/// Columns of one group.
#[derive(Debug, Clone)]
pub(crate) struct Columns {
    group: usize,
    len: usize,
    pages: PageList,
    /// Pages after the sinks that left the window.
    skipped: usize,
    /// The first column, sinks aside, that is there: later than the first of its page in a row that was restored.
    from: usize,
    /// Columns at the end that a draft head guessed.
    drafted: usize,
    /// What late encoding replaced in the open round.
    early: Option<PageList>,
}

/// The columns of one group at the moment the read was taken. It stays valid whatever happens to the row afterwards, since it
/// holds the pages, and an append never writes below the length of a page that somebody else holds.
#[derive(Debug, Clone)]
pub struct Read {
    table: Table,
    len: usize,
    window: Option<Window>,
    _pages: PageList,
}

impl Read {
    /// The pages.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Number of columns up to the last.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when no column existed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// First column that the row's next query sees, sinks aside; from there on every column is held.
    pub fn start(&self) -> usize {
        self.window.map_or(0, |window| window.start(self.len + 1))
    }

    /// Columns before [`Self::start`] that stay in view.
    pub fn sinks(&self) -> usize {
        self.window.map_or(0, |window| window.sinks).min(self.start())
    }
}

/// What one append adds.
#[derive(Debug)]
pub(crate) struct Growth {
    /// Pages that take the place of as many at the end: a shared tail's copy, or all when the encoding changes.
    replaced: PageList,
    /// Pages after those.
    fresh: PageList,
    count: usize,
}

impl Columns {
    pub(crate) fn new(pool: &Pool, group: usize) -> Self {
        let pages = pool.no_pages(pool.spec().class(group, false));
        Self { group, len: 0, pages, skipped: 0, from: 0, drafted: 0, early: None }
    }

    /// Takes the pages that `columns` columns need, into a group that has none.
    pub(crate) fn make_room(&mut self, pool: &Pool, columns: usize, encoded: bool) -> Result<(), Error> {
        let spec = pool.spec();
        let skipped = spec.skipped_pages(self.group, columns);
        let class = spec.class(self.group, encoded);
        self.pages = pool.allocate(class, spec.pages_for(columns) - skipped, &mut 0)?;
        (self.len, self.skipped) = (columns, skipped);
        self.from = spec.groups()[self.group].first_in_view(columns);
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Columns without a draft head's guesses.
    pub(crate) fn decided(&self) -> usize {
        self.len - self.drafted
    }

    pub(crate) fn pages(&self) -> &PageList {
        &self.pages
    }

    fn start(&self, pool: &Pool) -> Option<usize> {
        pool.spec().groups()[self.group].late.as_ref().map(|late| late.start)
    }

    fn is_encoded(&self, pool: &Pool) -> bool {
        self.pages.class() != pool.spec().class(self.group, false)
    }

    /// Columns that can be added before the encoding must change between two steps.
    pub(crate) fn room(&self, pool: &Pool) -> usize {
        match self.start(pool) {
            Some(start) if !self.is_encoded(pool) && self.len < start => start - self.len,
            _ => usize::MAX,
        }
    }

    /// Whether the columns can be cut to `len` and be those of a row that never had more.
    pub(crate) fn resumable(&self, pool: &Pool, len: usize) -> bool {
        let group = &pool.spec().groups()[self.group];
        len == self.len || (len < self.len && group.can_cut(self.from, self.is_encoded(pool), len))
    }

    /// Whether an append must first copy the tail page: it has free columns and another holder.
    pub(crate) fn copies_tail(&self, pool: &Pool) -> bool {
        !self.len.is_multiple_of(pool.spec().page()) && self.pages.shares_last()
    }

    pub(crate) fn prepare(&self, pool: &Pool, count: usize, promised: &mut u64) -> Result<Growth, Error> {
        let (spec, room) = (pool.spec(), self.room(pool));
        if count > room {
            return Err(Error::Crosses { count, room });
        }
        let encodes = count > 0 && !self.is_encoded(pool) && self.start(pool) == Some(self.len);
        let class = spec.class(self.group, encodes || self.is_encoded(pool));
        let replaced = match (encodes, count > 0 && self.copies_tail(pool)) {
            (true, _) => self.pages.len(),
            (false, shared) => usize::from(shared),
        };
        let replaced = pool.allocate(class, replaced, promised)?;
        let missing = spec.pages_for(self.len + count) - self.skipped - self.pages.len();
        Ok(Growth { replaced, fresh: pool.allocate(class, missing, promised)?, count })
    }

    /// A growth by nothing.
    pub(crate) fn unchanged(&self, pool: &Pool) -> Growth {
        let none = || pool.no_pages(self.pages.class());
        Growth { replaced: none(), fresh: none(), count: 0 }
    }

    /// The pages as they are now.
    pub(crate) fn table(&self, pool: &Pool) -> Table {
        self.table_of(pool, self.pages.ids().to_vec(), self.pages.class())
    }

    fn table_of(&self, pool: &Pool, ids: Vec<u32>, class: usize) -> Table {
        Table { class, ids, kept: pool.spec().sink_pages(self.group), skipped: self.skipped }
    }

    /// The step's view of the columns once `growth` is part of them, its new pages and copies.
    pub(crate) fn span(
        &self,
        pool: &Pool,
        growth: &Growth,
        fresh: &mut Vec<PageId>,
        copies: &mut Vec<PageCopy>,
    ) -> Span {
        let spec = pool.spec();
        let (staying, leaving) = self.pages.ids().split_at(self.pages.len() - growth.replaced.len());
        let mut ids = Vec::with_capacity(self.pages.len() + growth.fresh.len());
        ids.extend_from_slice(staying);
        ids.extend_from_slice(growth.replaced.ids());
        ids.extend_from_slice(growth.fresh.ids());
        let table = self.table_of(pool, ids, growth.replaced.class());
        let class = table.class;
        let held: Vec<usize> =
            if leaving.is_empty() { Vec::new() } else { table.pages().map(|(index, _)| index).collect() };
        for (i, (&from, &to)) in leaving.iter().zip(growth.replaced.ids()).enumerate() {
            let columns = (self.len - held[staying.len() + i] * spec.page()).min(spec.page());
            let (from, to) = (PageId { class: self.pages.class(), id: from }, PageId { class, id: to });
            copies.push(PageCopy { from, to, columns });
        }
        fresh.extend(growth.replaced.ids().iter().chain(growth.fresh.ids()).map(|&id| PageId { class, id }));
        Span { past: self.len, count: growth.count, table, first: self.from }
    }

    pub(crate) fn commit(&mut self, pool: &Pool, growth: Growth, provisional: bool, draft: bool) {
        let Growth { replaced, fresh, count } = growth;
        if replaced.class() == self.pages.class() {
            self.pages.truncate(self.pages.len() - replaced.len());
            self.pages.append(replaced);
        } else {
            let early = std::mem::replace(&mut self.pages, replaced);
            self.early = provisional.then_some(early);
        }
        self.pages.append(fresh);
        self.len += count;
        if draft {
            self.drafted += count;
        }
        if !provisional {
            self.trim(pool);
        }
    }

    /// Forgets what a draft head guessed.
    pub(crate) fn end_draft(&mut self, pool: &Pool) {
        if self.drafted > 0 {
            self.cut(pool, self.decided());
        }
    }

    /// Ends a round with `len` columns.
    pub(crate) fn settle(&mut self, pool: &Pool, len: usize) {
        self.cut(pool, len);
        self.early = None;
        self.trim(pool);
    }

    /// Cuts to `len`, which [`Self::resumable`] or the open round allows.
    pub(crate) fn cut(&mut self, pool: &Pool, len: usize) {
        if let Some(start) = self.start(pool)
            && len <= start
            && let Some(early) = self.early.take()
        {
            self.pages = early;
        }
        if len == 0 {
            self.pages = pool.no_pages(pool.spec().class(self.group, false));
            (self.skipped, self.from) = (0, 0);
        }
        self.pages.truncate(pool.spec().pages_for(len) - self.skipped.min(pool.spec().pages_for(len)));
        self.drafted = 0;
        self.len = len;
    }

    /// Gives back the pages that no later query sees.
    fn trim(&mut self, pool: &Pool) {
        let skipped = pool.spec().skipped_pages(self.group, self.len);
        if skipped > self.skipped {
            let kept = pool.spec().sink_pages(self.group);
            self.pages.release(kept..kept + skipped - self.skipped);
            self.skipped = skipped;
            self.from = self.from.max((kept + skipped) * pool.spec().page());
        }
    }

    pub(crate) fn read(&self, pool: &Pool) -> Read {
        let table = self.table(pool);
        let window = pool.spec().groups()[self.group].window;
        Read { table, len: self.len, window, _pages: self.pages.clone() }
    }
}
