//! GGUF versions 2 and 3: a bounded parser.
//!
//! A file is a header, metadata entries, tensor descriptions, padding, and tensor data. Everything in it is untrusted: a count is
//! compared with the bytes that are left before it is believed, so memory use is bounded by a small multiple of the file's size,
//! and nothing panics.
//!
//! ```no_run
//! # let mapping = kvern_weights::Mapping::open("model.gguf".as_ref())?;
//! let file = kvern_weights::gguf::Gguf::parse(&mapping)?;
//! println!("{:?}", file.metadata.get("general.architecture"));
//! # Ok::<(), kvern_weights::Error>(())
//! ```

use std::collections::BTreeMap;
use std::ops::Range;

use kvern_base::Raw;

use crate::mapping::Mapping;
use crate::quant::BlockFormat;
use crate::tensor::Encoding;
use crate::{Error, quant};

/// A metadata value; numbers are widened.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any integer.
    Int(i64),
    /// Any floating-point number.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A UTF-8 string.
    Str(String),
    /// An array of integers.
    Ints(Vec<i64>),
    /// An array of floating-point numbers.
    Floats(Vec<f64>),
    /// An array of truth values.
    Bools(Vec<bool>),
    /// An array of strings.
    Strs(Vec<String>),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Int(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
            Self::Str(_) => "a string",
            Self::Ints(_) => "an array of integers",
            Self::Floats(_) => "an array of floats",
            Self::Bools(_) => "an array of bools",
            Self::Strs(_) => "an array of strings",
        }
    }
}

/// Metadata entries by key.
#[derive(Debug, Clone, Default)]
pub struct Metadata(BTreeMap<String, Value>);

macro_rules! getter {
    ($(#[$doc:meta])* $name:ident -> $type:ty, $expected:literal, $pattern:pat => $value:expr) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// [`Error::Metadata`] when the entry exists with another type.
        pub fn $name(&self, key: &str) -> Result<Option<$type>, Error> {
            match self.0.get(key) {
                None => Ok(None),
                Some($pattern) => Ok(Some($value)),
                Some(other) => {
                    Err(Error::Metadata { key: key.into(), expected: $expected, found: other.kind().into() })
                }
            }
        }
    };
}

impl Metadata {
    /// The entry as it is.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// All entries in key order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    getter!(/** An integer entry. */ int -> i64, "an integer", Value::Int(n) => *n);
    getter!(/** A floating-point entry. */ float -> f64, "a float", Value::Float(x) => *x);
    getter!(/** A truth value. */ bool -> bool, "a bool", Value::Bool(b) => *b);
    getter!(/** A string entry. */ str -> &str, "a string", Value::Str(s) => s);
    getter!(/** An array of truth values. */ bools -> &[bool], "an array of bools", Value::Bools(v) => v);
    getter!(/** An array of strings. */ strs -> &[String], "an array of strings", Value::Strs(v) => v);
    getter!(/** An array of integers. */ ints -> &[i64], "an array of integers", Value::Ints(v) => v);
    getter!(/** An array of floats. */ floats -> &[f64], "an array of floats", Value::Floats(v) => v);
}

/// A tensor's description; `range` is absolute in the file.
#[derive(Debug)]
pub struct Entry {
    /// The name.
    pub name: String,
    /// The shape, outermost first (GGUF stores it innermost first).
    pub shape: Vec<usize>,
    /// How the elements are stored.
    pub encoding: Encoding,
    /// Where the bytes lie.
    pub range: Range<usize>,
}

/// A parsed file.
#[derive(Debug)]
pub struct Gguf {
    /// The metadata.
    pub metadata: Metadata,
    /// The tensors in file order.
    pub tensors: Vec<Entry>,
}

impl Gguf {
    /// Parses a mapped file.
    ///
    /// # Errors
    /// [`Error::Damaged`] for anything structurally wrong, [`Error::UnknownType`] for a tensor type that is not read.
    pub fn parse(mapping: &Mapping) -> Result<Self, Error> {
        let mut reader = Reader { mapping, bytes: mapping.bytes(), at: 0 };
        if reader.take(4)? != b"GGUF" {
            return Err(reader.damaged(0, "it does not start with GGUF"));
        }
        let version = reader.u32()?;
        if !(2..=3).contains(&version) {
            return Err(reader.damaged(4, format!("version {version} is neither 2 nor 3")));
        }
        // A description is at least a name length, a dimension count, one dimension, a type and an offset.
        let tensors = reader.count(8 + 4 + 8 + 4 + 8)?;
        let entries = reader.count(8 + 4 + 1)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let at = reader.at;
            let key = reader.string()?;
            let kind = reader.u32()?;
            let value = reader.value(kind)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(reader.damaged(at, format!("metadata `{key}` appears twice")));
            }
        }
        let metadata = Metadata(metadata);
        let alignment = metadata.int("general.alignment")?.unwrap_or(32);
        let alignment =
            usize::try_from(alignment).ok().filter(|a| a.is_power_of_two() && *a <= 1 << 20).ok_or_else(|| {
                Error::Metadata {
                    key: "general.alignment".into(),
                    expected: "a power of two",
                    found: alignment.to_string(),
                }
            })?;
        let mut found = Vec::with_capacity(tensors);
        for _ in 0..tensors {
            found.push(reader.description()?);
        }
        let data = reader.at.next_multiple_of(alignment);
        let tensors = found.into_iter().map(|d| d.place(&reader, data, alignment)).collect::<Result<Vec<_>, _>>()?;
        let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(reader.damaged(reader.at, format!("tensor `{}` appears twice", pair[0])));
        }
        Ok(Self { metadata, tensors })
    }
}

