//! A row: one request's state.

use crate::{Error, Page, Pool};

/// One request's state: a page table per group, and a length.
#[derive(Debug)]
pub struct Row {
    pool: Pool,
    tables: Vec<Vec<Page>>,
    len: usize,
    /// Bytes of the pool that only this row may turn into pages.
    promised: u64,
    /// The length that the promise is for.
    limit: usize,
}

/// The columns of one group at the moment the read was taken. It stays valid whatever happens to the row afterwards, since it
/// holds the pages, and an append never writes below the length of a page that somebody else holds.
#[derive(Debug, Clone)]
pub struct Read {
    pages: Vec<Page>,
    len: usize,
}

impl Read {
    /// The pages, in token order.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Number of columns.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when no column existed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What one append adds to a row, before it is committed.
#[derive(Debug)]
pub(crate) struct Growth {
    /// Per group: the page that replaces a shared tail, and the pages after it.
    groups: Vec<(Option<Page>, Vec<Page>)>,
    count: usize,
    /// Bytes of the row's promise that went into these pages.
    spent: u64,
}

impl Growth {
    /// Pairs of (group, copy) for tails that must be copied before they are written.
    pub(crate) fn copies(&self) -> impl Iterator<Item = (usize, &Page)> {
        self.groups.iter().enumerate().filter_map(|(group, (copy, _))| copy.as_ref().map(|copy| (group, copy)))
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }
}

impl Row {
    pub(crate) fn new(pool: Pool) -> Self {
        let tables = pool.spec().groups().iter().map(|_| Vec::new()).collect();
        Self { pool, tables, len: 0, promised: 0, limit: 0 }
    }

    /// Tokens in the row.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a row of no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pool that the row's pages come from.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// A row with the same columns, sharing every page. Costs one reference count per page, whatever the codec. The promise of
    /// budget stays with the original.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self { pool: self.pool.clone(), tables: self.tables.clone(), len: self.len, promised: 0, limit: 0 }
    }

    /// The columns of `group` as a value.
    pub fn read(&self, group: usize) -> Read {
        Read { pages: self.tables[group].clone(), len: self.len }
    }

    /// Page numbers of one group's table.
    pub fn table(&self, group: usize) -> impl Iterator<Item = u32> {
        self.tables[group].iter().map(Page::id)
    }

    /// Bytes that growing to `tokens` tokens takes beyond what the row holds and was promised.
    pub(crate) fn missing(&self, tokens: usize) -> u64 {
        let spec = self.pool.spec();
        let needed: u64 = (0..self.tables.len())
            .map(|group| {
                let held = self.tables[group].len() - usize::from(self.copies_tail(group));
                spec.pages_for(tokens.max(self.len)).saturating_sub(held) as u64 * spec.page_bytes(group)
            })
            .sum();
        needed.saturating_sub(self.promised)
    }

    /// Takes over `bytes` that the pool has promised for growing to `tokens` tokens.
    pub(crate) fn promise(&mut self, bytes: u64, tokens: usize) {
        self.promised += bytes;
        self.limit = self.limit.max(tokens);
    }

    /// Whether an append must first copy the tail page: it has free columns and another holder.
    fn copies_tail(&self, group: usize) -> bool {
        !self.len.is_multiple_of(self.pool.spec().page()) && self.tables[group].last().is_some_and(Page::is_shared)
    }

    /// Reserves the pages for `count` more tokens. Nothing of the row changes but where its promise went.
    pub(crate) fn prepare(&mut self, count: usize) -> Result<Growth, Error> {
        let before = self.promised;
        let mut growth = Growth { groups: Vec::with_capacity(self.tables.len()), count, spent: 0 };
        let pages = self.pool.spec().pages_for(self.len + count);
        for group in 0..self.tables.len() {
            let mut reserve = || -> Result<_, Error> {
                let copy = count > 0 && self.copies_tail(group);
                let copy = copy.then(|| self.pool.page(group, &mut self.promised)).transpose()?;
                let fresh = self.tables[group].len()..pages;
                let fresh = fresh.map(|_| self.pool.page(group, &mut self.promised)).collect::<Result<Vec<_>, _>>()?;
                Ok((copy, fresh))
            };
            match reserve() {
                Ok(pages) => growth.groups.push(pages),
                Err(error) => {
                    growth.spent = before - self.promised;
                    self.cancel(growth);
                    return Err(error);
                }
            }
        }
        growth.spent = before - self.promised;
        Ok(growth)
    }

    /// Undoes [`Self::prepare`], the promise included.
    pub(crate) fn cancel(&mut self, growth: Growth) {
        let spent = growth.spent;
        drop(growth);
        self.renew(spent);
    }

    /// Promises again what was just given back; the pages' bytes are free, unless another thread took them in between.
    fn renew(&mut self, bytes: u64) {
        if self.pool.promise(bytes).is_ok() {
            self.promised += bytes;
        }
    }

    pub(crate) fn grow(&mut self, growth: Growth) {
        for (table, (copy, fresh)) in self.tables.iter_mut().zip(growth.groups) {
            if let (Some(copy), Some(tail)) = (copy, table.last_mut()) {
                *tail = copy;
            }
            table.extend(fresh);
        }
        self.len += growth.count;
    }

    /// Page numbers of one group as they will be once `growth` is committed.
    pub(crate) fn table_with(&self, group: usize, growth: &Growth) -> Vec<u32> {
        let (copy, fresh) = &growth.groups[group];
        let mut table: Vec<u32> = self.table(group).collect();
        if let (Some(copy), Some(tail)) = (copy, table.last_mut()) {
            *tail = copy.id();
        }
        table.extend(fresh.iter().map(Page::id));
        table
    }

    pub(crate) fn tail(&self, group: usize) -> Option<&Page> {
        self.tables[group].last()
    }

    /// Forgets every token from `len` on, and promises the row again what it needs to reach its limit.
    pub(crate) fn truncate(&mut self, len: usize) {
        let pages = self.pool.spec().pages_for(len);
        for group in 0..self.tables.len() {
            let held = self.tables[group].len();
            self.tables[group].truncate(pages.min(held));
        }
        self.len = len;
        if self.limit > len {
            self.renew(self.missing(self.limit));
        }
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        self.pool.release(self.promised);
    }
}
