//! A backend's storage in miniature, and the naive batch that rows are compared with.
//!
//! A column is the tag of the token that wrote it; a recurrent state is a fold of the tags that it has seen. Columns that were encoded late carry a
//! mark, and encoding one twice panics.

#![allow(dead_code, reason = "each test uses its own part of this")]

use std::collections::BTreeMap;

use kvern_state::{
    Codec, Columns, GroupSpec, Kind, PageId, Row, Segment, Span, StateSpec, StepPlan, Table, Visible, Window,
};

/// A tag that no column has: what a fresh or freed page holds.
pub const POISON: u64 = u64::MAX;
/// Set in a tag that was encoded late.
const ENCODED: u64 = 1 << 40;
/// Set in a tag that a draft head guessed.
pub const GUESS: u32 = 1 << 30;

/// The bytes behind pages: a tag for each column.
#[derive(Default)]
pub struct Store {
    pages: BTreeMap<PageId, Vec<u64>>,
}

pub fn fold(state: u64, tag: u32) -> u64 {
    (state ^ u64::from(tag)).wrapping_mul(0x100_0000_01b3).rotate_left(17)
}

impl Store {
    /// Executes a plan as a backend does: fresh pages, copies, then each token's tag into every group.
    pub fn execute(&mut self, spec: &StateSpec, plan: &StepPlan) {
        for &page in &plan.fresh {
            self.pages.insert(page, vec![POISON; spec.classes()[page.class].columns]);
        }
        for copy in &plan.copies {
            let mut tags = self.pages[&copy.from].clone();
            assert!(tags[..copy.columns].iter().all(|&tag| tag != POISON), "a copied column was written");
            if copy.from.class != copy.to.class {
                for tag in &mut tags[..copy.columns] {
                    assert_eq!(*tag & ENCODED, 0, "encoded twice");
                    *tag |= ENCODED;
                }
                tags[copy.columns..].fill(POISON);
            }
            self.pages.insert(copy.to, tags);
        }
        for segment in &plan.segments {
            for (group, span) in segment.spans.iter().enumerate() {
                match span {
                    Span::Columns(columns) => self.append(spec, plan, segment, group, columns),
                    Span::States(states) => {
                        let mut state = states.from.map_or(0, |id| self.pages[&PageId { class: states.class, id }][0]);
                        let mut to = states.to.iter();
                        let mut next = to.next();
                        for i in 0..segment.count {
                            state = fold(state, plan.tokens[segment.start + i]);
                            if let Some(&(after, id)) = next
                                && after == i + 1
                            {
                                self.pages.insert(PageId { class: states.class, id }, vec![state]);
                                next = to.next();
                            }
                        }
                        assert!(next.is_none());
                    }
                }
            }
        }
    }

    /// The highest page number ever used in a class.
    pub fn highest(&self, class: usize) -> u64 {
        self.pages.keys().filter(|page| page.class == class).map(|page| u64::from(page.id)).max().unwrap_or(0)
    }

    fn append(&mut self, spec: &StateSpec, plan: &StepPlan, segment: &Segment, group: usize, columns: &Columns) {
        let encoded = columns.table.class != spec.class(group, false);
        for (i, token) in segment.writers(columns).enumerate() {
            let position = columns.past + i;
            let page = PageId { class: columns.table.class, id: columns.table.id(position / spec.page()) };
            let tag = u64::from(plan.tokens[token]) | if encoded { ENCODED } else { 0 };
            self.pages.get_mut(&page).unwrap()[position % spec.page()] = tag;
        }
        // Every column that a query of the step sees is there.
        for i in 0..segment.count {
            let position = plan.positions[segment.start + i] as usize;
            let Visible { sinks, start, end } = segment.visible(columns, spec.groups()[group].window, i, position);
            if columns.count > 0 {
                let window = spec.groups()[group].window;
                assert_eq!(start, window.map_or(0, |window| end.saturating_sub(window.size)));
                assert_eq!(sinks, window.map_or(0, |window| window.sinks.min(start)));
            }
            for column in (0..sinks).chain(start..end) {
                assert_ne!(self.column(spec, &columns.table, column), POISON, "a query sees what nobody wrote");
            }
        }
    }

    fn column(&self, spec: &StateSpec, table: &Table, column: usize) -> u64 {
        let page = PageId { class: table.class, id: table.id(column / spec.page()) };
        self.pages[&page][column % spec.page()]
    }
}

/// A row as lists.
#[derive(Debug, Clone, Default)]
pub struct Naive {
    pub tokens: Vec<u32>,
    /// Tags by group; empty for a recurrent group.
    pub columns: Vec<Vec<u32>>,
}

