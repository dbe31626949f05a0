//! What a model declares about its state: groups of layers, and the policies of each.
//!
//! **What.** A [`GroupSpec`] is a kind (what a column means), the planes that a column is stored in, and policies that apply to any kind that has
//! columns: a [`Window`], [`Late`] encoding, a companion's lag. A [`StateSpec`] is the groups of a model and the page size that they share.
//!
//! **Why.** Policies as independent fields instead of a type for each combination: the row algebra, rounds, checkpoints and kernels never ask which
//! combination they see.
//!
//! **Invariants.** Pages of one [`Class`] have one layout. A group has one class, and a second one if its columns are encoded late.
//!
//! ```
//! use kvern_state::{Codec, GroupSpec, StateSpec, Window};
//! let full = GroupSpec::attention(1, 8, 128, 128, (Codec::Bf16, Codec::Bf16));
//! let sliding = full.clone().windowed(Window { size: 1024, sinks: 0 });
//! // Layers with equal specs share a group, wherever they stand.
//! let (spec, slots) = StateSpec::from_layers(64, vec![sliding.clone(), sliding.clone(), full, sliding])?;
//! assert_eq!((spec.groups().len(), slots[3].group, slots[3].layer), (2, 0, 2));
//! # Ok::<(), kvern_state::Error>(())
//! ```

use crate::{Codec, Error};

/// Where a layer's state lies: the group in the model's [`StateSpec`], and the layer's index within that group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The group.
    pub group: usize,
    /// The layer within the group.
    pub layer: usize,
}

/// One part of a column: a matrix `[heads, dim]` in one codec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plane {
    /// What it holds, in words that a checkpoint uses.
    pub name: &'static str,
    /// Heads; each is encoded on its own.
    pub heads: usize,
    /// Values of one head.
    pub dim: usize,
    /// How it is stored.
    pub codec: Codec,
}

impl Plane {
    /// Bytes of one column.
    pub fn column_bytes(&self) -> usize {
        self.heads * self.codec.bytes(self.dim)
    }

    /// Values of one column.
    pub fn width(&self) -> usize {
        self.heads * self.dim
    }
}

/// What the state of a group is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A column for each token: planes `k` and `v`.
    Attention,
    /// A column for each token that all heads share: planes `latent` (keys and values at once) and `rope` (a further part of the keys), and
    /// `index` where a sparse indexer chooses columns.
    Latent,
    /// One state that every token replaces. Its planes are parts of that state, in `f32`.
    Recurrent,
}

impl Kind {
    /// The name in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::Latent => "latent",
            Self::Recurrent => "recurrent",
        }
    }
}

/// A query at position `p` sees the columns `j` with `p - size < j <= p`, and those with `j < sinks`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    /// Columns in view, the query's own included.
    pub size: usize,
    /// Columns at the start of a row that stay in view.
    pub sinks: usize,
}

impl Window {
    /// The first column of the window of a query that sees columns up to and without `end`.
    pub fn start(&self, end: usize) -> usize {
        end.saturating_sub(self.size)
    }
}

/// Encoding that starts late: a row's columns are stored as the planes say until it has `start` of them; before the next one, all are encoded
/// anew, once, and later ones at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Late {
    /// Columns of a row at which its encoding changes.
    pub start: usize,
    /// The codec of each plane from then on.
    pub codecs: Vec<Codec>,
}

/// A set of layers whose state is stored together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// Number of layers.
    pub layers: usize,
    /// What the state is.
    pub kind: Kind,
    /// What a column consists of.
    pub planes: Vec<Plane>,
    /// Which columns a query sees; all up to its own when absent.
    pub window: Option<Window>,
    /// Encoding that starts late.
    pub late: Option<Late>,
    /// Set for the state of a draft head: it has at most `tokens - lag` columns, since it builds a column from later tokens.
    pub lag: Option<usize>,
}

impl GroupSpec {
    fn new(layers: usize, kind: Kind, planes: Vec<Plane>) -> Self {
        Self { layers, kind, planes, window: None, late: None, lag: None }
    }

