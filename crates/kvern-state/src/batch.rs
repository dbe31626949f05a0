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
//!                              └─ prepare_append … any number of times
//! ```

use crate::row::Growth;
use crate::{Error, PageCopy, Pool, Row, Segment, StepPlan};

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

    /// Reserves budget so that each row can grow to its number of tokens, in total. All rows are admitted or none.
    ///
    /// # Errors
    /// [`Refused`], with the rows, when the budget cannot hold them or a row belongs to another pool.
    pub fn prepare_admit(&mut self, rows: Vec<(Row, usize)>) -> Result<Admission<'_>, Refused> {
        let refuse = |rows: Vec<(Row, usize)>, error| {
            Err(Refused { rows: rows.into_iter().map(|(row, _)| row).collect(), error })
        };
        if rows.iter().any(|(row, _)| !row.pool().same(&self.pool)) {
            return refuse(rows, Error::ForeignRow);
        }
        let missing: Vec<u64> = rows.iter().map(|(row, tokens)| row.missing(*tokens)).collect();
        if let Err(error) = self.pool.promise(missing.iter().sum()) {
            return refuse(rows, error);
        }
        let rows = rows.into_iter().zip(missing).map(|((mut row, tokens), missing)| {
            row.promise(missing, tokens);
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
    /// [`Error::Count`] or [`Error::Budget`].
    pub fn prepare_append(&mut self, counts: &[usize]) -> Result<Append<'_>, Error> {
        self.check_count("token count", counts.len())?;
        let mut growths: Vec<Growth> = Vec::with_capacity(counts.len());
        for (index, &count) in counts.iter().enumerate() {
            match self.rows[index].prepare(count) {
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
        let starts = self.rows.iter().map(Row::len).collect();
        Round { batch: self, starts }
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
        let expected = self.growths.iter().map(Growth::count).sum();
        if tokens.len() != expected {
            return Err(Error::Count { what: "token", expected, found: tokens.len() });
        }
        if let Some(&index) = outputs.iter().find(|&&index| index as usize >= tokens.len()) {
            return Err(Error::NoToken { index: index as usize, tokens: tokens.len() });
        }
        let mut plan = StepPlan {
            tokens: tokens.to_vec(),
            positions: Vec::with_capacity(tokens.len()),
            segments: Vec::with_capacity(self.growths.len()),
            outputs: outputs.to_vec(),
            copies: Vec::new(),
        };
        for (row, growth) in self.batch.rows.iter().zip(&self.growths) {
            let tables = (0..row.pool().spec().groups().len()).map(|group| row.table_with(group, growth)).collect();
            let segment = Segment { start: plan.positions.len(), count: growth.count(), past: row.len(), tables };
            plan.positions.extend((row.len()..row.len() + growth.count()).map(|position| position as u32));
            plan.segments.push(segment);
            plan.copies.extend(
                growth
                    .copies()
                    .filter_map(|(group, copy)| Some(PageCopy { group, from: row.tail(group)?.id(), to: copy.id() })),
            );
        }
        Ok(plan)
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
    starts: Vec<usize>,
}

impl<'a> Round<'a> {
    /// The rows, with what the round has appended so far.
    pub fn rows(&self) -> &[Row] {
        &self.batch.rows
    }

    /// As [`Batch::prepare_append`], within the round.
    ///
    /// # Errors
    /// [`Error::Count`] or [`Error::Budget`].
    pub fn prepare_append(&mut self, counts: &[usize]) -> Result<Append<'_>, Error> {
        self.batch.prepare_append(counts)
    }

    /// Keeps the first `keep[i]` columns that the round appended to row `i` and forgets the rest.
    ///
    /// # Errors
    /// The round, unchanged, with [`Error::Count`] or [`Error::Keep`].
    pub fn commit(mut self, keep: &[usize]) -> Result<(), (Round<'a>, Error)> {
        if let Err(error) = self.batch.check_count("number of kept columns", keep.len()) {
            return Err((self, error));
        }
        for (row, (&keep, &start)) in keep.iter().zip(&self.starts).enumerate() {
            let appended = self.batch.rows[row].len() - start;
            if keep > appended {
                return Err((self, Error::Keep { row, keep, appended }));
            }
        }
        let starts = std::mem::take(&mut self.starts);
        for (row, (start, &keep)) in self.batch.rows.iter_mut().zip(starts.into_iter().zip(keep)) {
            row.truncate(start + keep);
        }
        Ok(())
    }
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        for (row, start) in self.batch.rows.iter_mut().zip(self.starts.drain(..)) {
            row.truncate(start);
        }
    }
}
