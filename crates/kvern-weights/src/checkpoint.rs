//! A model's files as one set of named tensors, each of which must be taken exactly once.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvern_base::Raw;
use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use crate::gguf::{Gguf, Metadata};
use crate::mapping::Mapping;
use crate::mlx::{Floats, MlxParts, Part};
use crate::quant::Affine;
use crate::tensor::{Encoding, Piece, Scales, Tensor};
use crate::{Error, safetensors, tensor};

/// What surrounds the tensors: where configuration and tokenizer come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// A GGUF file's own metadata.
    Gguf(Arc<Metadata>),
    /// A directory in Hugging Face layout, with its parsed `config.json`.
    Directory {
        /// The directory.
        path: PathBuf,
        /// `config.json`.
        config: Value,
    },
}

/// A tensor as the file describes it.
#[derive(Debug, Clone)]
struct Stored {
    mapping: Arc<Mapping>,
    range: Range<usize>,
    shape: Vec<usize>,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Known(Encoding),
    /// A safetensors type that is not an element type on its own (`U32`: MLX codes) or not known.
    Other(String),
}

/// The tensors of one model.
#[derive(Debug)]
pub struct Checkpoint {
    source: Source,
    tensors: BTreeMap<String, Stored>,
    taken: BTreeSet<String>,
    bytes: u64,
}

impl Checkpoint {
    /// Opens a `.gguf` file, or a directory with `config.json` and `*.safetensors` files.
    ///
    /// # Errors
    /// Any [`Error`] that concerns the files' structure.
    pub fn open(path: &Path) -> Result<Self, Error> {
        if path.is_dir() { Self::open_directory(path) } else { Self::from_gguf(&Mapping::open(path)?) }
    }

    /// Reads a mapped GGUF file.
    ///
    /// # Errors
    /// As [`Gguf::parse`].
    pub fn from_gguf(mapping: &Arc<Mapping>) -> Result<Self, Error> {
        if !mapping.bytes().starts_with(b"GGUF") {
            let expected = "expected a GGUF file, or a directory with config.json and *.safetensors";
            return Err(Error::NotAModel { path: mapping.path().to_path_buf(), expected });
        }
        let file = Gguf::parse(mapping)?;
        let tensors = file.tensors.into_iter().map(|entry| {
            let kind = Kind::Known(entry.encoding);
            (entry.name, Stored { mapping: mapping.clone(), range: entry.range, shape: entry.shape, kind })
        });
        let bytes = mapping.bytes().len() as u64;
        Ok(Self {
            source: Source::Gguf(Arc::new(file.metadata)),
            tensors: tensors.collect(),
            taken: BTreeSet::new(),
            bytes,
        })
    }

    fn open_directory(path: &Path) -> Result<Self, Error> {
        let config = read_json(&path.join("config.json"))?;
        let files = weight_files(path)?;
        let (mut tensors, mut bytes) = (BTreeMap::new(), 0);
        for file in files {
            let mapping = Mapping::open(&file)?;
            bytes += mapping.bytes().len() as u64;
            for entry in safetensors::read(&mapping)? {
                let kind = match entry.dtype.as_str() {
                    "F32" => Kind::Known(Encoding::Raw(Raw::F32)),
                    "F16" => Kind::Known(Encoding::Raw(Raw::F16)),
                    "BF16" => Kind::Known(Encoding::Raw(Raw::Bf16)),
                    _ => Kind::Other(entry.dtype),
                };
                let stored = Stored { mapping: mapping.clone(), range: entry.range, shape: entry.shape, kind };
                if tensors.insert(entry.name.clone(), stored).is_some() {
                    let what = format!("tensor `{}` also stands in another file of the model", entry.name);
                    return Err(Error::Damaged { path: file, offset: 8, what });
                }
            }
        }
        let source = Source::Directory { path: path.to_path_buf(), config };
        Ok(Self { source, tensors, taken: BTreeSet::new(), bytes })
    }