impl Naive {
    pub fn new(spec: &StateSpec) -> Self {
        Self { tokens: Vec::new(), columns: vec![Vec::new(); spec.groups().len()] }
    }

    pub fn append(&mut self, spec: &StateSpec, tokens: &[u32], companions: bool) {
        let (before, after) = (self.tokens.len(), self.tokens.len() + tokens.len());
        for (columns, group) in self.columns.iter_mut().zip(spec.groups()) {
            let count = group.columns(after) - group.columns(before);
            if group.kind != Kind::Recurrent && (companions || group.lag.is_none()) {
                columns.extend_from_slice(&tokens[tokens.len() - count..]);
            }
        }
        self.tokens.extend_from_slice(tokens);
    }

    /// Back to `len` tokens, with at most the columns that `start` had and its later tokens added.
    pub fn settle(&mut self, spec: &StateSpec, start: &Self, len: usize) {
        for ((columns, started), group) in self.columns.iter_mut().zip(&start.columns).zip(spec.groups()) {
            let kept = started.len() + group.columns(len) - group.columns(start.tokens.len());
            columns.truncate(kept.min(columns.len()));
        }
        self.tokens.truncate(len);
    }

    pub fn truncate(&mut self, spec: &StateSpec, len: usize) {
        for (columns, group) in self.columns.iter_mut().zip(spec.groups()) {
            let less = group.columns(self.tokens.len()) - group.columns(len);
            columns.truncate(columns.len().saturating_sub(less));
        }
        self.tokens.truncate(len);
    }

    /// Checks that `row` holds exactly this, byte for byte, and no page more.
    pub fn check(&self, store: &Store, row: &Row) {
        let spec = row.pool().spec();
        assert_eq!(row.len(), self.tokens.len());
        for (index, group) in spec.groups().iter().enumerate() {
            let Some(read) = row.read(index) else {
                let want = (!self.tokens.is_empty()).then(|| self.tokens.iter().fold(0, |s, &tag| fold(s, tag)));
                let class = spec.class(index, false);
                assert_eq!(row.state(index).map(|id| store.pages[&PageId { class, id }][0]), want);
                assert_eq!(row.pages(index).ids().len(), usize::from(want.is_some()), "one state at rest");
                continue;
            };
            self.check_read(store, spec, index, &read);
            if let Some(window) = group.window {
                let bound = window.size.div_ceil(spec.page()) + 1 + window.sinks.div_ceil(spec.page());
                assert!(read.table().ids.len() <= bound, "a window holds no more than it needs");
            } else {
                assert_eq!(read.table().ids.len(), self.columns[index].len().div_ceil(spec.page()));
            }
        }
    }

    pub fn check_read(&self, store: &Store, spec: &StateSpec, index: usize, read: &kvern_state::Read) {
        let (columns, group) = (&self.columns[index], &spec.groups()[index]);
        assert_eq!(read.len(), columns.len());
        let sinks = group.window.map_or(0, |window| window.sinks).min(read.start());
        let late = group.late.as_ref();
        for column in (0..sinks).chain(read.start()..columns.len()) {
            let tag = store.column(spec, read.table(), column);
            let encoded = match late {
                Some(late) if columns.len() > late.start => true,
                // A row cut back to where the encoding began keeps it; the next append would begin it again.
                Some(late) if columns.len() == late.start => tag & ENCODED != 0,
                _ => false,
            };
            let want = u64::from(columns[column]) | if encoded { ENCODED } else { 0 };
            assert_eq!(tag, want, "group {index}, column {column}");
        }
    }
}

/// Groups of every kind and policy, small enough for pages of 4 to 32 tokens to matter.
pub fn groups(choice: &[usize], size: usize, start: usize) -> Vec<GroupSpec> {
    let attention = |layers| GroupSpec::attention(layers, 1, 2, 2, (Codec::F32, Codec::F16));
    let coded = || ["q8", "turbo3"].map(|name| Codec::from_name(name).unwrap()).to_vec();
    let all = [
        attention(1),
        attention(2).windowed(Window { size, sinks: 0 }),
        attention(1).windowed(Window { size, sinks: 5 }),
        attention(3).late(start, coded()),
        attention(1).windowed(Window { size, sinks: 0 }).late(start, coded()),
        GroupSpec::latent(2, 4, 2, Some(2), Codec::F16),
        GroupSpec::recurrent(2, &[("tail", 3), ("state", 8)]),
        attention(1).companion(1),
        GroupSpec::latent(1, 4, 2, None, Codec::Bf16).windowed(Window { size, sinks: 2 }).companion(2),
        GroupSpec::recurrent(1, &[("hidden", 4)]),
    ];
    choice.iter().map(|&index| all[index % all.len()].clone()).collect()
}
