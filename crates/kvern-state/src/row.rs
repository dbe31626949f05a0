//! A row: one request's state.

use crate::columns::{self, Columns, Read};
use crate::plan::{Segment, Span, StepPlan, Table};
use crate::pool::{PageList, Pool};
use crate::slots::{self, Slots};
use crate::{Demand, Error, Kind};

/// One request's state: columns or a recurrent state for each group, and a length.
#[derive(Debug)]
pub struct Row {
    pool: Pool,
    groups: Vec<Group>,
    len: usize,
    /// Bytes of the pool that only this row may turn into pages.
    promised: u64,
    /// The most bytes that the promise is for.
    peak: u64,
}

#[derive(Debug, Clone)]
enum Group {
    Columns(Columns),
    Slots(Slots),
}

/// How an append relates to a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Outside: tokens are part of the row once committed.
    Decided,
    /// Inside: what it replaces is kept.
    Provisional,
    /// Inside, and only guesses of a draft head.
    Draft,
}

/// What one append adds to a row, before it is committed.
#[derive(Debug)]
pub(crate) struct Growth {
    groups: Vec<GroupGrowth>,
    pub(crate) count: usize,
    mode: Mode,
    /// Bytes of the row's promise that went into new pages.
    spent: u64,
}

#[derive(Debug)]
enum GroupGrowth {
    Columns(columns::Growth),
    Slots(slots::Growth),
}

/// A row at the beginning of a round.
#[derive(Debug)]
pub(crate) struct Mark {
    pub(crate) len: usize,
    columns: Vec<usize>,
    promised: u64,
}

impl Row {
    pub(crate) fn new(pool: Pool) -> Self {
        let group = |(index, spec): (usize, &crate::GroupSpec)| match spec.kind {
            Kind::Recurrent => Group::Slots(Slots::new(&pool, index)),
            Kind::Attention | Kind::Latent => Group::Columns(Columns::new(&pool, index)),
        };
        let groups = pool.spec().groups().iter().enumerate().map(group).collect();
        Self { groups, pool, len: 0, promised: 0, peak: 0 }
    }

