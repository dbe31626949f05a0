//! What one step of a model is to compute, in terms that every backend understands.

use std::ops::Range;

use crate::{Error, Read, Window};

/// A page of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageId {
    /// The class.
    pub class: usize,
    /// The number within the class.
    pub id: u32,
}

/// Pages of a row by the order of their columns: pages `0..kept` and `kept + skipped..` are held.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    /// The class of the pages.
    pub class: usize,
    /// Numbers of the held pages.
    pub ids: Vec<u32>,
    /// Pages at the start that stay when a window moves on.
    pub kept: usize,
    /// Pages after those that are not held any more.
    pub skipped: usize,
}

impl Table {
    /// The number of the row's page `index`. A page that is not held is a fault of the caller.
    #[inline(always)]
    pub fn id(&self, index: usize) -> u32 {
        self.ids[if index < self.kept { index } else { index - self.skipped }]
    }

    /// The held pages: index in the row, and number.
    pub fn pages(&self) -> impl Iterator<Item = (usize, u32)> {
        let index = |i: usize| if i < self.kept { i } else { i + self.skipped };
        self.ids.iter().enumerate().map(move |(i, &id)| (index(i), id))
    }
}

/// Columns of one group in one row during a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    /// Columns before the step.
    pub past: usize,
    /// Columns that the step adds: those of the segment's last `count` tokens.
    pub count: usize,
    /// The pages, with room for the added columns.
    pub table: Table,
    /// The first column, sinks aside, whose page is held.
    pub first: usize,
}

/// Which columns a query sees: `0..sinks` and `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Visible {
    /// End of the sinks; at most `start`.
    pub sinks: usize,
    /// First column of the window.
    pub start: usize,
    /// One past the last column.
    pub end: usize,
}

/// The recurrent state of one group in one row during a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct States {
    /// The state before the step; zeros when absent.
    pub from: Option<u32>,
    /// Where to store states: after how many of the segment's tokens, ascending, the last after all of them.
    pub to: Vec<(usize, u32)>,
    /// The class.
    pub class: usize,
}

/// One group of a row during a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Span {
    /// Of an attention or latent group.
    Columns(Columns),
    /// Of a recurrent group.
    States(States),
}

/// One row's share of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Index of the row's first token among the step's tokens.
    pub start: usize,
    /// Tokens of the row in this step; may be zero.
    pub count: usize,
    /// Tokens of the row before this step.
    pub past: usize,
    /// The groups.
    pub spans: Vec<Span>,
}

impl Segment {
    /// The columns of an attention or latent group.
    pub fn columns(&self, group: usize) -> Option<&Columns> {
        match self.spans.get(group) {
            Some(Span::Columns(columns)) => Some(columns),
            _ => None,
        }
    }

    /// The states of a recurrent group.
    pub fn states(&self, group: usize) -> Option<&States> {
        match self.spans.get(group) {
            Some(Span::States(states)) => Some(states),
            _ => None,
        }
    }

    /// The segment's tokens that add a column to `columns`, as indices among the step's tokens.
    pub fn writers(&self, columns: &Columns) -> Range<usize> {
        self.start + self.count - columns.count..self.start + self.count
    }

    /// What the segment's token `index`, at absolute `position`, sees of `columns`.
    #[inline(always)]
    pub fn visible(&self, columns: &Columns, window: Option<Window>, index: usize, position: usize) -> Visible {
        let end = columns.past + (index + 1).saturating_sub(self.count - columns.count);
        // A token that adds no column looks from its own position at columns that were there before.
        let from = if columns.count == 0 { position + 1 } else { end };
        let start = window.map_or(0, |window| window.start(from)).max(columns.first).min(end);
        Visible { sinks: window.map_or(0, |window| window.sinks).min(start), start, end }
    }
}

/// A page to be copied before the step. Where the classes differ, each column is decoded and encoded anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The page to read.
    pub from: PageId,
    /// The page to write.
    pub to: PageId,
    /// Columns that hold something.
    pub columns: usize,
}