    /// Configuration and tokenizer of the model.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// A name for these weights: a hash of the configuration, of every tensor's name, shape and type, and of samples of its bytes. Whole weights are
    /// not read, so a file altered by hand in a few places may keep its fingerprint; another training, conversion or quantization does not.
    pub fn fingerprint(&self) -> String {
        const SAMPLES: usize = 16;
        const LENGTH: usize = 64;
        let mut hash = Xxh3::new();
        match &self.source {
            Source::Directory { config, .. } => hash.update(config.to_string().as_bytes()),
            Source::Gguf(metadata) => hash.update(format!("{metadata:?}").as_bytes()),
        }
        for (name, stored) in &self.tensors {
            hash.update(format!("{name} {:?} {:?}", stored.shape, self.encoding_name(name)).as_bytes());
            let bytes = &stored.mapping.bytes()[stored.range.clone()];
            let step = (bytes.len() / SAMPLES).max(LENGTH);
            bytes.chunks(step).for_each(|piece| hash.update(&piece[..piece.len().min(LENGTH)]));
        }
        format!("{:032x}", hash.digest128())
    }

    /// Whether the files have a tensor of this name.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor, outermost first, as its file says.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|stored| stored.shape.as_slice())
    }

    /// A tensor's element encoding as text, for reports: `Q4_1`, `bf16`, `U32`.
    pub fn encoding_name(&self, name: &str) -> Option<String> {
        self.tensors.get(name).map(|stored| match &stored.kind {
            Kind::Known(encoding) => encoding.to_string(),
            Kind::Other(dtype) => dtype.clone(),
        })
    }

    /// Renames every tensor by `rename`; used to bring a file's names to those of the graph.
    ///
    /// # Errors
    /// [`Error::Damaged`] when two tensors get the same name.
    pub fn rename(&mut self, rename: impl Fn(&str) -> String) -> Result<(), Error> {
        let mut renamed = BTreeMap::new();
        for (name, stored) in std::mem::take(&mut self.tensors) {
            let path = stored.mapping.path().to_path_buf();
            if renamed.insert(rename(&name), stored).is_some() {
                return Err(Error::Damaged { path, offset: 0, what: format!("two tensors mean `{}`", rename(&name)) });
            }
        }
        self.tensors = renamed;
        Ok(())
    }

    /// Marks a tensor as deliberately left out, such as a value that the graph computes itself.
    pub fn ignore(&mut self, name: &str) {
        if self.tensors.contains_key(name) {
            self.taken.insert(name.to_string());
        }
    }

    /// Takes the tensor `name`, which must have `shape` (outermost first) once decoded.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Shape`], [`Error::UnknownType`] or [`Error::Quantization`].
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, Error> {
        if !self.has(name) && self.has(&format!("{name}_blocks")) {
            return self.take_mxfp4(name, shape);
        }
        let stored = self.tensors.get(name).cloned().ok_or_else(|| Error::Missing { name: name.into() })?;
        let base = name.strip_suffix(".weight").unwrap_or(name);
        let encoding = match stored.kind {
            Kind::Known(encoding) => {
                if stored.shape != shape {
                    return Err(Error::Shape { name: name.into(), expected: shape.to_vec(), found: stored.shape });
                }
                encoding
            }
            Kind::Other(dtype) if dtype == "U32" && self.has(&format!("{base}.scales")) => {
                let parts = self.mlx_parts(name, base, shape, &stored.shape)?;
                self.taken.insert(format!("{base}.scales"));
                self.taken.insert(format!("{base}.biases"));
                Encoding::Mlx(parts)
            }
            Kind::Other(found) => return Err(Error::UnknownType { name: name.into(), found }),
        };
        self.taken.insert(name.to_string());
        let piece = Piece { mapping: stored.mapping, range: stored.range, encoding, rows: tensor::rows(shape) };
        Ok(Tensor { name: name.into(), shape: shape.to_vec(), pieces: vec![piece], order: None, runs: None })
    }

    /// A tensor in two: `{name}_blocks` of `[…, cols / 32, 16]` bytes and `{name}_scales` of `[…, cols / 32]`.
    fn take_mxfp4(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, Error> {
        let [outer @ .., cols] = shape else {
            return Err(Error::Quantization { name: name.into(), what: "it has no dimensions".into() });
        };
        if !cols.is_multiple_of(32) {
            let what = format!("{cols} columns are no whole number of blocks of 32");
            return Err(Error::Quantization { name: name.into(), what });
        }
        let mut side = |suffix: &str, expected: Vec<usize>| -> Result<Stored, Error> {
            let name = format!("{name}_{suffix}");
            let stored = self.tensors.get(&name).cloned().ok_or_else(|| Error::Missing { name: name.clone() })?;
            match &stored.kind {
                Kind::Other(dtype) if dtype == "U8" => {}
                _ => return Err(Error::Quantization { name, what: "it does not hold bytes".into() }),
            }
            if stored.shape != expected {
                return Err(Error::Shape { name, expected, found: stored.shape });
            }
            self.taken.insert(name);
            Ok(stored)
        };
        let blocks = side("blocks", [outer, &[cols / 32, 16]].concat())?;
        let scales = side("scales", [outer, &[cols / 32]].concat())?;
        let encoding = Encoding::Mxfp4(Scales(Part { mapping: scales.mapping, range: scales.range }));
        let piece = Piece { mapping: blocks.mapping, range: blocks.range, encoding, rows: tensor::rows(shape) };
        Ok(Tensor { name: name.into(), shape: shape.to_vec(), pieces: vec![piece], order: None, runs: None })
    }

    fn mlx_parts(&self, name: &str, base: &str, shape: &[usize], codes: &[usize]) -> Result<MlxParts, Error> {
        let bad = |what: String| Error::Quantization { name: name.into(), what };
        let side = |suffix: &str| -> Result<(Floats, &[usize]), Error> {
            let side = format!("{base}.{suffix}");
            let stored = self.tensors.get(&side).ok_or(Error::Missing { name: side })?;
            let Kind::Known(Encoding::Raw(raw)) = stored.kind else {
                return Err(bad(format!("its {suffix} are not plain floats")));
            };
            let part = Part { mapping: stored.mapping.clone(), range: stored.range.clone() };
            Ok((Floats { part, raw }, &stored.shape))
        };
        let ((scales, scale_shape), (biases, bias_shape)) = (side("scales")?, side("biases")?);
        let ([.., cols], [.., words], [.., groups]) = (shape, codes, scale_shape) else {
            return Err(bad("it has no dimensions".into()));
        };
        let outer = |shape: &[usize]| shape[..shape.len() - 1].to_vec();
        if scale_shape != bias_shape || outer(codes) != outer(shape) || outer(scale_shape) != outer(shape) {
            let what =
                format!("codes {codes:?}, scales {scale_shape:?} and biases {bias_shape:?} do not make {shape:?}");
            return Err(bad(what));
        }
        let whole = |n: usize, by: usize| if by > 0 && n.is_multiple_of(by) { Some(n / by) } else { None };
        let bits = words.checked_mul(32).and_then(|bits| whole(bits, *cols)).unwrap_or(0);
        let group = whole(*cols, *groups).unwrap_or(0);
        if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) || !matches!(group, 32 | 64 | 128) {
            return Err(bad(format!("{words} words and {groups} groups for {cols} columns are no MLX affine format")));
        }
        Ok(MlxParts { affine: Affine { bits: bits as u32, group, zero: 0, biased: true }, scales, biases })
    }

    /// Checks that every tensor was taken.
    ///
    /// # Errors
    /// [`Error::Unused`] naming the first one that was not.
    pub fn finish(&self) -> Result<(), Error> {
        let mut unused = self.tensors.keys().filter(|name| !self.taken.contains(*name));
        match unused.next() {
            None => Ok(()),
            Some(first) => Err(Error::Unused { count: 1 + unused.count(), first: first.clone() }),
        }
    }
}

