//! Page storage on the device: slabs of pages for each class, and where everything lies in them.
//!
//! ```text
//! page = [layer][plane]   keys, latents, states: [head][column][dim]
//!                         values:                [head][dim][column]
//! ```
//!
//! Slabs are plain allocations, made as pages are first used; a page never moves, so that recorded steps find it. A page that is handed out again is zeroed.

use std::ops::Range;
use std::sync::Mutex;

use kvern_backend::{Error as BackendError, Part};
use kvern_base::Raw;
use kvern_state::{Class, Codec, Kind, PageId, StateSpec, Table};

use crate::device::{Argument, Device, Error, Grid, Memory, Pinned, lock};

/// Bytes of a slab, unless a page is larger.
const SLAB: usize = 64 << 20;
/// Bytes of columns that are on their way between device and host at a time.
const STAGED: usize = 4 << 20;
/// Slabs of a class.
const SLABS: usize = 1 << 14;

/// `Pages` of `kernels/common.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Store {
    slabs: u64,
    bytes: u64,
    shift: u32,
    columns: u32,
}

/// `Plane` of `kernels/common.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Plane {
    offset: u64,
    raw: u32,
    heads: u32,
    dim: u32,
    head_stride: u32,
    column_stride: u32,
    stride: u32,
}

impl Argument for Store {}
impl Argument for Plane {}

/// Pages of one class.
struct Storage {
    columns: usize,
    /// Planes of the first layer.
    planes: Vec<Plane>,
    layer_bytes: usize,
    page_bytes: usize,
    /// log2 of the pages of a slab.
    shift: u32,
    slabs: Vec<Memory>,
    /// Addresses of the slabs, for kernels.
    addresses: Memory,
}

impl Storage {
    fn new(device: &Device, class: &Class, kind: Kind) -> Result<Self, Error> {
        let (mut planes, mut offset) = (Vec::new(), 0);
        for (index, plane) in class.planes.iter().enumerate() {
            let (columns, dim) = (class.columns as u32, plane.dim as u32);
            let across = kind == Kind::Attention && index == 1;
            planes.push(Plane {
                offset: offset as u64,
                raw: raw(plane.codec),
                heads: plane.heads as u32,
                dim,
                head_stride: columns * dim,
                column_stride: if across { 1 } else { dim },
                stride: if across { columns } else { 1 },
            });
            offset += (plane.column_bytes() * class.columns).next_multiple_of(16);
        }
        let page_bytes = offset * class.layers;
        let shift = (SLAB / page_bytes).max(1).ilog2();
        let addresses = device.allocate(SLABS * 8)?;
        Ok(Self {
            columns: class.columns,
            planes,
            layer_bytes: offset,
            page_bytes,
            shift,
            slabs: Vec::new(),
            addresses,
        })
    }

    fn store(&self) -> Store {
        let (slabs, bytes) = (self.addresses.address(), self.page_bytes as u64);
        Store { slabs, bytes, shift: self.shift, columns: self.columns as u32 }
    }

    /// Makes sure that a page exists.
    fn ensure(&mut self, device: &Device, id: u32) -> Result<(), Error> {
        let slab = (id >> self.shift) as usize;
        while self.slabs.len() <= slab {
            let bytes = self.page_bytes << self.shift;
            if self.slabs.len() == SLABS {
                return Err(kvern_base::AllocError { bytes }.into());
            }
            let memory = device.allocate(bytes)?;
            memory.clear()?;
            self.addresses.write(self.slabs.len() * 8, &[memory.address()])?;
            self.slabs.push(memory);
        }
        Ok(())
    }

    fn address(&self, id: u32) -> u64 {
        let within = u64::from(id & ((1 << self.shift) - 1));
        self.slabs[(id >> self.shift) as usize].address() + within * self.page_bytes as u64
    }

    fn plane(&self, part: Part) -> Plane {
        let plane = self.planes[part.plane];
        Plane { offset: plane.offset + (part.layer * self.layer_bytes) as u64, ..plane }
    }
}

/// The number of an element type; [`Pages::new`] has refused what is none.
fn raw(codec: Codec) -> u32 {
    match codec.raw() {
        None | Some(Raw::F32) => 0,
        Some(Raw::F16) => 1,
        Some(Raw::Bf16) => 2,
    }
}

/// Which way columns go.
enum Host<'a> {
    Export(&'a mut [u8]),
    Import(&'a [u8]),
}

impl Host<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Export(bytes) => bytes.len(),
            Self::Import(bytes) => bytes.len(),
        }
    }
}

/// Memory of both sides that columns pass through; as large as the largest piece was.
#[derive(Default)]
struct Staging(Option<(Memory, Pinned)>);

