//! Images: a row's whole state as bytes in canonical order, in memory or in a checkpoint file.
//!
//! **What.** An [`Image`] has a [`Manifest`] and, for each group and plane, the bytes of every layer's columns, token by token and head by head,
//! encoded as the row held them. Nothing is decoded on the way, and columns that no later query sees are left out.
//!
//! **Why.** Canonical order makes an image, and its hash, mean the same on every device and instruction set.
//!
//! **File.** A safetensors file. Its metadata hold `kvern.checkpoint`, the manifest as JSON, and `kvern.hash`, the manifest's hash. Its tensors
//! are `tokens` (`U32`) and, for group `g` and plane `p`, `g.p` of `[layers, columns, bytes]` (`U8`). The manifest has the hash (XXH3, 128 bits) of
//! each, so that any changed byte is found before a row is touched. A file is written beside its name, synced, and renamed.
//!
//! **Invariants.** A loaded image is whole: every hash was right, and every size is what the manifest says.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvern_weights::Mapping;
use safetensors::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::{Error, GroupSpec, Kind, Pool, Row, StateSpec};

/// The version of the file's layout.
const VERSION: u32 = 1;
const MANIFEST: &str = "kvern.checkpoint";
const HASH: &str = "kvern.hash";
/// The ending of a file that is being written.
pub(crate) const PARTIAL: &str = "partial";

/// Whose state it is. Two states can stand for each other only if all of it is equal.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Fingerprint of the model's weights and configuration.
    pub model: String,
    /// Content hash of an adapter; empty without one.
    pub adapter: String,
    /// How state is stored: [`StateSpec::policy`].
    pub policy: String,
    /// Whatever a caller wants kept apart.
    pub salt: String,
}

/// One plane of one group in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaneManifest {
    /// Its name.
    pub name: String,
    /// Heads.
    pub heads: usize,
    /// Values of a head.
    pub dim: usize,
    /// The codec with its version.
    pub codec: String,
    /// Hash of the bytes.
    pub hash: String,
}

/// One group in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupManifest {
    /// Its kind.
    pub kind: String,
    /// Layers.
    pub layers: usize,
    /// Window and sinks.
    pub window: Option<(usize, usize)>,
    /// A companion's lag.
    pub lag: Option<usize>,
    /// Columns of the row; a companion counts its own. 1 or 0 states of a recurrent group.
    pub columns: usize,
    /// The stored columns: those before this number, and ...
    pub sinks: usize,
    /// ... those from this number on.
    pub start: usize,
    /// Whether they were encoded late.
    pub encoded: bool,
    /// The planes.
    pub planes: Vec<PlaneManifest>,
}

impl GroupManifest {
    fn stored(&self) -> usize {
        self.sinks + (self.columns - self.start)
    }

    fn ranges(&self) -> [Range<usize>; 2] {
        [0..self.sinks, self.start..self.columns]
    }
}

/// What an image holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the layout.
    pub version: u32,
    /// Whose state it is.
    pub identity: Identity,
    /// Tokens of a page, on which the order of sums depends.
    pub page: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Hash of the tokens.
    pub tokens_hash: String,
    /// Tokens that follow and are not part of the state yet.
    pub pending: Vec<u32>,
    /// The groups.
    pub groups: Vec<GroupManifest>,
}

/// Why an image could not be saved, loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The system.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is not a whole checkpoint.
    #[error("{} is not a whole checkpoint: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A layout of another version.
    #[error("the checkpoint has version {found} of its layout, this program reads version {VERSION}")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The image is of another model, or of state that is kept in another way.
    #[error("the checkpoint does not fit: its {field} is {found}, expected {expected}")]
    Mismatch {
        /// What differs.
        field: String,
        /// What this model has.
        expected: String,
        /// What the image has.
        found: String,
    },
    /// The state layer, for want of memory.
    #[error(transparent)]
    State(#[from] Error),
}

/// Bytes of one plane.
#[derive(Debug, Clone)]
enum Bytes {
    Owned(Vec<u8>),
    Mapped(Arc<Mapping>, Range<usize>),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Mapped(mapping, range) => &mapping.bytes()[range.clone()],
        }
    }
}