/// The files of a directory that hold a model's weights: those that an index names, else `model.safetensors`, else every safetensors file. Published
/// directories hold other ones besides, such as the same weights in another layout.
fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let index = directory.join("model.safetensors.index.json");
    if index.is_file() {
        let json = read_json(&index)?;
        let names =
            json["weight_map"].as_object().map(|map| map.values().map(Value::as_str).collect::<Option<BTreeSet<_>>>());
        let names = names.flatten().filter(|names| {
            // A name is that of a file beside the index.
            names.iter().all(|name| Path::new(name).file_name().is_some_and(|file| file == *name))
        });
        let what = "its `weight_map` names no files of this directory".to_string();
        let names = names.ok_or(Error::Json { path: index, what })?;
        return Ok(names.into_iter().map(|name| directory.join(name)).collect());
    }
    let single = directory.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let io = |source| Error::Io { path: directory.to_path_buf(), source };
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(io)? {
        let file = entry.map_err(io)?.path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(file);
        }
    }
    files.sort();
    let expected = "the directory has no *.safetensors file";
    if files.is_empty() { Err(Error::NotAModel { path: directory.to_path_buf(), expected }) } else { Ok(files) }
}

fn read_json(path: &Path) -> Result<Value, Error> {
    let text = fs::read(path).map_err(|source| Error::Io { path: path.to_path_buf(), source })?;
    serde_json::from_slice(&text).map_err(|e| Error::Json { path: path.to_path_buf(), what: e.to_string() })
}
