//! A running batch and its transactions.
//!
//! Every change is prepared, then committed: preparing can fail and changes nothing that can be seen; committing cannot fail;
//! dropping a prepared change undoes it. A change borrows the batch, so a second one cannot begin before it ends, and a consumed
//! one cannot be committed twice. The compiler checks both.
//!
//! ```text
//! Batch ── prepare_admit ──▶ Admission ── commit ─▶ rows added        (drop: promises returned)
//!       ── prepare_append ─▶ Append    ── commit ─▶ lengths advance   (drop: pages returned)
//!       ── begin_round ────▶ Round     ── commit(keep) ─▶ accepted    (drop: as before begin)
//!                              ├─ prepare_append … any number of times
//!                              └─ prepare_draft … guesses of a draft head, until the next append
//! ```

use crate::row::{Growth, Mark, Mode};
use crate::{Demand, Error, Pool, Row, StepPlan};

/// Rows that run together. Their order is the order of everything that has one entry per row.
#[derive(Debug)]
pub struct Batch {
    pool: Pool,
    rows: Vec<Row>,
}

/// Rows that were not admitted, handed back with the reason.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused {
    /// The rows, as they were.
    pub rows: Vec<Row>,
    /// Why they were refused.
    #[source]
    pub error: Error,
}

impl Batch {
    /// An empty batch over a pool.
    pub fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), rows: Vec::new() }
    }

    /// The rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Reserves budget so that each row can grow as its demand says. All rows are admitted or none, with all their groups.
    ///
    /// # Errors
    /// [`Refused`], with the rows, when the budget cannot hold them or a row belongs to another pool.
    pub fn prepare_admit<D: Into<Demand>>(&mut self, rows: Vec<(Row, D)>) -> Result<Admission<'_>, Refused> {
        let rows: Vec<(Row, Demand)> = rows.into_iter().map(|(row, demand)| (row, demand.into())).collect();
        let refuse = |rows: Vec<(Row, Demand)>, error| {
            Err(Refused { rows: rows.into_iter().map(|(row, _)| row).collect(), error })
        };
        if rows.iter().any(|(row, _)| !row.pool().same(&self.pool)) {
            return refuse(rows, Error::ForeignRow);
        }
        let missing: Vec<u64> = rows.iter().map(|(row, demand)| row.missing(*demand)).collect();
        if let Err(error) = self.pool.promise(missing.iter().sum()) {
            return refuse(rows, error);
        }
        let rows = rows.into_iter().zip(missing).map(|((mut row, demand), missing)| {
            row.promise(missing, demand);
            row
        });
        Ok(Admission { rows: rows.collect(), batch: self })
    }

    /// A batch of the same rows, sharing every page.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self { pool: self.pool.clone(), rows: self.rows.iter().map(Row::fork).collect() }
    }

    /// Keeps the rows named by `keep`, in that order; an empty list clears.
    ///
    /// # Errors
    /// [`Error::NoRow`] when an index is out of range or appears twice.
    pub fn filter(&mut self, keep: &[usize]) -> Result<(), Error> {
        let mut seen = vec![false; self.rows.len()];
        for &index in keep {
            match seen.get_mut(index) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(Error::NoRow { index, rows: self.rows.len() }),
            }
        }
        let mut rows: Vec<Option<Row>> = self.rows.drain(..).map(Some).collect();
        self.rows = keep.iter().filter_map(|&index| rows[index].take()).collect();
        Ok(())
    }

    /// Takes row `index` out; the rows after it move up.
    ///
    /// # Errors
    /// [`Error::NoRow`] when there is no such row.
    pub fn extract(&mut self, index: usize) -> Result<Row, Error> {
        if index >= self.rows.len() {
            return Err(Error::NoRow { index, rows: self.rows.len() });
        }
        Ok(self.rows.remove(index))
    }

    /// Drops every row.
    pub fn clear(&mut self) {
        self.rows.clear();
    }

    /// Reserves the pages for `counts[i]` more tokens in row `i`.
    ///
    /// # Errors
    /// [`Error::Count`], [`Error::Budget`], or [`Error::Crosses`] for more than [`Row::room`].
    pub fn prepare_append(&mut self, counts: &[usize]) -> Result<Append<'_>, Error> {
        self.prepare(counts, Mode::Decided)
    }

    fn prepare(&mut self, counts: &[usize], mode: Mode) -> Result<Append<'_>, Error> {
        self.check_count("token count", counts.len())?;
        let mut growths: Vec<Growth> = Vec::with_capacity(counts.len());
        for (index, &count) in counts.iter().enumerate() {
            match self.rows[index].prepare(count, mode) {
                Ok(growth) => growths.push(growth),
                Err(error) => {
                    for (row, growth) in self.rows.iter_mut().zip(growths) {
                        row.cancel(growth);
                    }
                    return Err(error);
                }
            }
        }
        Ok(Append { batch: self, growths })
    }

    /// Begins a round: appends until its end are provisional.
    pub fn begin_round(&mut self) -> Round<'_> {
        let marks = self.rows.iter().map(Row::mark).collect();
        Round { batch: self, marks }
    }

    fn check_count(&self, what: &'static str, found: usize) -> Result<(), Error> {
        let expected = self.rows.len();
        if expected == found { Ok(()) } else { Err(Error::Count { what, expected, found }) }
    }
}

