//! A named tensor inside a mapped file, readable row by row.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kvern_base::{Raw, bf16, f16};

use crate::Error;
use crate::mapping::Mapping;
use crate::mlx::MlxParts;
use crate::quant::{Affine, BlockFormat};

/// How a tensor's elements are stored.
#[derive(Debug, Clone)]
pub enum Encoding {
    /// One raw element after another.
    Raw(Raw),
    /// GGML blocks along the innermost dimension.
    Block(BlockFormat),
    /// MLX affine: a bit stream of codes, with scales and biases in tensors of their own.
    Mlx(MlxParts),
}

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Raw(raw) => raw.fmt(f),
            Self::Block(format) => f.write_str(format.name()),
            Self::Mlx(parts) => write!(f, "mlx{}g{}", parts.affine.bits, parts.affine.group),
        }
    }
}

/// One tensor: a matrix of `rows × cols`, where `cols` is the innermost dimension and `rows` all others together.
#[derive(Debug)]
pub struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) range: Range<usize>,
    pub(crate) encoding: Encoding,
    /// Where each row of the tensor lies in the file, when that is not its own index.
    pub(crate) order: Option<Vec<u32>>,
    /// Rows in the file.
    pub(crate) stored_rows: usize,
}

impl Tensor {
    /// The name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The innermost dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The product of all dimensions but the innermost.
    pub fn rows(&self) -> usize {
        rows(&self.shape)
    }

    /// How the elements are stored.
    pub fn encoding(&self) -> &Encoding {
        &self.encoding
    }

    /// The affine form of a quantized tensor; `None` for a raw one.
    pub fn affine(&self) -> Option<Affine> {
        match &self.encoding {
            Encoding::Raw(_) => None,
            Encoding::Block(format) => Some(format.affine()),
            Encoding::Mlx(parts) => Some(parts.affine),
        }
    }

    /// A matrix whose row `r` is the file's row `order[r]`; used where a format stores rows in another order than the graph's, or several matrices as
    /// one.
    ///
    /// # Panics
    /// When an entry of `order` is no row.
    #[must_use]
    pub fn with_row_order(mut self, order: Vec<u32>) -> Self {
        assert!(order.iter().all(|&row| (row as usize) < self.rows()), "the order of `{}` names no row", self.name);
        self.shape = vec![order.len(), self.cols()];
        self.order = Some(order);
        self
    }

    /// A tensor over bytes in memory, such as weights made up for a test or a benchmark.
    ///
    /// # Errors
    /// [`Error::Shape`] when the bytes are not those of `shape` in `encoding`.
    pub fn in_memory(name: &str, shape: &[usize], encoding: Encoding, bytes: Vec<u8>) -> Result<Self, Error> {
        let elements: usize = shape.iter().product();
        let found = match &encoding {
            Encoding::Raw(raw) => bytes.len() / raw.bytes(),
            Encoding::Block(format) => bytes.len() / format.bytes() * format.block(),
            Encoding::Mlx(parts) => bytes.len() * 8 / parts.affine.bits as usize,
        };
        if found != elements {
            return Err(Error::Shape { name: name.into(), expected: shape.to_vec(), found: vec![found] });
        }
        let mapping = Mapping::from_bytes(Path::new(name), bytes);
        let range = 0..mapping.bytes().len();
        let stored_rows = rows(shape);
        Ok(Self { name: name.into(), shape: shape.to_vec(), mapping, range, encoding, order: None, stored_rows })
    }

    /// The columns in `range`, where a format stores several matrices of one output side by side. Raw weights keep their type, quantized ones are decoded.
    ///
    /// # Errors
    /// [`Error::Shape`] when there are no such columns.
    pub fn columns(&self, range: Range<usize>) -> Result<Self, Error> {
        let cols = self.cols();
        if range.start > range.end || range.end > cols {
            return Err(Error::Shape { name: self.name.clone(), expected: vec![range.end], found: vec![cols] });
        }
        let shape = [self.rows(), range.len()];
        if let Encoding::Raw(raw) = self.encoding {
            let bytes = range.start * raw.bytes()..range.end * raw.bytes();
            let bytes = (0..self.rows()).flat_map(|row| &self.row_bytes(row)[bytes.clone()]).copied().collect();
            return Self::in_memory(&self.name, &shape, Encoding::Raw(raw), bytes);
        }
        let values = self.to_vec();
        let rows = values.chunks_exact(cols.max(1)).flat_map(|row| &row[range.clone()]);
        Self::in_memory(&self.name, &shape, Encoding::Raw(Raw::F32), rows.flat_map(|x| x.to_le_bytes()).collect())
    }