impl Staging {
    fn reserve(&mut self, device: &Device, bytes: usize) -> Result<&mut (Memory, Pinned), Error> {
        let staged = match self.0.take() {
            Some(staged) if staged.0.bytes() >= bytes => staged,
            _ => {
                let bytes = bytes.next_power_of_two();
                (device.allocate(bytes)?, Pinned::new(device, bytes)?)
            }
        };
        Ok(self.0.insert(staged))
    }
}

/// Page storage for a pool.
pub struct Pages {
    device: Device,
    spec: StateSpec,
    classes: Vec<Storage>,
    /// [`Store`] of each class.
    stores: Memory,
    /// [`Plane`]s of each layer of each group: for every class, its planes, or as many of another.
    planes: Memory,
    /// Where a group's planes begin among those.
    first: Vec<usize>,
    staging: Mutex<Staging>,
}

/// Zeroed pages and copies of pages that a step begins with: pairs of addresses, for each class.
pub(crate) struct Moves {
    /// Class, index of its first pair, number of pairs.
    pub(crate) launches: Vec<(usize, usize, usize)>,
    /// {from, to}; from nowhere are zeros.
    pub(crate) pairs: Vec<[u64; 2]>,
}

impl Pages {
    pub(crate) fn new(device: &Device, spec: &StateSpec) -> Result<Self, BackendError> {
        let has_columns = spec.groups().iter().any(|group| group.kind != Kind::Recurrent);
        if has_columns && spec.page() > 512 {
            let found = format!("{} tokens", spec.page());
            return Err(BackendError::Unsupported { what: "a page", found, needs: "at most 512 tokens" });
        }
        let wide = |group: &&kvern_state::GroupSpec| {
            group.kind != Kind::Recurrent && group.key_dim().max(group.value_dim()) > 1024
        };
        if let Some(group) = spec.groups().iter().find(wide) {
            let found = group.key_dim().max(group.value_dim()).to_string();
            return Err(BackendError::Unsupported { what: "a head dimension", found, needs: "at most 1024" });
        }
        let coded = |plane: &&kvern_state::Plane| plane.codec.coding().is_some();
        if let Some(plane) = spec.classes().iter().flat_map(|class| &class.planes).find(coded) {
            let found = format!("{} for {}", plane.codec.name(), plane.name);
            return Err(BackendError::Unsupported { what: "a codec", found, needs: "f32, f16 or bf16" });
        }
        let storage = |class: &Class| Storage::new(device, class, spec.groups()[class.group].kind);
        let classes = spec.classes().iter().map(storage).collect::<Result<Vec<_>, _>>()?;
        let stores: Vec<Store> = classes.iter().map(Storage::store).collect();
        let (mut planes, mut first) = (Vec::new(), Vec::new());
        for group in spec.groups() {
            first.push(planes.len());
            for layer in 0..group.layers {
                for storage in &classes {
                    let plane = |plane: usize| Part { layer, plane: plane.min(storage.planes.len() - 1) };
                    planes.extend((0..group.planes.len()).map(|index| storage.plane(plane(index))));
                }
            }
        }
        let memory = device.allocate(size_of_val(stores.as_slice()))?;
        memory.write(0, &stores)?;
        let plane_memory = device.allocate(size_of_val(planes.as_slice()))?;
        plane_memory.write(0, &planes)?;
        Ok(Self {
            device: device.clone(),
            spec: spec.clone(),
            classes,
            stores: memory,
            planes: plane_memory,
            first,
            staging: Mutex::default(),
        })
    }

    pub(crate) fn spec(&self) -> &StateSpec {
        &self.spec
    }

    /// Address of the [`Store`]s of all classes.
    pub(crate) fn stores(&self) -> u64 {
        self.stores.address()
    }

    /// Address of the planes of a layer, for all classes.
    pub(crate) fn planes(&self, slot: kvern_backend::Slot) -> u64 {
        let per_layer = self.classes.len() * self.spec.groups()[slot.group].planes.len();
        self.planes.address() + ((self.first[slot.group] + slot.layer * per_layer) * size_of::<Plane>()) as u64
    }

    /// A class's storage and one of its planes.
    pub(crate) fn plane(&self, class: usize, part: Part) -> (Store, Plane) {
        (self.classes[class].store(), self.classes[class].plane(part))
    }

    /// Bytes before a plane of a layer in its page.
    pub(crate) fn offset(&self, class: usize, part: Part) -> u64 {
        self.classes[class].plane(part).offset
    }

    /// 16-byte pieces of a page.
    pub(crate) fn pieces(&self, class: usize) -> u64 {
        self.classes[class].page_bytes as u64 / 16
    }

