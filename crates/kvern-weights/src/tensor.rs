//! A named tensor inside a mapped file, readable row by row.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kvern_base::{Raw, bf16, f16};

use crate::Error;
use crate::mapping::Mapping;
use crate::mlx::{MlxParts, Part};
use crate::quant::{self, Affine, BlockFormat};

/// How a tensor's elements are stored.
#[derive(Debug, Clone)]
pub enum Encoding {
    /// One raw element after another.
    Raw(Raw),
    /// GGML blocks along the innermost dimension.
    Block(BlockFormat),
    /// MLX affine: a bit stream of codes, with scales and biases in tensors of their own.
    Mlx(MlxParts),
    /// MXFP4 as gpt-oss stores it: two codes a byte in the order of the elements, with a power of two for each 32 in a tensor of its own.
    Mxfp4(Scales),
}

/// The tensor of a quantized tensor's scales.
#[derive(Debug, Clone)]
pub struct Scales(pub(crate) Part);

impl std::fmt::Display for Encoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Raw(raw) => raw.fmt(f),
            Self::Block(format) => f.write_str(format.name()),
            Self::Mlx(parts) => write!(f, "mlx{}g{}", parts.affine.bits, parts.affine.group),
            Self::Mxfp4(_) => f.write_str(BlockFormat::Mxfp4.name()),
        }
    }
}

/// Where rows lie in a file, and how they are stored.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) range: Range<usize>,
    pub(crate) encoding: Encoding,
    /// Rows in the file.
    pub(crate) rows: usize,
}