    /// A row of `len` tokens with room for what an image holds: for each group, its columns and whether they were encoded late.
    pub(crate) fn with_room(pool: &Pool, len: usize, groups: &[(usize, bool)]) -> Result<Self, Error> {
        let mut row = Self::new(pool.clone());
        for (group, &(columns, encoded)) in row.groups.iter_mut().zip(groups) {
            match group {
                Group::Columns(own) => own.make_room(pool, columns, encoded)?,
                Group::Slots(slots) => slots.make_room(pool, len)?,
            }
        }
        row.len = len;
        Ok(row)
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

    /// A row with the same state, sharing every page: a frozen copy that costs one count for each page, whatever the codec. The
    /// promise of budget stays with the original.
    #[must_use]
    pub fn fork(&self) -> Self {
        let mut groups = self.groups.clone();
        for group in &mut groups {
            // Of a row in a round, what only the round needs stays behind.
            match group {
                Group::Columns(columns) => columns.settle(&self.pool, columns.decided()),
                Group::Slots(slots) => slots.cut(self.len),
            }
        }
        Self { pool: self.pool.clone(), groups, len: self.len, promised: 0, peak: 0 }
    }

    /// The columns of a group as a value; absent for a recurrent group.
    pub fn read(&self, group: usize) -> Option<Read> {
        match &self.groups[group] {
            Group::Columns(columns) => Some(columns.read(&self.pool)),
            Group::Slots(_) => None,
        }
    }

    /// The slot of a group's recurrent state; absent for other groups and in a row of no tokens.
    pub fn state(&self, group: usize) -> Option<u32> {
        match &self.groups[group] {
            Group::Columns(_) => None,
            Group::Slots(slots) => slots.pages().ids().last().copied(),
        }
    }

    /// Where a group lies: the pages of its columns, or its state's slot as a table of one.
    pub fn table(&self, group: usize) -> Table {
        match &self.groups[group] {
            Group::Columns(columns) => columns.table(&self.pool),
            Group::Slots(slots) => slots.table(),
        }
    }

    /// References to the pages of a group.
    pub fn pages(&self, group: usize) -> &PageList {
        match &self.groups[group] {
            Group::Columns(columns) => columns.pages(),
            Group::Slots(slots) => slots.pages(),
        }
    }

    /// Columns of a group; 0 for a recurrent one.
    pub fn columns(&self, group: usize) -> usize {
        match &self.groups[group] {
            Group::Columns(columns) => columns.len(),
            Group::Slots(_) => 0,
        }
    }

    /// Tokens that the next append may have, before late encoding needs a step of its own to begin.
    pub fn room(&self) -> usize {
        let room = |(group, spec): (&Group, &crate::GroupSpec)| match group {
            // A companion's first tokens add no column.
            Group::Columns(columns) => {
                columns.room(&self.pool).saturating_add(spec.lag.map_or(0, |lag| lag.saturating_sub(self.len)))
            }
            Group::Slots(_) => usize::MAX,
        };
        self.groups.iter().zip(self.pool.spec().groups()).map(room).min().unwrap_or(usize::MAX)
    }

    /// Whether the row, cut to `len` tokens, is what a row of those tokens would be.
    pub fn resumable(&self, len: usize) -> bool {
        let all = || {
            self.groups.iter().enumerate().all(|(index, group)| match group {
                Group::Columns(columns) => columns.resumable(&self.pool, self.columns_at(index, columns, len)),
                Group::Slots(slots) => slots.resumable(len),
            })
        };
        // Nothing can be resumed from anywhere.
        len == 0 || (len <= self.len && all())
    }

    /// The shortest prefix of the row, of one token at least, that can be reused: every longer one can, too. More than 1 once a window has moved on,
    /// a recurrent state has been replaced, or late encoding has begun.
    pub fn min_reusable(&self) -> usize {
        let (mut low, mut high) = (1, self.len.max(1));
        while low < high {
            let middle = low.midpoint(high);
            if self.resumable(middle) { high = middle } else { low = middle + 1 }
        }
        low
    }

    /// Columns that a group keeps of a row that is cut to `len`.
    fn columns_at(&self, group: usize, columns: &Columns, len: usize) -> usize {
        let spec = &self.pool.spec().groups()[group];
        columns.len() - (spec.columns(self.len) - spec.columns(len)).min(columns.len())
    }

    /// Forgets every token from `len` on.
    ///
    /// # Errors
    /// [`Error::NotResumable`], with the row unchanged, when a window has passed `len`, a recurrent state or late encoding is beyond it.
    pub fn truncate(&mut self, len: usize) -> Result<(), Error> {
        if !self.resumable(len) {
            return Err(Error::NotResumable { len, tokens: self.len });
        }
        for index in 0..self.groups.len() {
            let columns = match &self.groups[index] {
                Group::Columns(columns) => self.columns_at(index, columns, len),
                Group::Slots(_) => len,
            };
            match &mut self.groups[index] {
                Group::Columns(own) => own.cut(&self.pool, columns),
                Group::Slots(slots) => slots.cut(len),
            }
        }
        self.len = len;
        self.renew();
        Ok(())
    }

    /// Bytes that growing as `demand` says takes beyond what the row holds and was promised.
    pub(crate) fn missing(&self, demand: Demand) -> u64 {
        let tokens = demand.tokens.max(self.len);
        self.short_of(self.pool.spec().peak_bytes(Demand { tokens, ..demand }))
    }

    fn short_of(&self, peak: u64) -> u64 {
        let classes = self.pool.spec().classes();
        let held: u64 = self
            .groups
            .iter()
            .map(|group| {
                let (pages, lost) = match group {
                    Group::Columns(columns) => (columns.pages(), usize::from(columns.copies_tail(&self.pool))),
                    Group::Slots(slots) => (slots.pages(), 0),
                };
                (pages.len() - lost) as u64 * classes[pages.class()].bytes()
            })
            .sum();
        peak.saturating_sub(held + self.promised)
    }

    /// Takes over `bytes` that the pool has promised for growing as `demand` says.
    pub(crate) fn promise(&mut self, bytes: u64, demand: Demand) {
        let tokens = demand.tokens.max(self.len);
        self.promised += bytes;
        self.peak = self.peak.max(self.pool.spec().peak_bytes(Demand { tokens, ..demand }));
    }

    /// Promises again what pages gave back; their bytes are free, unless another thread took them in between.
    fn renew(&mut self) {
        self.promised += self.pool.promise_some(self.short_of(self.peak));
    }

    /// Reserves the pages for `count` more tokens. Nothing of the row changes but where its promise went, and that guesses of a draft
    /// head end when real tokens come.
    pub(crate) fn prepare(&mut self, count: usize, mode: Mode) -> Result<Growth, Error> {
        let before = self.promised;
        let mut growth = Growth { groups: Vec::with_capacity(self.groups.len()), count, mode, spent: 0 };
        for index in 0..self.groups.len() {
            match self.prepare_group(index, count, mode) {
                Ok(group) => growth.groups.push(group),
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

    fn prepare_group(&mut self, index: usize, count: usize, mode: Mode) -> Result<GroupGrowth, Error> {
        let (pool, len) = (&self.pool, self.len);
        let spec = &pool.spec().groups()[index];
        Ok(match &mut self.groups[index] {
            Group::Columns(columns) => {
                let count = match (mode, spec.lag) {
                    (Mode::Draft, lag) => count * usize::from(lag.is_some()),
                    _ => {
                        columns.end_draft(pool);
                        spec.columns(len + count) - spec.columns(len)
                    }
                };
                GroupGrowth::Columns(columns.prepare(pool, count, &mut self.promised)?)
            }
            Group::Slots(slots) => {
                let count = if mode == Mode::Draft { 0 } else { count };
                let provisional = mode != Mode::Decided;
                GroupGrowth::Slots(slots.prepare(pool, len, count, provisional, &mut self.promised)?)
            }
        })
    }

    /// Leaves draft heads' columns out of `growth`.
    pub(crate) fn without_companions(&self, growth: &mut Growth) {
        let specs = self.pool.spec().groups();
        for ((own, spec), group) in self.groups.iter().zip(specs).zip(&mut growth.groups) {
            if let (Group::Columns(columns), Some(_)) = (own, spec.lag) {
                *group = GroupGrowth::Columns(columns.unchanged(&self.pool));
            }
        }
    }

    /// Undoes [`Self::prepare`], the promise included.
    pub(crate) fn cancel(&mut self, growth: Growth) {
        let spent = growth.spent;
        drop(growth);
        self.promised += self.pool.promise_some(spent);
    }

    pub(crate) fn grow(&mut self, growth: Growth) {
        let Growth { groups, count, mode, .. } = growth;
        let (provisional, draft) = (mode != Mode::Decided, mode == Mode::Draft);
        for (group, growth) in self.groups.iter_mut().zip(groups) {
            match (group, growth) {
                (Group::Columns(columns), GroupGrowth::Columns(growth)) => {
                    columns.commit(&self.pool, growth, provisional, draft);
                }
                (Group::Slots(slots), GroupGrowth::Slots(growth)) => slots.commit(growth, provisional),
                _ => unreachable!("a growth has its row's groups"),
            }
        }
        if !draft {
            self.len += count;
        }
        if !provisional {
            self.renew();
        }
    }

    /// Adds the row's part to a step's plan.
    pub(crate) fn plan(&self, growth: &Growth, plan: &mut StepPlan) {
        let mut spans = Vec::with_capacity(self.groups.len());
        let mut first = self.len;
        for (group, growth_of) in self.groups.iter().zip(&growth.groups) {
            match (group, growth_of) {
                (Group::Columns(columns), GroupGrowth::Columns(own)) => {
                    if growth.mode == Mode::Draft {
                        // A guess begins from the token after those that were guessed before it.
                        first = first.max(self.len + columns.len() - columns.decided());
                    }
                    let span = columns.span(&self.pool, own, &mut plan.fresh, &mut plan.copies);
                    spans.push(Span::Columns(span));
                }
                (Group::Slots(slots), GroupGrowth::Slots(own)) => {
                    spans.push(Span::States(slots.span(self.len, own, &mut plan.fresh)));
                }
                _ => unreachable!("a growth has its row's groups"),
            }
        }
        let start = plan.positions.len();
        plan.positions.extend((first..first + growth.count).map(|position| position as u32));
        plan.segments.push(Segment { start, count: growth.count, past: self.len, spans });
    }

    pub(crate) fn mark(&self) -> Mark {
        let columns = (0..self.groups.len()).map(|group| self.columns(group)).collect();
        Mark { len: self.len, columns, promised: self.promised }
    }

    /// Ends a round: keeps `keep` of the tokens that came after `mark`.
    pub(crate) fn settle(&mut self, mark: &Mark, keep: usize) {
        let len = mark.len + keep;
        let specs = self.pool.spec().groups();
        for ((group, spec), &start) in self.groups.iter_mut().zip(specs).zip(&mark.columns) {
            match group {
                Group::Columns(columns) => {
                    let kept = start + spec.columns(len) - spec.columns(mark.len);
                    columns.settle(&self.pool, kept.min(columns.decided()));
                }
                Group::Slots(slots) => slots.cut(len),
            }
        }
        self.len = len;
        if keep == 0 {
            // What the round's pages were paid with, even if that was more than the row needs by now.
            self.promised += self.pool.promise_some(mark.promised.saturating_sub(self.promised));
        }
        self.renew();
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        self.pool.release(self.promised);
    }
}
