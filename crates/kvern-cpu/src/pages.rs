//! Pages in memory: keys as panels whose lanes are tokens, everything else with its values in lanes.
//!
//! ```text
//! page = [layer][plane]   keys:   [head][panel of 16 columns][dim][16 columns]
//!                         others: [head][column][dim]
//!                         codes:  [head], as crate::coded says
//! ```
//!
//! Decode and prefill then share each score's order (the head dimension, ascending) and each output's order (tokens, ascending), while
//! a tile of queries reuses every key and value it loads. A latent is key and value at once and stays with its values in lanes: its scores
//! end in one sum over lanes, which its length pays for. A page is allocated when it is first used.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvern_backend::{Error, Part};
use kvern_base::{AllocError, Buffer, Element, Raw, bf16, f16};
use kvern_state::{Class, Codec, Kind, PageCopy, PageId, Scale, Segment, StateSpec, StepPlan, Table};

use crate::attention::STRIDE;
use crate::coded::Coded;
use crate::isa::{Isa, Kernel, LANES, Lane};
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// Runs an expression with `$E` as the element type that a [`Raw`] names, if there is one.
macro_rules! with_raw {
    ($raw:expr, $E:ident => $run:expr) => {
        match $raw {
            Some(Raw::F32) => {
                type $E = f32;
                $run
            }
            Some(Raw::F16) => {
                type $E = f16;
                $run
            }
            Some(Raw::Bf16) => {
                type $E = bf16;
                $run
            }
            None => {}
        }
    };
}
pub(crate) use with_raw;

/// One plane of a layer in a page.
#[derive(Debug, Clone, Copy)]
pub struct Plane {
    /// Bytes before it in its layer.
    offset: usize,
    /// Heads.
    pub heads: usize,
    /// Values of one head.
    pub dim: usize,
    /// How it is stored.
    pub codec: Codec,
    /// Columns of the page.
    columns: usize,
    /// Whether lanes are columns.
    panels: bool,
}

impl Plane {
    fn bytes(&self) -> usize {
        self.columns * self.column_bytes()
    }

    /// Bytes of one column.
    fn column_bytes(&self) -> usize {
        self.heads * self.codec.bytes(self.dim)
    }

    /// One head's codes, if it has codes.
    #[inline(always)]
    pub fn coded(&self) -> Option<Coded> {
        let Self { dim, columns, panels: keys, .. } = *self;
        self.codec.coding().map(|coding| Coded { coding, dim, columns, keys })
    }

    /// Where one head is in a layer's bytes.
    #[inline(always)]
    fn head_range(&self, head: usize) -> Range<usize> {
        let size = self.columns * self.codec.bytes(self.dim);
        self.offset + head * size..self.offset + (head + 1) * size
    }

