//! A step's plan on the device: one copy from pinned memory into one buffer, at addresses that follow from the step's size.
//!
//! A step of rows that generate is rounded up to a size that is kept recorded. The rows beyond its own belong to no segment; nobody sees them.

use cudarc::driver::CudaEvent;
use kvern_backend::{Error as BackendError, Slot};
use kvern_state::{Columns, Span, States, StepPlan};

use crate::device::{Argument, Device, Error, Memory, Pinned, Trying};
use crate::pages::{Moves, Pages};

/// Columns after which attention starts its fold afresh; the same as in `kernels/attention.cu`.
pub(crate) const STRIDE: usize = 512;
/// Tokens of a segment up to which each is attended on its own; the same as in `kernels/attention.cu`.
const FEW: usize = 4;
/// What is no token, no segment, no page.
const NONE: u32 = u32::MAX;

/// What decides whether a recorded step can be played again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size {
    /// Tokens, segments and outputs.
    pub(crate) rows: usize,
    /// Strides of the longest row.
    pub(crate) strides: usize,
    /// Whether tokens are drawn.
    pub(crate) draws: bool,
}

/// `Plan` of `kernels/common.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    positions: u64,
    owners: u64,
    segments: u64,
    spans: u64,
    ids: u64,
    singles: u64,
    window: u32,
    sinks: u32,
}

impl Argument for Plan {}

/// `Draw` of `kernels/draw.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Draw {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
    uniform: f64,
}

/// Bytes before each array of a step.
#[derive(Debug, Clone, Copy, Default)]
struct Layout {
    tokens: usize,
    positions: usize,
    owners: usize,
    outputs: usize,
    singles: usize,
    pending: usize,
    segments: usize,
    draws: usize,
    spans: usize,
    /// Page tables, then pairs of pages to copy: the arrays whose length varies.
    ids: usize,
}

impl Layout {
    fn new(tokens: usize, outputs: usize, singles: usize, segments: usize, groups: usize) -> Self {
        let mut at = 0;
        let mut take = |bytes: usize| {
            let start = at;
            at += bytes.next_multiple_of(16);
            start
        };
        Self {
            tokens: take(tokens * 4),
            positions: take(tokens * 4),
            owners: take(tokens * 4),
            outputs: take(outputs * 4),
            singles: take(singles * 4),
            pending: take(tokens * 8),
            segments: take(segments * 8),
            draws: take(outputs * size_of::<Draw>()),
            spans: take(segments * groups * 32),
            ids: take(0),
        }
    }
}

/// A step that the device has, or has on its way.
pub struct Step {
    pub(crate) plan: StepPlan,
    /// Rows of activations.
    pub(crate) tokens: usize,
    pub(crate) outputs: usize,
    /// Tokens that are attended each on its own.
    pub(crate) singles: usize,
    /// Segments, those that round the step up included.
    segments: usize,
    /// Tokens of the largest segment that is attended as a window; 0 if none is.
    pub(crate) window: usize,
    /// Strides of the longest row.
    pub(crate) strides: usize,
    /// Set when the step may be recorded or played.
    pub(crate) size: Option<Size>,
    pub(crate) draws: bool,
    layout: Layout,
    base: u64,
    windows: Vec<(u32, u32)>,
}

impl Step {
    fn at(&self, offset: usize) -> u64 {
        self.base + offset as u64
    }

    pub(crate) fn tokens_at(&self) -> u64 {
        self.at(self.layout.tokens)
    }

    pub(crate) fn positions_at(&self) -> u64 {
        self.at(self.layout.positions)
    }

    pub(crate) fn outputs_at(&self) -> u64 {
        self.at(self.layout.outputs)
    }

    pub(crate) fn draws_at(&self) -> u64 {
        self.at(self.layout.draws)
    }

    pub(crate) fn pending_at(&self) -> u64 {
        self.at(self.layout.pending)
    }

    /// Segments, those without tokens included.
    pub(crate) fn segments(&self) -> usize {
        self.segments
    }

    /// The plan for kernels that work on a slot's group.
    pub(crate) fn plan(&self, slot: Slot) -> Plan {
        let (window, sinks) = self.windows[slot.group];
        Plan {
            positions: self.positions_at(),
            owners: self.at(self.layout.owners),
            segments: self.at(self.layout.segments),
            spans: self.at(self.layout.spans + slot.group * self.segments * 32),
            ids: self.at(self.layout.ids),
            singles: self.at(self.layout.singles),
            window,
            sinks,
        }
    }
}