/// One tensor: a matrix of `rows × cols`, where `cols` is the innermost dimension and `rows` all others together.
#[derive(Debug)]
pub struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The rows, in pieces of one size and one encoding: one piece, or those of a stack.
    pub(crate) pieces: Vec<Piece>,
    /// Which stored row each row of the tensor is, when that is not its own index.
    pub(crate) order: Option<Vec<u32>>,
    /// Which stored run of so many columns each of the tensor's is, for a quantized one whose columns stand in another order.
    pub(crate) runs: Option<(Vec<usize>, usize)>,
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
        &self.pieces[0].encoding
    }

    /// The affine form of a quantized tensor; `None` for a raw one.
    pub fn affine(&self) -> Option<Affine> {
        match self.encoding() {
            Encoding::Raw(_) => None,
            Encoding::Block(format) => Some(format.affine()),
            Encoding::Mlx(parts) => Some(parts.affine),
            Encoding::Mxfp4(_) => Some(BlockFormat::Mxfp4.affine()),
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
            Encoding::Mxfp4(_) => 2 * bytes.len(),
        };
        if found != elements {
            return Err(Error::Shape { name: name.into(), expected: shape.to_vec(), found: vec![found] });
        }
        let mapping = Mapping::from_bytes(Path::new(name), bytes);
        let range = 0..mapping.bytes().len();
        let piece = Piece { mapping, range, encoding, rows: rows(shape) };
        Ok(Self { name: name.into(), shape: shape.to_vec(), pieces: vec![piece], order: None, runs: None })
    }

    /// The rows of several tensors of one shape and encoding, one after another: matrices that a checkpoint stores apart, such as experts.
    ///
    /// # Errors
    /// [`Error::Shape`] or [`Error::Quantization`] naming the first that differs from the first of all.
    pub fn stack(mut tensors: Vec<Self>) -> Result<Self, Error> {
        let (mut pieces, mut order, mut rows) = (Vec::with_capacity(tensors.len()), Vec::new(), 0);
        let Some(first) = tensors.first() else {
            return Err(Error::Missing { name: "a stack's first".into() });
        };
        let (name, shape, encoding) = (first.name.clone(), first.shape.clone(), first.encoding().to_string());
        for tensor in &mut tensors {
            if tensor.shape != shape {
                return Err(Error::Shape { name: tensor.name.clone(), expected: shape, found: tensor.shape.clone() });
            }
            if tensor.encoding().to_string() != encoding {
                let what = format!("it is {}, and `{name}` is {encoding}", tensor.encoding());
                return Err(Error::Quantization { name: tensor.name.clone(), what });
            }
            match tensor.order.take() {
                Some(own) => order.extend(own.into_iter().map(|row| rows + row)),
                None => order.extend(rows..rows + tensor.rows() as u32),
            }
            pieces.append(&mut tensor.pieces);
            rows += pieces.last().map_or(0, |piece: &Piece| piece.rows) as u32;
        }
        let shape = vec![order.len(), shape.last().copied().unwrap_or(1)];
        Ok(Self { name, shape, pieces, order: Some(order), runs: None })
    }

    /// Each run of `rows` rows with its rows and columns exchanged. Raw weights keep their type, quantized ones are decoded.
    ///
    /// # Errors
    /// [`Error::Shape`] when the rows make no whole number of runs.
    pub fn transposed(&self, rows: usize) -> Result<Self, Error> {
        let cols = self.cols();
        if !self.rows().is_multiple_of(rows) {
            return Err(Error::Shape {
                name: self.name.clone(),
                expected: vec![rows, cols],
                found: self.shape.clone(),
            });
        }
        let raw = match self.encoding() {
            Encoding::Raw(raw) => *raw,
            _ => Raw::F32,
        };
        let stored: Vec<u8> = match self.encoding() {
            Encoding::Raw(_) => (0..self.rows()).flat_map(|row| self.row_bytes(row)).copied().collect(),
            _ => self.to_vec().iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        let size = raw.bytes();
        let mut bytes = Vec::with_capacity(stored.len());
        for run in stored.chunks_exact(rows * cols * size) {
            for (col, row) in (0..cols).flat_map(|col| (0..rows).map(move |row| (col, row))) {
                bytes.extend_from_slice(&run[(row * cols + col) * size..][..size]);
            }
        }
        Self::in_memory(&self.name, &[self.rows() / rows * cols, rows], Encoding::Raw(raw), bytes)
    }

    /// A matrix whose run `i` of `run` columns is the file's run `order[i]`: heads that a format stores in another order than the graph's.
    ///
    /// # Errors
    /// [`Error::Shape`] when the runs are not those of a row, and [`Error::Quantization`] when they cut groups that share a scale.
    pub fn with_column_runs(mut self, order: &[usize], run: usize) -> Result<Self, Error> {
        let cols = self.cols();
        if order.len() * run != cols || order.iter().any(|&from| from >= order.len()) {
            return Err(Error::Shape { name: self.name.clone(), expected: vec![order.len() * run], found: vec![cols] });
        }
        if let Encoding::Raw(raw) = *self.encoding() {
            let size = run * raw.bytes();
            let rows = (0..self.rows()).map(|row| self.row_bytes(row));
            let bytes = rows.flat_map(|row| order.iter().flat_map(move |from| &row[from * size..][..size]));
            return Self::in_memory(&self.name, &self.shape, Encoding::Raw(raw), bytes.copied().collect());
        }
        if !self.affine().is_some_and(|affine| run.is_multiple_of(affine.group)) {
            let what = format!("runs of {run} columns cut groups that share a scale");
            return Err(Error::Quantization { name: self.name.clone(), what });
        }
        self.runs = Some((order.to_vec(), run));
        Ok(self)
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
        if let Encoding::Raw(raw) = *self.encoding() {
            let bytes = range.start * raw.bytes()..range.end * raw.bytes();
            let bytes = (0..self.rows()).flat_map(|row| &self.row_bytes(row)[bytes.clone()]).copied().collect();
            return Self::in_memory(&self.name, &shape, Encoding::Raw(raw), bytes);
        }
        let values = self.to_vec();
        let rows = values.chunks_exact(cols.max(1)).flat_map(|row| &row[range.clone()]);
        Self::in_memory(&self.name, &shape, Encoding::Raw(Raw::F32), rows.flat_map(|x| x.to_le_bytes()).collect())
    }

    /// A vector of the elements that `order` names: the biases of reordered rows.
    ///
    /// # Errors
    /// [`Error::Shape`] when there is no such element.
    pub fn with_element_order(self, order: &[u32]) -> Result<Self, Error> {
        let values = self.to_vec();
        let ordered: Option<Vec<f32>> = order.iter().map(|&source| values.get(source as usize).copied()).collect();
        let wrong = || Error::Shape { name: self.name.clone(), expected: vec![order.len()], found: self.shape.clone() };
        let bytes = ordered.ok_or_else(wrong)?.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self::in_memory(&self.name, &[order.len()], Encoding::Raw(Raw::F32), bytes)
    }

    /// The piece that holds a row, and the row's index there.
    fn piece(&self, row: usize) -> (&Piece, usize) {
        let source = self.order.as_ref().map_or(row, |order| order[row] as usize);
        let rows = self.pieces[0].rows.max(1);
        (&self.pieces[source / rows], source % rows)
    }

    fn row_bytes(&self, row: usize) -> &[u8] {
        let (piece, index) = self.piece(row);
        let bytes = &piece.mapping.bytes()[piece.range.clone()];
        let stride = bytes.len() / piece.rows.max(1);
        &bytes[index * stride..(index + 1) * stride]
    }

    /// One row of a raw tensor as it is stored, which may be at any byte address; `None` for a quantized one.
    ///
    /// # Panics
    /// When `row` is out of range.
    pub fn raw_row(&self, row: usize) -> Option<&[u8]> {
        matches!(self.encoding(), Encoding::Raw(_)).then(|| self.row_bytes(row))
    }

    /// Decodes one row exactly into `f32`.
    ///
    /// # Panics
    /// When `row` is out of range or `out` is not `cols` long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols());
        let bytes = self.row_bytes(row);
        match self.encoding() {
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
        let (piece, index) = self.piece(row);
        let bytes = self.row_bytes(row);
        match &piece.encoding {
            Encoding::Raw(_) => panic!("`{}` is not quantized", self.name),
            Encoding::Block(format) => format.decode(bytes, codes, scales, biases),
            Encoding::Mlx(parts) => parts.decode(bytes, index, codes, scales, biases),
            Encoding::Mxfp4(Scales(part)) => {
                for (pair, &byte) in codes.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                    *pair = [quant::fp4(byte & 15), quant::fp4(byte >> 4)];
                }
                let exponents = part.bytes(index, scales.len());
                scales.iter_mut().zip(exponents).for_each(|(scale, &exponent)| *scale = quant::half_power(exponent));
            }
        }
        let Some((order, run)) = &self.runs else { return };
        // Groups lie within runs.
        let groups = run * scales.len() / codes.len().max(1);
        let (old_codes, old_scales, old_biases) = (codes.to_vec(), scales.to_vec(), biases.to_vec());
        for (to, &from) in order.iter().enumerate() {
            codes[to * run..][..*run].copy_from_slice(&old_codes[from * run..][..*run]);
            scales[to * groups..][..groups].copy_from_slice(&old_scales[from * groups..][..groups]);
            biases[to * groups..][..groups].copy_from_slice(&old_biases[from * groups..][..groups]);
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
        for piece in &self.pieces {
            piece.mapping.release(piece.range.clone());
        }
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