    /// One head's part of a layer's bytes.
    #[inline(always)]
    pub fn head_bytes<'a>(&self, layer: &'a [u8], head: usize) -> &'a [u8] {
        &layer[self.head_range(head)]
    }

    /// One head's elements, of all columns, in a layer's bytes.
    #[inline(always)]
    pub fn head<'a, E: Element>(&self, layer: &'a [u8], head: usize) -> &'a [E] {
        let size = self.columns * self.dim * size_of::<E>();
        bytemuck::cast_slice(&layer[self.offset + head * size..][..size])
    }

    #[inline(always)]
    fn head_mut<'a, E: Element>(&self, layer: &'a mut [u8], head: usize) -> &'a mut [E] {
        let size = self.columns * self.dim * size_of::<E>();
        bytemuck::cast_slice_mut(&mut layer[self.offset + head * size..][..size])
    }

    /// Where one head's column begins within [`Self::head`], and the distance of its elements.
    fn column(&self, column: usize) -> (usize, usize) {
        if self.panels { (column / LANES * LANES * self.dim + column % LANES, LANES) } else { (column * self.dim, 1) }
    }

    /// Copies columns to canonical order, whose bytes need not be aligned.
    fn export(&self, layer: &[u8], columns: Range<usize>, out: &mut [u8]) {
        let Some(coded) = self.coded() else {
            return with_raw!(self.codec.raw(), E => self.export_raw::<E>(layer, columns, out));
        };
        let mut codes = vec![0; self.dim];
        let mut scales = vec![Scale::default(); coded.coding.groups(self.dim)];
        for (column, out) in columns.zip(out.chunks_exact_mut(self.column_bytes())) {
            for (head, out) in out.chunks_exact_mut(self.codec.bytes(self.dim)).enumerate() {
                coded.read(self.head_bytes(layer, head), column, &mut codes, &mut scales);
                coded.coding.write(&codes, &scales, out);
            }
        }
    }

    /// The inverse of [`Self::export`].
    fn import(&self, layer: &mut [u8], columns: Range<usize>, bytes: &[u8]) {
        let Some(coded) = self.coded() else {
            return with_raw!(self.codec.raw(), E => self.import_raw::<E>(layer, columns, bytes));
        };
        let mut codes = vec![0; self.dim];
        let mut scales = vec![Scale::default(); coded.coding.groups(self.dim)];
        for (column, bytes) in columns.zip(bytes.chunks_exact(self.column_bytes())) {
            for (head, bytes) in bytes.chunks_exact(self.codec.bytes(self.dim)).enumerate() {
                coded.coding.read(bytes, &mut codes, &mut scales);
                coded.write(&mut layer[self.head_range(head)], column, &codes, &scales);
            }
        }
    }

    fn export_raw<E: Element>(&self, layer: &[u8], columns: Range<usize>, out: &mut [u8]) {
        for head in 0..self.heads {
            let from = self.head::<E>(layer, head);
            for (column, out) in columns.clone().zip(out.chunks_exact_mut(self.column_bytes())) {
                let (start, step) = self.column(column);
                let out = out[head * self.dim * size_of::<E>()..].chunks_exact_mut(size_of::<E>()).take(self.dim);
                out.zip(from[start..].iter().step_by(step))
                    .for_each(|(out, x)| out.copy_from_slice(bytemuck::bytes_of(x)));
            }
        }
    }

    fn import_raw<E: Element>(&self, layer: &mut [u8], columns: Range<usize>, bytes: &[u8]) {
        for head in 0..self.heads {
            let to = self.head_mut::<E>(layer, head);
            for (column, bytes) in columns.clone().zip(bytes.chunks_exact(self.column_bytes())) {
                let (start, step) = self.column(column);
                let values = bytes[head * self.dim * size_of::<E>()..].chunks_exact(size_of::<E>()).take(self.dim);
                to[start..]
                    .iter_mut()
                    .step_by(step)
                    .zip(values)
                    .for_each(|(to, x)| *to = bytemuck::pod_read_unaligned(x));
            }
        }
    }

    /// Finds codes for one column. Gives false when a value is not finite.
    fn encode(&self, coded: Coded, layer: &mut [u8], column: usize, values: &[f32], scratch: &mut Encoding) -> bool {
        let Encoding { values: head_values, codes, scales } = scratch;
        codes.resize(self.dim, 0);
        scales.resize(coded.coding.groups(self.dim), Scale::default());
        let mut finite = true;
        for (head, values) in values.chunks_exact(self.dim).enumerate() {
            head_values.clear();
            head_values.extend_from_slice(values);
            finite &= coded.coding.quantize(head_values, codes, scales);
            coded.write(&mut layer[self.head_range(head)], column, codes, scales);
        }
        finite
    }

    /// Encodes one column.
    #[inline(always)]
    fn store<S: Isa, E: Lane>(&self, isa: S, layer: &mut [u8], column: usize, values: &[f32]) {
        let (start, step) = self.column(column);
        for (head, values) in values.chunks_exact(self.dim).enumerate() {
            let to = &mut self.head_mut::<E>(layer, head)[start..];
            let (chunks, rest) = values.as_chunks::<LANES>();
            let (mut whole, tail) = (0, chunks.len() * LANES * step);
            for chunk in chunks {
                let mut encoded = [E::from_f32(0.0); LANES];
                E::store(isa, isa.load(chunk), &mut encoded);
                if step == 1 {
                    to[whole..][..LANES].copy_from_slice(&encoded);
                } else {
                    to[whole..].iter_mut().step_by(step).zip(encoded).for_each(|(to, x)| *to = x);
                }
                whole += LANES * step;
            }
            for (i, &x) in rest.iter().enumerate() {
                to[tail + i * step] = E::from_f32(x);
            }
        }
    }
}

