//! Activations: `f32` rows in one aligned buffer.

use kvern_base::{AllocError, Buffer};

/// A matrix `[rows, width]` within a buffer for `capacity` rows.
#[derive(Debug)]
pub struct Tensor {
    data: Buffer,
    rows: usize,
    width: usize,
    capacity: usize,
}

impl Tensor {
    pub(crate) fn new(capacity: usize, width: usize) -> Result<Self, AllocError> {
        let values = capacity.checked_mul(width).ok_or(AllocError { bytes: usize::MAX })?;
        Ok(Self { data: Buffer::of::<f32>(values)?, rows: 0, width, capacity })
    }

    pub(crate) fn resize(&mut self, rows: usize) -> bool {
        if rows <= self.capacity {
            self.rows = rows;
        }
        rows <= self.capacity
    }

    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// All rows in use, one after another.
    pub fn values(&self) -> &[f32] {
        &self.data.view()[..self.rows * self.width]
    }

    /// All rows in use, writable.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.data.view_mut()[..self.rows * self.width]
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values()[row * self.width..][..self.width]
    }

    /// The rows in use.
    pub fn matrix(&self) -> Matrix<'_> {
        self.runs(self.width)
    }

    /// The runs of `width` values that the rows consist of, as rows of their own.
    pub fn runs(&self, width: usize) -> Matrix<'_> {
        Matrix { values: self.values(), width }
    }
}

/// Rows to read.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    values: &'a [f32],
    width: usize,
}

impl<'a> Matrix<'a> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.width
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.width..][..self.width]
    }
}