/// Strides that a step of `strides` is rounded up to: eight sizes for each doubling.
fn rounded_strides(strides: usize) -> usize {
    strides.next_multiple_of((strides.next_power_of_two() / 8).max(1))
}

/// Rows that a step of `rows` is rounded up to.
pub(crate) fn rounded(rows: usize) -> usize {
    match rows {
        0..=4 => rows.next_power_of_two(),
        5..=64 => rows.next_multiple_of(8),
        _ => rows.next_multiple_of(32),
    }
}

/// The buffer that plans are copied to, and the pinned ones that they are copied from.
pub(crate) struct Uploads {
    device: Device,
    memory: Memory,
    staging: [(Pinned, Option<CudaEvent>); 2],
    turn: usize,
}

impl Uploads {
    pub(crate) fn new(device: &Device) -> Result<Self, Error> {
        const START: usize = 1 << 20;
        let pinned = || Ok::<_, Error>((Pinned::new(device, START)?, None));
        Ok(Self { device: device.clone(), memory: device.allocate(START)?, staging: [pinned()?, pinned()?], turn: 0 })
    }

    /// Takes a plan over. The buffer moves when it is too small, and then what is recorded is worth nothing; the second value says so.
    pub(crate) fn begin(&mut self, plan: StepPlan, pages: &mut Pages) -> Result<(Step, bool), BackendError> {
        let moves = pages.moves(&plan)?;
        let mut step = Step::new(plan, pages);
        let groups = pages.spec().groups().len();
        // An upper bound of the page tables, by what the plan holds.
        let tables: usize = step.plan.segments.iter().flat_map(|segment| &segment.spans).map(table_len).sum();
        let needed = step.layout.ids + (tables + 4) * 4 + moves.pairs.len() * 16 + 64;
        let moved = needed > self.memory.bytes();
        if moved {
            let size = needed.next_power_of_two();
            self.memory = self.device.allocate(size)?;
            for (pinned, event) in &mut self.staging {
                (*pinned, *event) = (Pinned::new(&self.device, size)?, None);
            }
        }
        step.base = self.memory.address();
        self.turn ^= 1;
        let (pinned, event) = &mut self.staging[self.turn];
        if let Some(event) = event.take() {
            event.synchronize().trying("wait for an earlier step's plan")?;
        }
        let (bytes, pairs) = step.fill(groups, &moves, pinned.bytes_mut());
        self.memory.take(pinned, bytes)?;
        *event = Some(self.device.stream().record_event(None).trying("record an event")?);
        for &(class, first, count) in &moves.launches {
            let at = step.base + (pairs + first * 16) as u64;
            let grid = crate::device::Grid::new((32, count as u32), 256);
            // SAFETY: pairs of addresses of whole pages of this class.
            unsafe { self.device.launch("copy_pages", grid, &[&at, &pages.pieces(class)]) }?;
        }
        pages.encode(&step.plan)?;
        Ok((step, moved))
    }
}

fn table_len(span: &Span) -> usize {
    match span {
        Span::Columns(columns) => columns.table.ids.len(),
        Span::States(states) => states.to.len() * 2,
    }
}

/// Writes values at a byte offset.
fn put<T: bytemuck::Pod>(bytes: &mut [u8], at: usize, values: &[T]) {
    bytes[at..][..size_of_val(values)].copy_from_slice(bytemuck::cast_slice(values));
}

impl Step {
    fn new(plan: StepPlan, pages: &Pages) -> Self {
        let longest = plan.segments.iter().flat_map(|segment| &segment.spans).map(|span| match span {
            Span::Columns(columns) => columns.past + columns.count,
            Span::States(_) => 0,
        });
        let strides = longest.max().unwrap_or(0).div_ceil(STRIDE).max(1);
        let draws = plan.draws.iter().any(Option::is_some);
        let generates = plan.segments.iter().all(|segment| segment.count <= 1);
        let all = plan.outputs.len() == plan.tokens.len() && !plan.tokens.is_empty();
        let rows = rounded(plan.segments.len());
        let size = (generates && all && plan.reads.is_empty()).then(|| Size {
            rows,
            strides: rounded_strides(strides),
            draws,
        });
        let window = plan.segments.iter().map(|segment| segment.count).filter(|&count| count > FEW).max().unwrap_or(0);
        let few = || plan.segments.iter().filter(|segment| segment.count <= FEW);
        let singles: usize = few().map(|segment| segment.count).sum();
        let [tokens, outputs, singles, segments] = match size {
            Some(_) => [rows; 4],
            None => [plan.tokens.len(), plan.outputs.len(), singles, plan.segments.len()],
        };
        let groups = pages.spec().groups();
        let layout = Layout::new(tokens, outputs, singles, segments, groups.len());
        let windows = groups.iter().map(|group| group.window.map_or((0, 0), |w| (w.size as u32, w.sinks as u32)));
        let windows = windows.collect();
        let strides = size.map_or(strides, |size| size.strides);
        Self { plan, tokens, outputs, singles, segments, window, strides, size, draws, layout, base: 0, windows }
    }