    /// Keys `[kv_heads, k_dim]` and values `[kv_heads, v_dim]`, with the codecs of keys and values.
    pub fn attention(layers: usize, kv_heads: usize, k_dim: usize, v_dim: usize, (k, v): (Codec, Codec)) -> Self {
        let plane = |name, dim, codec| Plane { name, heads: kv_heads, dim, codec };
        Self::new(layers, Kind::Attention, vec![plane("k", k_dim, k), plane("v", v_dim, v)])
    }

    /// A latent of `dim` values and a rope key of `rope` values, shared by all heads, and an indexer's key.
    pub fn latent(layers: usize, dim: usize, rope: usize, index: Option<usize>, codec: Codec) -> Self {
        let plane = |name, dim| Plane { name, heads: 1, dim, codec };
        let index = index.map(|dim| plane("index", dim));
        let planes = [plane("latent", dim), plane("rope", rope)].into_iter().chain(index).collect();
        Self::new(layers, Kind::Latent, planes)
    }

    /// A state of named parts with their number of values: a convolution's tail, a recurrence, a hidden vector.
    pub fn recurrent(layers: usize, parts: &[(&'static str, usize)]) -> Self {
        let plane = |&(name, dim)| Plane { name, heads: 1, dim, codec: Codec::F32 };
        Self::new(layers, Kind::Recurrent, parts.iter().map(plane).collect())
    }

    /// With a window.
    #[must_use]
    pub fn windowed(mut self, window: Window) -> Self {
        self.window = Some(window);
        self
    }

    /// With encoding that starts late.
    #[must_use]
    pub fn late(mut self, start: usize, codecs: Vec<Codec>) -> Self {
        self.late = Some(Late { start, codecs });
        self
    }

    /// As a draft head's state.
    #[must_use]
    pub fn companion(mut self, lag: usize) -> Self {
        self.lag = Some(lag);
        self
    }

    /// Heads that keys and values have.
    pub fn heads(&self) -> usize {
        self.planes[0].heads
    }

    /// Values of what a query of one head is multiplied with.
    pub fn key_dim(&self) -> usize {
        if self.kind == Kind::Latent { self.planes[0].dim + self.planes[1].dim } else { self.planes[0].dim }
    }

    /// Values of what one head sums up.
    pub fn value_dim(&self) -> usize {
        if self.kind == Kind::Latent { self.planes[0].dim } else { self.planes[1].dim }
    }

    /// The planes as they are stored early or late.
    pub fn planes(&self, encoded: bool) -> Vec<Plane> {
        let mut planes = self.planes.clone();
        if let (true, Some(late)) = (encoded, &self.late) {
            planes.iter_mut().zip(&late.codecs).for_each(|(plane, codec)| plane.codec = *codec);
        }
        planes
    }

    /// Columns of a row of `tokens` tokens, if the group follows it.
    pub fn columns(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.lag.unwrap_or(0))
    }

    /// The first column, sinks aside, that the next query of a row of so many columns sees.
    pub fn first_in_view(&self, columns: usize) -> usize {
        self.window.map_or(0, |window| window.start(columns + 1))
    }

    /// Whether columns that are there from `first` on, encoded late or not, can be cut to `columns` and be those of a row that never had more.
    pub(crate) fn can_cut(&self, first: usize, encoded: bool, columns: usize) -> bool {
        let held = first == 0 || self.first_in_view(columns) >= first;
        held && (!encoded || self.late.as_ref().is_some_and(|late| columns >= late.start))
    }

    /// Whether a row of so many columns holds them encoded late, when nothing is in work.
    pub fn encodes(&self, columns: usize) -> bool {
        self.late.as_ref().is_some_and(|late| columns > late.start)
    }

    fn check(&self) -> Result<(), &'static str> {
        let policies = self.window.is_some() || self.late.is_some() || self.lag.is_some();
        if self.layers == 0 || self.planes.iter().any(|plane| plane.column_bytes() == 0) || self.planes.is_empty() {
            return Err("layers, heads and dimensions must not be zero");
        }
        if self.planes.iter().enumerate().any(|(i, plane)| self.planes[..i].iter().any(|p| p.name == plane.name)) {
            return Err("planes need names of their own");
        }
        if self.window.is_some_and(|window| window.size == 0) {
            return Err("a window must not be empty");
        }
        if self.late.as_ref().is_some_and(|late| late.codecs.len() != self.planes.len()) {
            return Err("late encoding needs a codec for each plane");
        }
        match self.kind {
            Kind::Recurrent if policies => Err("a recurrent state has no columns to window, encode or lag"),
            Kind::Attention if self.planes.len() != 2 || self.planes[0].heads != self.planes[1].heads => {
                Err("attention has keys and values with the same heads")
            }
            Kind::Latent
                if !(2..=3).contains(&self.planes.len()) || self.planes.iter().any(|plane| plane.heads != 1) =>
            {
                Err("a latent group has a latent, a rope key and at most an index key, of one head each")
            }
            _ => Ok(()),
        }
    }
}