/// Where things lie in the pages of a class.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Columns of a page.
    pub columns: usize,
    /// The planes.
    pub planes: Vec<Plane>,
    layers: usize,
    layer_bytes: usize,
}

impl Layout {
    fn new(class: &Class, kind: Kind) -> Self {
        let (mut planes, mut offset) = (Vec::new(), 0);
        for (index, plane) in class.planes.iter().enumerate() {
            let panels = kind == Kind::Attention && index == 0;
            let (heads, dim, codec) = (plane.heads, plane.dim, plane.codec);
            planes.push(Plane { offset, heads, dim, codec, columns: class.columns, panels });
            offset += planes[index].bytes();
        }
        Self { columns: class.columns, planes, layers: class.layers, layer_bytes: offset }
    }

    /// Bytes before a plane in its layer.
    pub fn offset(&self, plane: usize) -> usize {
        self.planes[plane].offset
    }

    /// The bytes of a layer within a page.
    pub fn layer(&self, layer: usize) -> Range<usize> {
        layer * self.layer_bytes..(layer + 1) * self.layer_bytes
    }
}

/// Page storage: `classes[class][page id]`.
#[derive(Debug)]
pub struct Pages {
    spec: StateSpec,
    layouts: Vec<Layout>,
    classes: Vec<Vec<Option<Buffer>>>,
}

impl Pages {
    /// Storage for a pool of this state.
    pub fn new(spec: &StateSpec) -> Result<Self, Error> {
        let has_columns = spec.groups().iter().any(|group| group.kind != Kind::Recurrent);
        if has_columns && (!spec.page().is_multiple_of(LANES) || !STRIDE.is_multiple_of(spec.page())) {
            let found = format!("{} tokens", spec.page());
            return Err(Error::Unsupported { what: "a page", found, needs: "16 to 512 tokens" });
        }
        for group in spec.groups() {
            let both = [group.planes(false), group.planes(true)].concat();
            let in_lanes = |plane: &&kvern_state::Plane| match group.kind {
                Kind::Attention => plane.name != group.planes[0].name || plane.codec.coding().is_some(),
                Kind::Latent => true,
                Kind::Recurrent => false,
            };
            if let Some(plane) = both.iter().filter(in_lanes).find(|plane| !plane.dim.is_multiple_of(LANES)) {
                let found = format!("{} ({}, {})", plane.dim, plane.name, plane.codec.name());
                return Err(Error::Unsupported { what: "a dimension", found, needs: "a multiple of 16" });
            }
            let coded = |plane: &&kvern_state::Plane| plane.codec.coding().is_some();
            if let Some(plane) = both.iter().filter(|_| group.kind != Kind::Attention).find(coded) {
                let found = format!("{} for {} of {} state", plane.codec.name(), plane.name, group.kind.name());
                return Err(Error::Unsupported { what: "a codec", found, needs: "f32, f16 or bf16 there" });
            }
        }
        let layout = |class: &Class| Layout::new(class, spec.groups()[class.group].kind);
        let layouts = spec.classes().iter().map(layout).collect();
        Ok(Self { spec: spec.clone(), layouts, classes: spec.classes().iter().map(|_| Vec::new()).collect() })
    }

    /// What the model declared.
    pub fn spec(&self) -> &StateSpec {
        &self.spec
    }

    /// The layout of a class.
    pub fn layout(&self, class: usize) -> &Layout {
        &self.layouts[class]
    }

    fn allocate(&mut self, PageId { class, id }: PageId) -> Result<(), AllocError> {
        let pages = &mut self.classes[class];
        if pages.len() <= id as usize {
            pages.resize_with(id as usize + 1, || None);
        }
        if pages[id as usize].is_none() {
            pages[id as usize] = Some(Buffer::zeroed(self.spec.classes()[class].bytes() as usize)?);
        }
        Ok(())
    }