/// How a backend draws a token from logits by itself: the filters act on the probabilities at temperature 1, then the draw inverts the cumulative
/// distribution at `temperature`, in order of ids, at `uniform`. Temperature 0 takes the largest logit, the lowest id among equals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the smallest set of most probable ids whose mass reaches this; 1 keeps all.
    pub top_p: f32,
    /// Drop ids less probable than this share of the most probable; 0 drops none.
    pub min_p: f32,
    /// Keep the most probable ids; 0 keeps all.
    pub top_k: u32,
    /// Where to invert the distribution, in `0..1`.
    pub uniform: f64,
}

/// A token of a step that the host does not know yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Its index among the step's tokens.
    pub token: u32,
    /// The output of the step before, from which the backend draws it.
    pub output: u32,
}

/// One step over a ragged batch: no padding, no masks; visibility follows from positions.
#[derive(Debug, Clone, Default)]
pub struct StepPlan {
    /// Token ids of all rows, one row after another: `[T]`.
    pub tokens: Vec<u32>,
    /// Absolute position of each token: `[T]`.
    pub positions: Vec<u32>,
    /// The rows.
    pub segments: Vec<Segment>,
    /// Indices into the tokens at which logits are wanted, ascending.
    pub outputs: Vec<u32>,
    /// How to draw a token at each output; none where the caller draws it. Empty when it draws all of them.
    pub draws: Vec<Option<Draw>>,
    /// Tokens that the step before draws; their entries in `tokens` mean nothing.
    pub pending: Vec<Pending>,
    /// Pages that the step is the first to write.
    pub fresh: Vec<PageId>,
    /// Copies to make first.
    pub copies: Vec<PageCopy>,
    /// Reads whose pages the step attends, kept alive by being here.
    pub reads: Vec<Read>,
}

/// A row's queries over columns that it does not add to: those of another row, at another time, of another model.
#[derive(Debug, Clone)]
pub struct View {
    /// The columns, by group; a group that is not attended may be left out at the end.
    pub reads: Vec<Read>,
    /// Tokens of the queries.
    pub tokens: Vec<u32>,
    /// Their absolute positions, from which windows are measured.
    pub positions: Vec<u32>,
}

impl StepPlan {
    /// The step's outputs as a step of their own, which sees what they see and stores nothing. It has no recurrent states.
    #[must_use]
    pub fn at_outputs(&self) -> Self {
        let mut plan = Self { outputs: (0..self.outputs.len() as u32).collect(), ..Self::default() };
        let mut segments = self.segments.iter().peekable();
        for &output in &self.outputs {
            let output = output as usize;
            while segments.next_if(|segment| segment.start + segment.count <= output).is_some() {}
            // Outputs are tokens of the step, so there is a segment for each.
            let Some(segment) = segments.peek() else { break };
            let position = self.positions[output];
            let span = |span: &Span| match span {
                Span::States(states) => Span::States(States { from: None, to: Vec::new(), class: states.class }),
                Span::Columns(columns) => {
                    let past = segment.visible(columns, None, output - segment.start, position as usize).end;
                    Span::Columns(Columns { past, count: 0, ..columns.clone() })
                }
            };
            let spans = segment.spans.iter().map(span).collect();
            plan.segments.push(Segment { start: plan.tokens.len(), count: 1, past: position as usize, spans });
            plan.tokens.push(self.tokens[output]);
            plan.positions.push(position);
        }
        plan
    }

    /// A step that attends reads and stores nothing: a drafter without state of its own looks at its target's columns so.
    ///
    /// # Errors
    /// [`Error::Count`] when a view has not a position for each token.
    pub fn over(views: Vec<View>) -> Result<Self, Error> {
        let mut plan = Self::default();
        for view in views {
            let (expected, found) = (view.tokens.len(), view.positions.len());
            if expected != found {
                return Err(Error::Count { what: "position for each token", expected, found });
            }
            let span = |read: &Read| {
                let (past, first, table) = (read.len(), read.start(), read.table().clone());
                Span::Columns(Columns { past, count: 0, table, first })
            };
            let spans = view.reads.iter().map(span).collect();
            let past = view.positions.first().map_or(0, |&position| position as usize);
            plan.segments.push(Segment { start: plan.tokens.len(), count: expected, past, spans });
            plan.tokens.extend(view.tokens);
            plan.positions.extend(view.positions);
            plan.reads.extend(view.reads);
        }
        plan.outputs = (0..plan.tokens.len() as u32).collect();
        Ok(plan)
    }
}