    /// Allocates the pages that a step is the first to write, and says what is to be zeroed and copied.
    pub(crate) fn moves(&mut self, plan: &kvern_state::StepPlan) -> Result<Moves, Error> {
        let mut moves = Moves { launches: Vec::new(), pairs: Vec::new() };
        for page in &plan.fresh {
            self.classes[page.class].ensure(&self.device, page.id)?;
        }
        for (class, storage) in self.classes.iter().enumerate() {
            let start = moves.pairs.len();
            // A recurrent state is always written whole.
            if storage.columns > 1 {
                let copied =
                    |page: &PageId| plan.copies.iter().any(|copy| copy.to == *page && copy.from.class == copy.to.class);
                let zeroed = plan.fresh.iter().filter(|page| page.class == class && !copied(page));
                moves.pairs.extend(zeroed.map(|page| [0, storage.address(page.id)]));
            }
            let copies = plan.copies.iter().filter(|copy| copy.from.class == class && copy.to.class == class);
            moves.pairs.extend(copies.map(|copy| [storage.address(copy.from.id), storage.address(copy.to.id)]));
            if moves.pairs.len() > start {
                moves.launches.push((class, start, moves.pairs.len() - start));
            }
        }
        Ok(moves)
    }

    /// Enqueues the re-encoding of pages that change their class.
    pub(crate) fn encode(&self, plan: &kvern_state::StepPlan) -> Result<(), Error> {
        for copy in plan.copies.iter().filter(|copy| copy.from.class != copy.to.class) {
            let layers = self.spec.classes()[copy.to.class].layers as u32;
            for plane in 0..self.classes[copy.to.class].planes.len() {
                let part = Part { layer: 0, plane };
                let (from, decoded) = self.plane(copy.from.class, part);
                let (to, encoded) = self.plane(copy.to.class, part);
                let from_layer = self.classes[copy.from.class].layer_bytes as u64;
                let to_layer = self.classes[copy.to.class].layer_bytes as u64;
                let arguments: &[&dyn Argument] = &[
                    &from,
                    &decoded,
                    &copy.from.id,
                    &to,
                    &encoded,
                    &copy.to.id,
                    &(copy.columns as u32),
                    &from_layer,
                    &to_layer,
                ];
                // SAFETY: both pages exist, and have these planes in all layers.
                unsafe { self.device.launch("encode", Grid::new((16, layers), 256), arguments) }?;
            }
        }
        Ok(())
    }

    /// Copies columns between pages and the host, in canonical order. They wait in pinned memory on their way, some at a time.
    fn exchange(&self, part: Part, table: &Table, columns: Range<usize>, mut host: Host<'_>) -> Result<(), Error> {
        if columns.is_empty() {
            return Ok(());
        }
        let (store, plane) = self.plane(table.class, part);
        let page = self.classes[table.class].columns;
        let import = matches!(host, Host::Import(_));
        let column_bytes = host.len() / columns.len();
        let at_once = (STAGED / column_bytes).max(1);
        let mut staging = lock(&self.staging);
        for (start, first) in columns.clone().step_by(at_once).enumerate() {
            let count = at_once.min(columns.end - first);
            let ids = (first / page..(first + count).div_ceil(page)).map(|index| table.id(index));
            let ids: Vec<u32> = ids.collect();
            // Page ids, then columns.
            let begin = (ids.len() * 4).next_multiple_of(16);
            let range = start * at_once * column_bytes..(start * at_once + count) * column_bytes;
            let end = begin + range.len();
            let (device, pinned) = staging.reserve(&self.device, end)?;
            pinned.bytes_mut()[..ids.len() * 4].copy_from_slice(bytemuck::cast_slice(&ids));
            if let Host::Import(bytes) = &host {
                pinned.bytes_mut()[begin..end].copy_from_slice(&bytes[range.clone()]);
            }
            device.take(pinned, if import { end } else { begin })?;
            let grid = Grid::values(count * (plane.heads * plane.dim) as usize);
            let (first, count, address) = (first as u32, count as u32, device.address());
            let bytes = address + begin as u64;
            let arguments: &[&dyn Argument] = &[&store, &plane, &address, &first, &count, &bytes, &u32::from(import)];
            // SAFETY: `ids` names existing pages for all columns, and the columns follow them.
            unsafe { self.device.launch("exchange", grid, arguments) }?;
            if !import {
                device.give(pinned, end)?;
            }
            self.device.wait()?;
            if let Host::Export(out) = &mut host {
                out[range].copy_from_slice(&pinned.bytes()[begin..end]);
            }
        }
        Ok(())
    }

    pub(crate) fn export(&self, part: Part, table: &Table, columns: Range<usize>, out: &mut [u8]) -> Result<(), Error> {
        self.exchange(part, table, columns, Host::Export(out))
    }

    pub(crate) fn import(
        &mut self,
        part: Part,
        table: &Table,
        columns: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        for &id in &table.ids {
            self.classes[table.class].ensure(&self.device, id)?;
        }
        self.exchange(part, table, columns, Host::Import(bytes))
    }
}