/// A row's state as bytes.
#[derive(Debug, Clone)]
pub struct Image {
    manifest: Manifest,
    tokens: Vec<u32>,
    /// By group and plane.
    planes: Vec<Vec<Bytes>>,
}

/// A run of columns of one layer's plane, with its bytes in an image.
#[derive(Debug)]
pub struct Piece<B> {
    /// The group.
    pub group: usize,
    /// The layer within the group.
    pub layer: usize,
    /// The plane.
    pub plane: usize,
    /// The columns.
    pub columns: Range<usize>,
    /// Their bytes.
    pub bytes: B,
}

/// A piece of an image that is there to be read.
pub type Stretch<'a> = Piece<&'a [u8]>;

fn hash(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}

/// Tokens as hashes and files take them.
pub(crate) fn token_bytes(tokens: &[u32]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

impl StateSpec {
    /// How state is stored, in words: kinds, windows and codecs of all groups, and the page size.
    pub fn policy(&self) -> String {
        let group = |spec: &GroupSpec| {
            let codecs =
                |encoded| -> Vec<String> { spec.planes(encoded).iter().map(|plane| plane.codec.version()).collect() };
            let window =
                spec.window.map_or(String::new(), |window| format!(" window {}+{}", window.size, window.sinks));
            let late = spec
                .late
                .as_ref()
                .map_or(String::new(), |late| format!(" from {} {}", late.start, codecs(true).join("/")));
            format!("{} {}{window}{late}", spec.kind.name(), codecs(false).join("/"))
        };
        let groups: Vec<String> = self.groups().iter().map(group).collect();
        format!("{}; page {}", groups.join(", "), self.page())
    }
}

impl Image {
    /// Captures a row; `read` copies the columns of each piece out of a backend's pages. `tokens` are the row's.
    ///
    /// # Errors
    /// [`Error::Count`] when there are not as many tokens as the row has, else what `read` returns.
    pub fn capture<E: From<Error>>(
        row: &Row,
        identity: Identity,
        tokens: &[u32],
        mut read: impl FnMut(Piece<&mut [u8]>) -> Result<(), E>,
    ) -> Result<Self, E> {
        if tokens.len() != row.len() {
            return Err(E::from(Error::Count { what: "token of the row", expected: row.len(), found: tokens.len() }));
        }
        let spec = row.pool().spec();
        let (mut groups, mut planes) = (Vec::new(), Vec::new());
        for (index, group) in spec.groups().iter().enumerate() {
            let class = &spec.classes()[row.pages(index).class()];
            let (sinks, start, columns) = match row.read(index) {
                Some(read) => (read.sinks(), read.start(), read.len()),
                None => (0, 0, usize::from(row.state(index).is_some())),
            };
            let mut manifest = GroupManifest {
                kind: group.kind.name().into(),
                layers: group.layers,
                window: group.window.map(|window| (window.size, window.sinks)),
                lag: group.lag,
                columns,
                sinks,
                start,
                encoded: row.pages(index).class() != spec.class(index, false),
                planes: Vec::new(),
            };
            let mut contents = Vec::new();
            for (plane, of) in class.planes.iter().enumerate() {
                let mut bytes = vec![0; group.layers * manifest.stored() * of.column_bytes()];
                let mut rest = bytes.as_mut_slice();
                for (layer, columns) in (0..group.layers).flat_map(|l| manifest.ranges().map(|range| (l, range))) {
                    let (own, later) = rest.split_at_mut(columns.len() * of.column_bytes());
                    read(Piece { group: index, layer, plane, columns, bytes: own })?;
                    rest = later;
                }
                let (name, codec, hash) = (of.name.into(), of.codec.version(), hash(&bytes));
                manifest.planes.push(PlaneManifest { name, heads: of.heads, dim: of.dim, codec, hash });
                contents.push(Bytes::Owned(bytes));
            }
            groups.push(manifest);
            planes.push(contents);
        }
        let manifest = Manifest {
            version: VERSION,
            identity,
            page: spec.page(),
            tokens: tokens.len(),
            tokens_hash: hash(&token_bytes(tokens)),
            pending: Vec::new(),
            groups,
        };
        Ok(Self { manifest, tokens: tokens.to_vec(), planes })
    }

    /// What the image holds.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// With tokens that follow on the state: one at least is needed to go on exactly, since logits are no part of the state.
    #[must_use]
    pub fn with_pending(mut self, pending: &[u32]) -> Self {
        self.manifest.pending = pending.to_vec();
        self
    }

    /// The row's tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Bytes of state.
    pub fn bytes(&self) -> u64 {
        self.planes.iter().flatten().map(|bytes| bytes.get().len() as u64).sum()
    }

    /// A hash of the state alone: equal for rows whose later tokens are equal, wherever they ran.
    pub fn state_hash(&self) -> String {
        let planes = self.manifest.groups.iter().flat_map(|group| &group.planes);
        let hashes: String = planes.map(|plane| plane.hash.as_str()).collect();
        let columns: Vec<(usize, usize)> =
            self.manifest.groups.iter().map(|group| (group.columns, group.start)).collect();
        hash(format!("{hashes}{columns:?}{}", self.manifest.tokens_hash).as_bytes())
    }

    /// Whether a row of this image, cut to `len` tokens, is what a row of those tokens would be; see [`Row::resumable`].
    pub fn resumable(&self, spec: &StateSpec, len: usize) -> bool {
        let tokens = self.manifest.tokens;
        let can_cut = |(own, group): (&GroupManifest, &GroupSpec)| {
            let columns = own.columns.saturating_sub(group.columns(tokens) - group.columns(len));
            group.kind != Kind::Recurrent && group.can_cut(own.start, own.encoded, columns)
        };
        len == tokens || (len < tokens && self.manifest.groups.iter().zip(spec.groups()).all(can_cut))
    }

    /// Checks that a row of this image can live in `pool` for `identity`.
    ///
    /// # Errors
    /// [`ImageError::Mismatch`] naming the first difference.
    pub fn check(&self, pool: &Pool, identity: &Identity) -> Result<(), ImageError> {
        let (spec, manifest) = (pool.spec(), &self.manifest);
        let differ = |field: String, expected: String, found: String| {
            if expected == found { Ok(()) } else { Err(ImageError::Mismatch { field, expected, found }) }
        };
        differ("page size".into(), spec.page().to_string(), manifest.page.to_string())?;
        differ("number of groups".into(), spec.groups().len().to_string(), manifest.groups.len().to_string())?;
        for (index, (own, group)) in manifest.groups.iter().zip(spec.groups()).enumerate() {
            let field = |what: &str| format!("{what} of group {index}");
            differ(field("kind"), group.kind.name().into(), own.kind.clone())?;
            differ(field("number of layers"), group.layers.to_string(), own.layers.to_string())?;
            let window = group.window.map(|window| (window.size, window.sinks));
            differ(field("window"), format!("{window:?}"), format!("{:?}", own.window))?;
            differ(field("lag"), format!("{:?}", group.lag), format!("{:?}", own.lag))?;
            let describe = |name: &str, heads, dim, codec: &str| format!("{name} [{heads}, {dim}] {codec}");
            let planes = group.planes(own.encoded);
            let expected = planes.iter().map(|p| describe(p.name, p.heads, p.dim, &p.codec.version()));
            let found = own.planes.iter().map(|p| describe(&p.name, p.heads, p.dim, &p.codec));
            let (expected, found): (Vec<_>, Vec<_>) = (expected.collect(), found.collect());
            differ(field("layout"), expected.join(", "), found.join(", "))?;
            let counts = if group.kind == Kind::Recurrent {
                (usize::from(manifest.tokens > 0), 0, 0)
            } else {
                let start = group.first_in_view(own.columns);
                (own.columns, group.window.map_or(0, |window| window.sinks.min(start)), start)
            };
            differ(field("extent"), format!("{counts:?}"), format!("{:?}", (own.columns, own.sinks, own.start)))?;
            if own.columns > group.columns(manifest.tokens).max(usize::from(group.lag.is_none()))
                || (group.lag.is_none() && group.kind != Kind::Recurrent && own.columns != manifest.tokens)
            {
                differ(field("columns"), group.columns(manifest.tokens).to_string(), own.columns.to_string())?;
            }
            let encodes = group.encodes(own.columns)
                || (own.encoded && group.late.as_ref().is_some_and(|l| l.start == own.columns));
            differ(field("encoding"), encodes.to_string(), own.encoded.to_string())?;
        }
        let theirs = &manifest.identity;
        for (field, expected, found) in [
            ("model", &identity.model, &theirs.model),
            ("adapter", &identity.adapter, &theirs.adapter),
            ("state policy", &identity.policy, &theirs.policy),
            ("salt", &identity.salt, &theirs.salt),
        ] {
            differ(field.into(), expected.clone(), found.clone())?;
        }
        Ok(())
    }

    /// A row with room for the image, and the pieces to write into it.
    ///
    /// # Errors
    /// As [`Self::check`], or [`ImageError::State`] when the budget cannot hold the row.
    pub fn row(&self, pool: &Pool, identity: &Identity) -> Result<(Row, Vec<Stretch<'_>>), ImageError> {
        self.check(pool, identity)?;
        let groups: Vec<(usize, bool)> = self.manifest.groups.iter().map(|g| (g.columns, g.encoded)).collect();
        let row = Row::with_room(pool, self.tokens.len(), &groups)?;
        let mut pieces = Vec::new();
        for (group, (manifest, planes)) in self.manifest.groups.iter().zip(&self.planes).enumerate() {
            for (plane, bytes) in planes.iter().enumerate() {
                let column = bytes.get().len().checked_div(manifest.layers * manifest.stored()).unwrap_or(0);
                let mut rest = bytes.get();
                for (layer, columns) in (0..manifest.layers).flat_map(|l| manifest.ranges().map(|range| (l, range))) {
                    let (own, later) = rest.split_at(columns.len() * column);
                    pieces.push(Piece { group, layer, plane, columns, bytes: own });
                    rest = later;
                }
            }
        }
        Ok((row, pieces))
    }

    /// Writes a checkpoint. The file appears under its name only when it is whole and on the disk.
    ///
    /// # Errors
    /// [`ImageError::Io`]; then nothing is left behind, and an older file of this name is as it was.
    pub fn save(&self, path: &Path) -> Result<u64, ImageError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let io = |action| move |source| ImageError::Io { action, path: path.into(), source };
        let name = path.file_name().ok_or_else(|| io("name a checkpoint")(io::ErrorKind::InvalidInput.into()))?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let partial = format!(".{}.{}-{number}.{PARTIAL}", name.to_string_lossy(), std::process::id());
        let partial = path.with_file_name(partial);
        let written = self.write(&partial).and_then(|()| File::open(&partial)?.sync_all()).and_then(|()| {
            fs::rename(&partial, path)?;
            // The new name itself must reach the disk; a system that cannot sync a directory does without.
            let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let _ = File::open(directory).and_then(|directory| directory.sync_all());
            Ok(fs::metadata(path)?.len())
        });
        written.map_err(|source| {
            let _ = fs::remove_file(&partial);
            io("write")(source)
        })
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let manifest = serde_json::to_string(&self.manifest)?;
        let metadata = HashMap::from([(HASH.to_string(), hash(manifest.as_bytes())), (MANIFEST.to_string(), manifest)]);
        let tokens = (Dtype::U32, vec![self.tokens.len()], Cow::Owned(token_bytes(&self.tokens)));
        let mut tensors = vec![("tokens".to_string(), Stored(tokens.0, tokens.1, tokens.2))];
        for (group, (manifest, planes)) in self.manifest.groups.iter().zip(&self.planes).enumerate() {
            for (plane, bytes) in manifest.planes.iter().zip(planes) {
                let bytes = bytes.get();
                let (layers, stored) = (manifest.layers, manifest.stored());
                let shape = vec![layers, stored, bytes.len().checked_div(layers * stored).unwrap_or(0)];
                tensors.push((format!("{group}.{}", plane.name), Stored(Dtype::U8, shape, Cow::Borrowed(bytes))));
            }
        }
        safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|error| match error {
            safetensors::SafeTensorError::IoError(error) => error,
            other => io::Error::other(other),
        })
    }

    /// Maps a checkpoint and checks every byte of it.
    ///
    /// # Errors
    /// [`ImageError::Io`], [`ImageError::Damaged`] or [`ImageError::Version`].
    pub fn load(path: &Path) -> Result<Self, ImageError> {
        let mapping = Mapping::open(path).map_err(|error| match error {
            kvern_weights::Error::Io { path, source } => ImageError::Io { action: "read", path, source },
            other => ImageError::Damaged { path: path.into(), what: other.to_string() },
        })?;
        Self::parse(&mapping)
    }

    /// Reads the manifest and tokens of a checkpoint without its state.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn peek(path: &Path) -> Result<(Manifest, Vec<u32>), ImageError> {
        let mapping =
            Mapping::open(path).map_err(|error| ImageError::Damaged { path: path.into(), what: error.to_string() })?;
        let (manifest, _, tokens) = Self::header(&mapping)?;
        Ok((manifest, tokens))
    }

    fn header(mapping: &Mapping) -> Result<(Manifest, SafeTensors<'_>, Vec<u32>), ImageError> {
        let damaged = |what: String| ImageError::Damaged { path: mapping.path().into(), what };
        let file = SafeTensors::deserialize(mapping.bytes()).map_err(|error| damaged(error.to_string()))?;
        let (_, header) = SafeTensors::read_metadata(mapping.bytes()).map_err(|error| damaged(error.to_string()))?;
        let none = HashMap::new();
        let metadata = header.metadata().as_ref().unwrap_or(&none);
        let (Some(json), Some(sum)) = (metadata.get(MANIFEST), metadata.get(HASH)) else {
            return Err(damaged("it has no manifest".into()));
        };
        if hash(json.as_bytes()) != *sum {
            return Err(damaged("its manifest has changed".into()));
        }
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_str(json).map_err(|error| damaged(error.to_string()))?;
        if version != VERSION {
            return Err(ImageError::Version { found: version });
        }
        let manifest: Manifest = serde_json::from_str(json).map_err(|error| damaged(error.to_string()))?;
        let stored = file.tensor("tokens").map_err(|error| damaged(error.to_string()))?;
        let tokens: Vec<u32> = stored.data().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        if hash(stored.data()) != manifest.tokens_hash || tokens.len() != manifest.tokens {
            return Err(damaged("its tokens have changed".into()));
        }
        Ok((manifest, file, tokens))
    }

    /// Reads a checkpoint from mapped bytes.
    ///
    /// # Errors
    /// [`ImageError::Damaged`] or [`ImageError::Version`].
    pub fn parse(mapping: &Arc<Mapping>) -> Result<Self, ImageError> {
        let damaged = |what: String| ImageError::Damaged { path: mapping.path().into(), what };
        let (manifest, file, tokens) = Self::header(mapping)?;
        let base = mapping.bytes().as_ptr() as usize;
        let mut planes = Vec::new();
        for (index, group) in manifest.groups.iter().enumerate() {
            let most = manifest.tokens.max(1);
            let sizes = group.sinks <= group.start && group.start <= group.columns && group.columns <= most;
            let stored =
                if sizes { group.stored() } else { return Err(damaged(format!("group {index} is no group"))) };
            let mut contents = Vec::new();
            for plane in &group.planes {
                let name = format!("{index}.{}", plane.name);
                let tensor = file.tensor(&name).map_err(|error| damaged(error.to_string()))?;
                let [layers, columns, _] = tensor.shape() else {
                    return Err(damaged(format!("`{name}` is no plane")));
                };
                if (*layers, *columns, tensor.dtype()) != (group.layers, stored, Dtype::U8) {
                    return Err(damaged(format!("`{name}` has another shape than the manifest says")));
                }
                if hash(tensor.data()) != plane.hash {
                    return Err(damaged(format!("`{name}` has changed")));
                }
                let start = tensor.data().as_ptr() as usize - base;
                contents.push(Bytes::Mapped(mapping.clone(), start..start + tensor.data().len()));
            }
            planes.push(contents);
        }
        Ok(Self { manifest, tokens, planes })
    }
}

/// A tensor of a file to be.
struct Stored<'a>(Dtype, Vec<usize>, Cow<'a, [u8]>);

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.0
    }

    fn shape(&self) -> &[usize] {
        &self.1
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.2)
    }

    fn data_len(&self) -> usize {
        self.2.len()
    }
}