    /// Writes the plan; gives the number of bytes, and where the pairs of pages are.
    fn fill(&self, groups: usize, moves: &Moves, bytes: &mut [u8]) -> (usize, usize) {
        let (plan, layout) = (&self.plan, self.layout);
        let padded = |values: &[u32], len: usize, fill: u32| {
            let mut values = values.to_vec();
            values.resize(len, fill);
            values
        };
        put(bytes, layout.tokens, &padded(&plan.tokens, self.tokens, 0));
        put(bytes, layout.positions, &padded(&plan.positions, self.tokens, 0));
        put(bytes, layout.outputs, &padded(&plan.outputs, self.outputs, 0));
        let (mut owners, mut singles) = (vec![NONE; self.tokens], Vec::new());
        let mut segments = vec![[0u32; 2]; self.segments];
        for (index, segment) in plan.segments.iter().enumerate() {
            segments[index] = [segment.start as u32, segment.count as u32];
            let tokens = segment.start..segment.start + segment.count;
            owners[tokens.clone()].fill(index as u32);
            if segment.count <= FEW {
                singles.extend(tokens.map(|token| token as u32));
            }
        }
        put(bytes, layout.owners, &owners);
        put(bytes, layout.singles, &padded(&singles, self.singles, NONE));
        put(bytes, layout.segments, &segments);
        let pending: Vec<u32> = plan.pending.iter().flat_map(|pending| [pending.token, pending.output]).collect();
        put(bytes, layout.pending, &padded(&pending, self.tokens * 2, NONE));
        let nobody = Draw { temperature: -1.0, top_p: 1.0, min_p: 0.0, top_k: 0, uniform: 0.0 };
        let draw = |output: usize| match plan.draws.get(output).copied().flatten() {
            None => nobody,
            Some(kvern_state::Draw { temperature, top_p, min_p, top_k, uniform }) => {
                Draw { temperature, top_p, min_p, top_k, uniform }
            }
        };
        put(bytes, layout.draws, &(0..self.outputs).map(draw).collect::<Vec<_>>());
        let mut ids: Vec<u32> = Vec::new();
        for group in 0..groups {
            let mut spans = vec![[0u32; 8]; self.segments];
            for (span, segment) in spans.iter_mut().zip(&plan.segments) {
                *span = match segment.spans.get(group) {
                    None => [0; 8],
                    Some(Span::Columns(columns)) => column_span(columns, &mut ids),
                    Some(Span::States(states)) => state_span(states, &mut ids),
                };
            }
            put(bytes, layout.spans + group * self.segments * 32, &spans);
        }
        put(bytes, layout.ids, &ids);
        let pairs = (layout.ids + ids.len() * 4).next_multiple_of(16);
        put(bytes, pairs, &moves.pairs);
        (pairs + moves.pairs.len() * 16, pairs)
    }
}

/// `Span` of `kernels/common.cuh`.
fn column_span(columns: &Columns, ids: &mut Vec<u32>) -> [u32; 8] {
    let at = ids.len() as u32;
    let table = &columns.table;
    ids.extend_from_slice(&table.ids);
    let (past, count) = (columns.past as u32, columns.count as u32);
    [past, count, at, table.kept as u32, table.skipped as u32, columns.first as u32, table.class as u32, 0]
}

/// The same for a recurrent state.
fn state_span(states: &States, ids: &mut Vec<u32>) -> [u32; 8] {
    let at = ids.len() as u32;
    ids.extend(states.to.iter().flat_map(|&(after, id)| [after as u32, id]));
    [states.from.unwrap_or(NONE), states.to.len() as u32, at, 0, 0, 0, states.class as u32, 0]
}
