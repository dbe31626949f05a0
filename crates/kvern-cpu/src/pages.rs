//! Pages in memory: keys as panels whose lanes are tokens, values with the head dimension in lanes.
//!
//! ```text
//! page = [layer] { keys [head][panel of 16 tokens][k_dim][16 tokens] | values [head][token][v_dim] }
//! ```
//!
//! Decode and prefill then share each score's order (the head dimension, ascending) and each output's order (tokens, ascending), while
//! a tile of queries reuses every key and value it loads. A page is allocated when it is first used.

use kvern_backend::{Columns, Error, Slot};
use kvern_base::{AllocError, Buffer, Element, Raw, bf16, f16};
use kvern_state::{GroupSpec, PageCopy, StateSpec, StepPlan};

use crate::attention::STRIDE;
use crate::isa::{Isa, Kernel, LANES, Lane};
use crate::pool::{Disjoint, Pool};
use crate::{KernelSet, Tensor};

/// Page storage: `groups[group][page id]`.
#[derive(Debug)]
pub struct Pages {
    spec: StateSpec,
    groups: Vec<Vec<Option<Buffer>>>,
}

/// Where things lie in a page, in elements of their side's type.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Tokens of a page.
    pub page: usize,
    /// Key/value heads.
    pub heads: usize,
    /// Values of a key.
    pub k_dim: usize,
    /// Values of a value.
    pub v_dim: usize,
    /// Element type of keys.
    pub k: Raw,
    /// Element type of values.
    pub v: Raw,
}

impl Layout {
    fn new(page: usize, group: &GroupSpec) -> Self {
        let (heads, k_dim, v_dim) = (group.kv_heads, group.k_dim, group.v_dim);
        Self { page, heads, k_dim, v_dim, k: group.k.raw(), v: group.v.raw() }
    }

    fn k_bytes(&self) -> usize {
        self.heads * self.page * self.k_dim * self.k.bytes()
    }

    fn layer_bytes(&self) -> usize {
        self.k_bytes() + self.heads * self.page * self.v_dim * self.v.bytes()
    }

    /// One head's keys: panels `[page / 16][k_dim][16]`.
    #[inline(always)]
    pub fn keys<'a, E: Element>(&self, page: &'a [u8], layer: usize, head: usize) -> &'a [E] {
        let size = self.page * self.k_dim * size_of::<E>();
        bytemuck::cast_slice(&page[layer * self.layer_bytes() + head * size..][..size])
    }

    /// One head's values: `[page][v_dim]`.
    #[inline(always)]
    pub fn values<'a, E: Element>(&self, page: &'a [u8], layer: usize, head: usize) -> &'a [E] {
        let size = self.page * self.v_dim * size_of::<E>();
        bytemuck::cast_slice(&page[layer * self.layer_bytes() + self.k_bytes() + head * size..][..size])
    }
}

impl Pages {
    /// Storage for a pool of this state.
    pub fn new(spec: &StateSpec) -> Result<Self, Error> {
        if !spec.page().is_multiple_of(LANES) || !STRIDE.is_multiple_of(spec.page()) {
            let found = format!("{} tokens", spec.page());
            return Err(Error::Unsupported { what: "a page", found, needs: "16 to 512 tokens" });
        }
        for group in spec.groups() {
            if !group.v_dim.is_multiple_of(LANES) {
                let found = group.v_dim.to_string();
                return Err(Error::Unsupported { what: "a value dimension", found, needs: "a multiple of 16" });
            }
        }
        Ok(Self { spec: spec.clone(), groups: spec.groups().iter().map(|_| Vec::new()).collect() })
    }

    /// Allocates the pages that a step names and makes its copies.
    pub fn begin(&mut self, plan: &StepPlan) -> Result<(), AllocError> {
        for (group, pages) in self.groups.iter_mut().enumerate() {
            let bytes = self.spec.page_bytes(group) as usize;
            for &id in plan.segments.iter().flat_map(|segment| &segment.tables[group]) {
                if pages.len() <= id as usize {
                    pages.resize_with(id as usize + 1, || None);
                }
                if pages[id as usize].is_none() {
                    pages[id as usize] = Some(Buffer::zeroed(bytes)?);
                }
            }
        }
        for &PageCopy { group, from, to } in &plan.copies {
            let taken = self.groups[group][to as usize].take();
            if let (Some(mut to_page), Some(from_page)) = (taken, &self.groups[group][from as usize]) {
                to_page.bytes_mut().copy_from_slice(from_page.bytes());
                self.groups[group][to as usize] = Some(to_page);
            }
        }
        Ok(())
    }

    /// What the model declared of a group.
    pub fn group(&self, group: usize) -> &GroupSpec {
        &self.spec.groups()[group]
    }

    /// The layout of a group's pages.
    pub fn layout(&self, group: usize) -> Layout {
        Layout::new(self.spec.page(), &self.spec.groups()[group])
    }

    /// A page's bytes.
    #[inline(always)]
    pub fn page(&self, group: usize, id: u32) -> &[u8] {
        // `begin` allocated every page that a step names.
        self.groups[group][id as usize].as_ref().map_or(&[], Buffer::bytes)
    }