/// A tensor's description before the start of the data is known.
struct Description {
    at: usize,
    name: String,
    shape: Vec<usize>,
    kind: u32,
    offset: u64,
}

impl Description {
    fn place(self, reader: &Reader<'_>, data: usize, alignment: usize) -> Result<Entry, Error> {
        let bad = |what: &str| reader.damaged(self.at, format!("tensor `{}`: {what}", self.name));
        let encoding = encoding(self.kind)
            .ok_or_else(|| Error::UnknownType { name: self.name.clone(), found: format!("number {}", self.kind) })?;
        let (block, bytes) = match &encoding {
            Encoding::Block(format) => (format.block(), format.bytes()),
            Encoding::Raw(raw) => (1, raw.bytes()),
            Encoding::Mlx(_) | Encoding::Mxfp4(_) => return Err(bad("GGUF has no tensors in parts")),
        };
        if self.shape.last().is_none_or(|cols| !cols.is_multiple_of(block)) {
            return Err(bad("its rows are not whole blocks"));
        }
        let length =
            self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(|| bad("its size overflows"))?;
        let length = (length / block).checked_mul(bytes).ok_or_else(|| bad("its size overflows"))?;
        let offset = usize::try_from(self.offset).ok().filter(|offset| offset.is_multiple_of(alignment));
        let start = offset.ok_or_else(|| bad("its offset is not aligned"))?.checked_add(data);
        let range = start.and_then(|start| Some(start..start.checked_add(length)?));
        let range = range
            .filter(|range| range.end <= reader.bytes.len())
            .ok_or_else(|| bad("its bytes lie outside the file (is the file truncated?)"))?;
        Ok(Entry { name: self.name, shape: self.shape, encoding, range })
    }
}