    /// Allocates the pages that a step is the first to write and makes its copies.
    pub fn begin(&mut self, plan: &StepPlan) -> Result<(), Error> {
        for &page in &plan.fresh {
            self.allocate(page)?;
        }
        for copy in &plan.copies {
            if copy.from.class == copy.to.class {
                self.copy(copy);
            } else {
                self.encode(plan, copy)?;
            }
        }
        Ok(())
    }

    fn copy(&mut self, PageCopy { from, to, .. }: &PageCopy) {
        let pages = &mut self.classes[to.class];
        let taken = pages[to.id as usize].take();
        if let (Some(mut to_page), Some(from_page)) = (taken, &pages[from.id as usize]) {
            to_page.bytes_mut().copy_from_slice(from_page.bytes());
            pages[to.id as usize] = Some(to_page);
        }
    }

    /// Decodes the columns of a page and encodes them into another class. It happens once in a row's life.
    fn encode(&mut self, plan: &StepPlan, PageCopy { from, to, columns }: &PageCopy) -> Result<(), Error> {
        let planes = |class: usize| self.spec.classes()[class].planes.clone();
        let (from_planes, to_planes) = (planes(from.class), planes(to.class));
        let table = |page: &PageId| Table { class: page.class, ids: vec![page.id], ..Table::default() };
        for layer in 0..self.layouts[to.class].layers {
            for (plane, (decode, encode)) in from_planes.iter().zip(&to_planes).enumerate() {
                let part = Part { layer, plane };
                let mut bytes = vec![0; columns * decode.column_bytes()];
                self.export(part, &table(from), 0..*columns, &mut bytes);
                let mut values = vec![0.0; decode.dim];
                let mut encoded = vec![0; columns * encode.column_bytes()];
                let heads = bytes.chunks_exact(decode.codec.bytes(decode.dim));
                let encoded_heads = encoded.chunks_exact_mut(encode.codec.bytes(encode.dim));
                for (head, (bytes, out)) in heads.zip(encoded_heads).enumerate() {
                    decode.codec.decode(bytes, &mut values);
                    if !encode.codec.encode(&values, out) {
                        return Err(Error::not_finite_in(plan, &self.spec, *to, layer, head / encode.heads));
                    }
                }
                self.import(None, part, &table(to), 0..*columns, &encoded)?;
            }
        }
        Ok(())
    }

    /// A layer of a page.
    #[inline(always)]
    pub fn page(&self, class: usize, id: u32, layer: usize) -> &[u8] {
        // `begin` and `import` allocate every page that a row holds.
        self.classes[class][id as usize].as_ref().map_or(&[], |page| &page.bytes()[self.layouts[class].layer(layer)])
    }