/// Rows that hold their promise of budget and wait to be admitted.
#[derive(Debug)]
pub struct Admission<'a> {
    batch: &'a mut Batch,
    rows: Vec<Row>,
}

impl Admission<'_> {
    /// Adds the rows at the end of the batch.
    pub fn commit(self) {
        self.batch.rows.extend(self.rows);
    }
}

/// Reserved room for one step's tokens.
#[derive(Debug)]
#[must_use = "dropping an append undoes it"]
pub struct Append<'a> {
    batch: &'a mut Batch,
    /// One per row; empty once committed.
    growths: Vec<Growth>,
}

impl Append<'_> {
    /// The step that fills the reserved room with `tokens`, wanting logits at the indices `outputs`.
    ///
    /// # Errors
    /// [`Error::Count`] when there are not as many tokens as were reserved, [`Error::NoToken`] for an output that is no token.
    pub fn plan(&self, tokens: &[u32], outputs: &[u32]) -> Result<StepPlan, Error> {
        let expected = self.growths.iter().map(|growth| growth.count).sum();
        if tokens.len() != expected {
            return Err(Error::Count { what: "token", expected, found: tokens.len() });
        }
        if let Some(&index) = outputs.iter().find(|&&index| index as usize >= tokens.len()) {
            return Err(Error::NoToken { index: index as usize, tokens: tokens.len() });
        }
        let mut plan = StepPlan { tokens: tokens.to_vec(), outputs: outputs.to_vec(), ..StepPlan::default() };
        plan.segments.reserve(self.growths.len());
        for (row, growth) in self.batch.rows.iter().zip(&self.growths) {
            row.plan(growth, &mut plan);
        }
        Ok(plan)
    }

    /// Leaves the columns of draft heads out, for a step that does not run the head. A head's columns are then fewer than its row's tokens,
    /// and the row counts them on their own.
    pub fn without_companions(mut self) -> Self {
        for (row, growth) in self.batch.rows.iter().zip(&mut self.growths) {
            row.without_companions(growth);
        }
        self
    }

    /// Makes the tokens part of their rows.
    pub fn commit(mut self) {
        for (row, growth) in self.batch.rows.iter_mut().zip(self.growths.drain(..)) {
            row.grow(growth);
        }
    }
}

impl Drop for Append<'_> {
    fn drop(&mut self) {
        for (row, growth) in self.batch.rows.iter_mut().zip(self.growths.drain(..)) {
            row.cancel(growth);
        }
    }
}

/// A speculative round: what is appended in it becomes part of the rows only as far as [`Round::commit`] keeps it.
#[derive(Debug)]
#[must_use = "dropping a round restores the rows"]
pub struct Round<'a> {
    batch: &'a mut Batch,
    /// Lengths at the beginning; empty once committed.
    marks: Vec<Mark>,
}

impl<'a> Round<'a> {
    /// The rows, with what the round has appended so far.
    pub fn rows(&self) -> &[Row] {
        &self.batch.rows
    }

    /// As [`Batch::prepare_append`], within the round.
    ///
    /// # Errors
    /// As there.
    pub fn prepare_append(&mut self, counts: &[usize]) -> Result<Append<'_>, Error> {
        self.batch.prepare(counts, Mode::Provisional)
    }

    /// Reserves room for guesses of a draft head: columns of companion groups alone. They last until the next [`Self::prepare_append`],
    /// which stores what the head makes of the real hidden states instead.
    ///
    /// # Errors
    /// [`Error::NoCompanion`], or as [`Batch::prepare_append`].
    pub fn prepare_draft(&mut self, counts: &[usize]) -> Result<Append<'_>, Error> {
        if self.batch.pool.spec().groups().iter().all(|group| group.lag.is_none()) {
            return Err(Error::NoCompanion);
        }
        self.batch.prepare(counts, Mode::Draft)
    }

    /// Keeps the first `keep[i]` tokens that the round appended to row `i` and forgets the rest. Costs nothing that depends on the
    /// length of a row or the number of its layers.
    ///
    /// # Errors
    /// The round, unchanged, with [`Error::Count`] or [`Error::Keep`].
    pub fn commit(mut self, keep: &[usize]) -> Result<(), (Round<'a>, Error)> {
        if let Err(error) = self.batch.check_count("number of kept columns", keep.len()) {
            return Err((self, error));
        }
        for (row, (&keep, mark)) in keep.iter().zip(&self.marks).enumerate() {
            let appended = self.batch.rows[row].len() - mark.len;
            if keep > appended {
                return Err((self, Error::Keep { row, keep, appended }));
            }
        }
        self.settle(keep);
        Ok(())
    }

    fn settle(&mut self, keep: &[usize]) {
        for (row, (mark, &keep)) in self.batch.rows.iter_mut().zip(self.marks.drain(..).zip(keep)) {
            row.settle(&mark, keep);
        }
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        self.settle(&vec![0; self.marks.len()]);
    }
}