fn encoding(kind: u32) -> Option<Encoding> {
    use quant::BlockFormat::{Mxfp4, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let block = |format: BlockFormat| Some(Encoding::Block(format));
    match kind {
        0 => Some(Encoding::Raw(Raw::F32)),
        1 => Some(Encoding::Raw(Raw::F16)),
        30 => Some(Encoding::Raw(Raw::Bf16)),
        2 => block(Q4_0),
        3 => block(Q4_1),
        6 => block(Q5_0),
        7 => block(Q5_1),
        8 => block(Q8_0),
        12 => block(Q4K),
        13 => block(Q5K),
        14 => block(Q6K),
        39 => block(Mxfp4),
        _ => None,
    }
}

struct Reader<'a> {
    mapping: &'a Mapping,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn damaged(&self, at: usize, what: impl Into<String>) -> Error {
        Error::Damaged { path: self.mapping.path().to_path_buf(), offset: at as u64, what: what.into() }
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| self.damaged(self.at, "the file ends too early"))?;
        let bytes = &self.bytes[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of things that take at least `size` bytes each, believed only if so many bytes are left.
    fn count(&mut self, size: usize) -> Result<usize, Error> {
        let at = self.at;
        let count = self.u64()?;
        let fits = usize::try_from(count).ok().filter(|n| n.checked_mul(size).is_some_and(|n| n <= self.bytes.len()));
        fits.ok_or_else(|| self.damaged(at, format!("a count of {count} is more than the file can hold")))
    }

    fn string(&mut self) -> Result<String, Error> {
        let length = self.count(1)?;
        let at = self.at;
        let bytes = self.take(length)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.damaged(at, "a string is not UTF-8"))
    }

    fn description(&mut self) -> Result<Description, Error> {
        let at = self.at;
        let name = self.string()?;
        let dimensions = self.u32()?;
        if !(1..=4).contains(&dimensions) {
            return Err(self.damaged(at, format!("tensor `{name}` has {dimensions} dimensions")));
        }
        let mut shape = Vec::with_capacity(4);
        for _ in 0..dimensions {
            let dimension = self.u64()?;
            let dimension = usize::try_from(dimension).ok().filter(|&d| d > 0);
            shape.push(
                dimension.ok_or_else(|| self.damaged(at, format!("tensor `{name}` has an impossible dimension")))?,
            );
        }
        shape.reverse();
        Ok(Description { at, name, shape, kind: self.u32()?, offset: self.u64()? })
    }

    fn int(&mut self, kind: u32) -> Result<Option<i64>, Error> {
        Ok(Some(match kind {
            0 => i64::from(self.array::<1>()?[0]),
            1 => i64::from(i8::from_le_bytes(self.array()?)),
            2 => i64::from(u16::from_le_bytes(self.array()?)),
            3 => i64::from(i16::from_le_bytes(self.array()?)),
            4 => i64::from(self.u32()?),
            5 => i64::from(i32::from_le_bytes(self.array()?)),
            10 => {
                let at = self.at;
                let n = self.u64()?;
                i64::try_from(n).map_err(|_| self.damaged(at, format!("the integer {n} is too large")))?
            }
            11 => i64::from_le_bytes(self.array()?),
            _ => return Ok(None),
        }))
    }

    fn float(&mut self, kind: u32) -> Result<Option<f64>, Error> {
        Ok(Some(match kind {
            6 => f64::from(f32::from_le_bytes(self.array()?)),
            12 => f64::from_le_bytes(self.array()?),
            _ => return Ok(None),
        }))
    }

    fn bool(&mut self) -> Result<bool, Error> {
        let at = self.at;
        match self.array::<1>()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [byte] => Err(self.damaged(at, format!("a bool is {byte}"))),
        }
    }

    fn value(&mut self, kind: u32) -> Result<Value, Error> {
        let at = self.at;
        if let Some(n) = self.int(kind)? {
            return Ok(Value::Int(n));
        }
        if let Some(x) = self.float(kind)? {
            return Ok(Value::Float(x));
        }
        match kind {
            7 => Ok(Value::Bool(self.bool()?)),
            8 => Ok(Value::Str(self.string()?)),
            9 => self.values(),
            _ => Err(self.damaged(at, format!("metadata type {kind} is unknown"))),
        }
    }

    fn values(&mut self) -> Result<Value, Error> {
        let at = self.at;
        let kind = self.u32()?;
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            _ => return Err(self.damaged(at, format!("arrays of metadata type {kind} are not read"))),
        };
        let count = self.count(size)?;
        Ok(match kind {
            6 | 12 => {
                Value::Floats((0..count).map(|_| Ok(self.float(kind)?.unwrap_or_default())).collect::<Result<_, _>>()?)
            }
            7 => Value::Bools((0..count).map(|_| self.bool()).collect::<Result<_, _>>()?),
            8 => Value::Strs((0..count).map(|_| self.string()).collect::<Result<_, _>>()?),
            _ => Value::Ints((0..count).map(|_| Ok(self.int(kind)?.unwrap_or_default())).collect::<Result<_, _>>()?),
        })
    }
}