    /// Every page of a class, for writers of disjoint parts.
    pub fn parts(&mut self, class: usize) -> Vec<Option<Disjoint<'_, u8>>> {
        let parts = self.classes[class].iter_mut();
        parts.map(|page| page.as_mut().map(|page| Disjoint::new(page.bytes_mut()))).collect()
    }

    /// Stores a segment's columns: a tensor for each plane. The error is the first column that has a value without a code.
    pub fn append(
        &mut self,
        set: KernelSet,
        pool: &Pool,
        segment: &Segment,
        columns: &kvern_state::Columns,
        layer: usize,
        planes: &[&Tensor],
    ) -> Result<(), usize> {
        let class = columns.table.class;
        let layout = self.layouts[class].clone();
        let parts = self.parts(class);
        let (first, last) = (columns.past / layout.columns, (columns.past + columns.count).div_ceil(layout.columns));
        let writer = segment.writers(columns).start;
        let small = columns.count * planes.iter().map(|plane| plane.width()).sum::<usize>() < 1 << 15;
        let bad = AtomicUsize::new(usize::MAX);
        pool.run(last - first, if small { last } else { 1 }, |range| {
            for page in range.start + first..range.end + first {
                let Some(Some(part)) = parts.get(columns.table.id(page) as usize) else { continue };
                // SAFETY: a page with free columns belongs to one row, and items are disjoint in pages.
                let bytes = unsafe { part.part(layout.layer(layer)) };
                let from = columns.past.max(page * layout.columns);
                let to = (columns.past + columns.count).min((page + 1) * layout.columns);
                for position in from..to {
                    let (row, column) = (writer + position - columns.past, position % layout.columns);
                    let finite = encode(&layout, bytes, column, planes, row);
                    if !finite {
                        bad.fetch_min(position, Ordering::Relaxed);
                    }
                    set.run(Store { layout: &layout, bytes: &mut *bytes, column, planes, row });
                }
            }
        });
        match bad.into_inner() {
            usize::MAX => Ok(()),
            position => Err(position),
        }
    }

    /// Copies columns out in canonical order.
    pub fn export(&self, part: Part, table: &Table, columns: Range<usize>, out: &mut [u8]) {
        let layout = &self.layouts[table.class];
        let plane = layout.planes[part.plane];
        let mut rest = out;
        for piece in pieces(columns, layout.columns) {
            let (out, later) = rest.split_at_mut(plane.column_bytes() * piece.len());
            let layer = self.page(table.class, table.id(piece.start / layout.columns), part.layer);
            let start = piece.start % layout.columns;
            let columns = start..start + piece.len();
            plane.export(layer, columns, out);
            rest = later;
        }
    }

    /// The inverse of [`Self::export`].
    pub fn import(
        &mut self,
        pool: Option<&Pool>,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), AllocError> {
        for &id in &table.ids {
            self.allocate(PageId { class: table.class, id })?;
        }
        let layout = self.layouts[table.class].clone();
        let plane = layout.planes[part.plane];
        let parts = self.parts(table.class);
        let pieces: Vec<Range<usize>> = pieces(columns.clone(), layout.columns).collect();
        let run = |range: Range<usize>| {
            for piece in &pieces[range] {
                let Some(Some(page)) = parts.get(table.id(piece.start / layout.columns) as usize) else { continue };
                // SAFETY: pieces are disjoint in pages, and a row that is being restored has its pages for itself.
                let layer = unsafe { page.part(layout.layer(part.layer)) };
                let start = piece.start % layout.columns;
                let at = (piece.start - columns.start) * plane.column_bytes();
                let bytes = &bytes[at..][..piece.len() * plane.column_bytes()];
                plane.import(layer, start..start + piece.len(), bytes);
            }
        };
        match pool {
            Some(pool) => pool.run(pieces.len(), 4, run),
            None => run(0..pieces.len()),
        }
        Ok(())
    }
}

/// Cuts columns at the borders of pages.
fn pieces(columns: Range<usize>, page: usize) -> impl Iterator<Item = Range<usize>> {
    let Range { mut start, end } = columns;
    std::iter::from_fn(move || {
        let piece = start..end.min((start / page + 1) * page);
        start = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Memory for one head's codes.
#[derive(Default)]
struct Encoding {
    values: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<Scale>,
}

thread_local! {
    /// Grows to what a model needs and stays.
    static ENCODING: RefCell<Encoding> = RefCell::default();
}

/// Finds codes for one row of each plane's tensor that has codes. This is not a [`Kernel`]: every set stores the same bytes.
fn encode(layout: &Layout, layer: &mut [u8], column: usize, planes: &[&Tensor], row: usize) -> bool {
    let mut finite = true;
    for (plane, values) in layout.planes.iter().zip(planes) {
        if let Some(coded) = plane.coded() {
            let mut scratch = ENCODING.take();
            finite &= plane.encode(coded, layer, column, values.row(row), &mut scratch);
            ENCODING.set(scratch);
        }
    }
    finite
}

/// Rounds one row of each plane's tensor that has no codes into a layer of its page.
struct Store<'a> {
    layout: &'a Layout,
    bytes: &'a mut [u8],
    column: usize,
    planes: &'a [&'a Tensor],
    row: usize,
}

impl Kernel for Store<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        for (plane, values) in self.layout.planes.iter().zip(self.planes) {
            with_raw!(plane.codec.raw(), E => plane.store::<S, E>(isa, self.bytes, self.column, values.row(self.row)));
        }
    }
}