    /// Stores a step's keys and values.
    pub fn append(&mut self, set: KernelSet, pool: &Pool, plan: &StepPlan, slot: Slot, k: &Tensor, v: &Tensor) {
        let layout = self.layout(slot.group);
        let mut parts: Vec<Option<Disjoint<'_, u8>>> = Vec::with_capacity(self.groups[slot.group].len());
        parts
            .extend(self.groups[slot.group].iter_mut().map(|page| page.as_mut().map(|p| Disjoint::new(p.bytes_mut()))));
        let layer = layout.layer_bytes();
        for segment in &plan.segments {
            let table = &segment.tables[slot.group];
            let first = segment.past / layout.page;
            let last = (segment.past + segment.count).div_ceil(layout.page);
            pool.run(last - first, if segment.count * k.width() < 1 << 14 { last } else { 1 }, |range| {
                for (page, &id) in table.iter().enumerate().skip(range.start + first).take(range.len()) {
                    let Some(Some(part)) = parts.get(id as usize) else { continue };
                    // SAFETY: a page with free columns belongs to one row, and items are disjoint in pages.
                    let bytes = unsafe { part.part(slot.layer * layer..(slot.layer + 1) * layer) };
                    let from = segment.past.max(page * layout.page);
                    let to = (segment.past + segment.count).min((page + 1) * layout.page);
                    for position in from..to {
                        let row = segment.start + position - segment.past;
                        let token = position % layout.page;
                        set.run(Store { layout, bytes: &mut *bytes, token, k: k.row(row), v: v.row(row) });
                    }
                }
            });
        }
    }

    /// Copies a layer's first `len` columns out in canonical order.
    pub fn export(&self, slot: Slot, table: &[u32], len: usize) -> Columns {
        let layout = self.layout(slot.group);
        let mut columns = Columns { k: Vec::new(), v: Vec::new() };
        for position in 0..len {
            let page = self.page(slot.group, table[position / layout.page]);
            for head in 0..layout.heads {
                match layout.k {
                    Raw::F32 => export_key::<f32>(layout, page, slot.layer, head, position, &mut columns.k),
                    Raw::F16 => export_key::<f16>(layout, page, slot.layer, head, position, &mut columns.k),
                    Raw::Bf16 => export_key::<bf16>(layout, page, slot.layer, head, position, &mut columns.k),
                }
                let column = layout.v_dim * layout.v.bytes();
                let start = layout.k_bytes() + (head * layout.page + position % layout.page) * column;
                columns.v.extend_from_slice(&page[slot.layer * layout.layer_bytes() + start..][..column]);
            }
        }
        columns
    }
}

fn export_key<E: Element>(layout: Layout, page: &[u8], layer: usize, head: usize, position: usize, out: &mut Vec<u8>) {
    let token = position % layout.page;
    let panel = &layout.keys::<E>(page, layer, head)[token / LANES * layout.k_dim * LANES..][..layout.k_dim * LANES];
    panel.iter().skip(token % LANES).step_by(LANES).for_each(|x| out.extend_from_slice(bytemuck::bytes_of(x)));
}

/// Encodes one token's keys and values into a layer of its page.
struct Store<'a> {
    layout: Layout,
    bytes: &'a mut [u8],
    token: usize,
    k: &'a [f32],
    v: &'a [f32],
}

impl Kernel for Store<'_> {
    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let (keys, values) = self.bytes.split_at_mut(self.layout.k_bytes());
        match self.layout.k {
            Raw::F32 => store_keys::<S, f32>(isa, self.layout, bytemuck::cast_slice_mut(keys), self.token, self.k),
            Raw::F16 => store_keys::<S, f16>(isa, self.layout, bytemuck::cast_slice_mut(keys), self.token, self.k),
            Raw::Bf16 => store_keys::<S, bf16>(isa, self.layout, bytemuck::cast_slice_mut(keys), self.token, self.k),
        }
        match self.layout.v {
            Raw::F32 => store_values::<S, f32>(isa, self.layout, bytemuck::cast_slice_mut(values), self.token, self.v),
            Raw::F16 => store_values::<S, f16>(isa, self.layout, bytemuck::cast_slice_mut(values), self.token, self.v),
            Raw::Bf16 => {
                store_values::<S, bf16>(isa, self.layout, bytemuck::cast_slice_mut(values), self.token, self.v)
            }
        }
    }
}

#[inline(always)]
fn store_keys<S: Isa, E: Lane>(isa: S, layout: Layout, keys: &mut [E], token: usize, k: &[f32]) {
    for (head, k) in k.chunks_exact(layout.k_dim).enumerate() {
        let panel = (head * layout.page + token - token % LANES) * layout.k_dim;
        let out = keys[panel..][..layout.k_dim * LANES].iter_mut().skip(token % LANES).step_by(LANES);
        let (chunks, rest) = k.as_chunks::<LANES>();
        let mut out = out;
        for chunk in chunks {
            let mut encoded = [E::from_f32(0.0); LANES];
            E::store(isa, isa.load(chunk), &mut encoded);
            out.by_ref().zip(encoded).for_each(|(out, x)| *out = x);
        }
        out.zip(rest).for_each(|(out, &x)| *out = E::from_f32(x));
    }
}

#[inline(always)]
fn store_values<S: Isa, E: Lane>(isa: S, layout: Layout, values: &mut [E], token: usize, v: &[f32]) {
    for (head, v) in v.chunks_exact(layout.v_dim).enumerate() {
        let out = &mut values[(head * layout.page + token) * layout.v_dim..][..layout.v_dim];
        for (out, v) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(v.as_chunks::<LANES>().0) {
            E::store(isa, isa.load(v), out);
        }
    }
}