/// How pages of one layout are stored. Page numbers are counted within a class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Class {
    /// The group.
    pub group: usize,
    /// The planes of a column.
    pub planes: Vec<Plane>,
    /// Columns of a page; 1 for a recurrent state.
    pub columns: usize,
    /// Layers of a page.
    pub layers: usize,
}

impl Class {
    /// Bytes of one page over all layers.
    pub fn bytes(&self) -> u64 {
        let column: usize = self.planes.iter().map(Plane::column_bytes).sum();
        (column * self.columns * self.layers) as u64
    }
}

/// What a row may grow to, so that the pages it will hold at any moment can be set aside for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Tokens in total.
    pub tokens: usize,
    /// The most tokens of one append.
    pub step: usize,
    /// The most tokens of one round; 0 for a row that never speculates.
    pub round: usize,
}

impl From<usize> for Demand {
    /// So many tokens, appended in any way outside rounds.
    fn from(tokens: usize) -> Self {
        Self { tokens, step: tokens, round: 0 }
    }
}

/// The state of one row: its groups and the page size that they share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSpec {
    page: usize,
    groups: Vec<GroupSpec>,
    classes: Vec<Class>,
    /// Each group's first class; its late one follows.
    first: Vec<usize>,
}

impl StateSpec {
    /// Groups whose pages hold `page` tokens each.
    ///
    /// # Errors
    /// [`Error::Spec`] when `page` is not a power of two or a group cannot be stored.
    pub fn new(page: usize, groups: Vec<GroupSpec>) -> Result<Self, Error> {
        if !page.is_power_of_two() {
            return Err(Error::Spec { group: 0, what: "a page must hold a power of two of tokens" });
        }
        let (mut classes, mut first) = (Vec::new(), Vec::new());
        for (group, spec) in groups.iter().enumerate() {
            spec.check().map_err(|what| Error::Spec { group, what })?;
            let columns = if spec.kind == Kind::Recurrent { 1 } else { page };
            first.push(classes.len());
            for encoded in [false, true].into_iter().take(1 + usize::from(spec.late.is_some())) {
                classes.push(Class { group, planes: spec.planes(encoded), columns, layers: spec.layers });
            }
        }
        Ok(Self { page, groups, classes, first })
    }