    /// A raw vector with its elements in the order `order`; used for biases of reordered rows.
    ///
    /// # Errors
    /// [`Error::Shape`] when `order` has another length than the vector.
    ///
    /// # Panics
    /// When an entry of `order` is outside the vector.
    pub fn with_element_order(self, order: &[u32]) -> Result<Self, Error> {
        let values = self.to_vec();
        let bytes = order.iter().flat_map(|&source| values[source as usize].to_le_bytes()).collect();
        Self::in_memory(&self.name, &self.shape, Encoding::Raw(Raw::F32), bytes)
    }

    fn row_bytes(&self, row: usize) -> &[u8] {
        let bytes = &self.mapping.bytes()[self.range.clone()];
        let source = self.order.as_ref().map_or(row, |order| order[row] as usize);
        let stride = bytes.len() / self.stored_rows.max(1);
        &bytes[source * stride..(source + 1) * stride]
    }

    /// One row of a raw tensor as it is stored, which may be at any byte address; `None` for a quantized one.
    ///
    /// # Panics
    /// When `row` is out of range.
    pub fn raw_row(&self, row: usize) -> Option<&[u8]> {
        matches!(self.encoding, Encoding::Raw(_)).then(|| self.row_bytes(row))
    }

    /// Decodes one row exactly into `f32`.
    ///
    /// # Panics
    /// When `row` is out of range or `out` is not `cols` long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols());
        let bytes = self.row_bytes(row);
        match &self.encoding {
            Encoding::Raw(raw) => decode_raw(*raw, bytes, out),
            _ => {
                let affine = self.affine().expect("a tensor is raw or affine");
                let groups = out.len() / affine.group;
                let (mut codes, mut scales, mut biases) = (vec![0; out.len()], vec![0.0; groups], vec![0.0; groups]);
                self.decode_groups(row, &mut codes, &mut scales, &mut biases);
                for (group, out) in out.chunks_exact_mut(affine.group).enumerate() {
                    for (out, &code) in out.iter_mut().zip(&codes[group * affine.group..]) {
                        *out = scales[group] * (i32::from(code) - affine.zero) as f32 + biases[group];
                    }
                }
            }
        }
    }

    /// Splits one row of a quantized tensor into codes (one per element), and a scale and a bias per group.
    ///
    /// # Panics
    /// When the tensor is raw, `row` is out of range, or a slice has another length than the row needs.
    pub fn decode_groups(&self, row: usize, codes: &mut [u8], scales: &mut [f32], biases: &mut [f32]) {
        assert_eq!(codes.len(), self.cols());
        match &self.encoding {
            Encoding::Raw(_) => panic!("`{}` is not quantized", self.name),
            Encoding::Block(format) => format.decode(self.row_bytes(row), codes, scales, biases),
            Encoding::Mlx(parts) => {
                let source = self.order.as_ref().map_or(row, |order| order[row] as usize);
                parts.decode(self.row_bytes(row), source, codes, scales, biases);
            }
        }
    }

    /// All elements in row order, decoded to `f32`.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows() * self.cols()];
        for (row, out) in out.chunks_exact_mut(self.cols().max(1)).enumerate() {
            self.decode_row(row, out);
        }
        out
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.mapping.release(self.range.clone());
    }
}

/// The product of all dimensions but the innermost.
pub(crate) fn rows(shape: &[usize]) -> usize {
    shape.iter().rev().skip(1).product()
}

/// Decodes raw elements that may lie at any byte address.
pub(crate) fn decode_raw(raw: Raw, bytes: &[u8], out: &mut [f32]) {
    match raw {
        Raw::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        Raw::F16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        Raw::Bf16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
    }
}