    /// Groups the layers of a model: those with equal specs share a group. Also says where each layer's state lies.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_layers(page: usize, layers: Vec<GroupSpec>) -> Result<(Self, Vec<Slot>), Error> {
        let mut groups: Vec<(GroupSpec, usize)> = Vec::new();
        let mut slots = Vec::with_capacity(layers.len());
        for layer in layers {
            let group = groups.iter().position(|(group, _)| *group == layer).unwrap_or(groups.len());
            let own = layer.layers;
            if group == groups.len() {
                groups.push((layer, 0));
            }
            slots.push(Slot { group, layer: groups[group].1 });
            groups[group].1 += own;
        }
        let groups = groups.into_iter().map(|(group, layers)| GroupSpec { layers, ..group }).collect();
        Ok((Self::new(page, groups)?, slots))
    }

    /// Tokens of one page.
    pub fn page(&self) -> usize {
        self.page
    }

    /// The groups.
    pub fn groups(&self) -> &[GroupSpec] {
        &self.groups
    }

    /// The classes of pages.
    pub fn classes(&self) -> &[Class] {
        &self.classes
    }

    /// The class of a group's pages before or after late encoding.
    pub fn class(&self, group: usize, encoded: bool) -> usize {
        self.first[group] + usize::from(encoded && self.groups[group].late.is_some())
    }

    fn page_bytes(&self, group: usize, encoded: bool) -> u64 {
        self.classes[self.class(group, encoded)].bytes()
    }

    /// Pages of one group that cover `columns` columns.
    pub fn pages_for(&self, columns: usize) -> usize {
        columns.div_ceil(self.page)
    }

    /// Pages at the start of a row that a window's sinks keep.
    pub(crate) fn sink_pages(&self, group: usize) -> usize {
        self.groups[group].window.map_or(0, |window| self.pages_for(window.sinks))
    }

    /// Pages that lie between sinks and window, and are not held, in a row of `columns` columns with nothing in work.
    pub(crate) fn skipped_pages(&self, group: usize, columns: usize) -> usize {
        (self.groups[group].first_in_view(columns) / self.page).saturating_sub(self.sink_pages(group))
    }

    /// Bytes that a row of `tokens` tokens occupies with nothing in work, exactly: whole pages of every group, a window's only as far as the next
    /// token can see them, and one recurrent state.
    pub fn row_bytes(&self, tokens: usize) -> u64 {
        let bytes = |(group, spec): (usize, &GroupSpec)| {
            let columns = spec.columns(tokens);
            let pages = match spec.kind {
                Kind::Recurrent => usize::from(tokens > 0),
                _ => self.pages_for(columns) - self.skipped_pages(group, columns),
            };
            pages as u64 * self.page_bytes(group, spec.encodes(columns))
        };
        self.groups.iter().enumerate().map(bytes).sum()
    }

    /// The most bytes that a row of this demand ever occupies: an append of `step` tokens holds what its first token sees until it is committed, a
    /// round holds what it may restore, and a recurrent state is written beside the one it follows.
    pub fn peak_bytes(&self, demand: Demand) -> u64 {
        let Demand { tokens, step, round } = demand;
        let work = step.max(round).min(tokens);
        let bytes = |(group, spec): (usize, &GroupSpec)| {
            let columns = spec.columns(tokens);
            // A span of n columns touches at most this many pages, wherever it starts.
            let touched = |n: usize, columns: usize| {
                let all = self.pages_for(columns);
                spec.window.map_or(all, |window| {
                    let span = (window.size - 1 + n).max(1);
                    all.min(self.sink_pages(group) + (span - 1).div_ceil(self.page) + 1)
                })
            };
            let (early, late) = (self.page_bytes(group, false), self.page_bytes(group, true));
            match (&spec.late, spec.kind) {
                (_, Kind::Recurrent) if tokens == 0 => 0,
                (_, Kind::Recurrent) => (1 + round.min(tokens).max(1)) as u64 * early,
                (Some(change), _) if columns > change.start => {
                    let at_change = touched(work, change.start) as u64 * early
                        + touched(work, columns.min(change.start + work)) as u64 * late;
                    at_change.max(touched(work, columns) as u64 * late)
                }
                _ => touched(work, columns) as u64 * early,
            }
        };
        self.groups.iter().enumerate().map(bytes).sum()
    }

    /// The longest row that `bytes` can hold, in tokens, up to `most`.
    pub fn tokens_in(&self, bytes: u64, most: usize) -> usize {
        let (mut fits, mut exceeds) = (0, most.saturating_add(1));
        while fits + 1 < exceeds {
            let middle = fits + (exceeds - fits) / 2;
            if self.row_bytes(middle) <= bytes { fits = middle } else { exceeds = middle }
        }
        fits
    }
}
