//! A zeroed, cache-line-aligned, fallibly allocated block of bytes.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use bytemuck::Pod;

/// Alignment of every [`Buffer`], in bytes: one cache line, and one AVX-512 register.
pub const ALIGN: usize = 64;

/// The system would not give a buffer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("could not allocate {bytes} bytes of memory")]
pub struct AllocError {
    /// How many bytes were asked for.
    pub bytes: usize,
}

/// An owned block of initialised bytes, aligned to [`ALIGN`].
///
/// Large blocks cost no memory until they are written: the system hands out zero pages. It does so only for ordinary alignments, so
/// the block is allocated a little larger and its start moved up.
pub struct Buffer {
    block: NonNull<u8>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a `Buffer` owns its bytes exclusively, as a `Vec<u8>` does.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads, as with a `Vec<u8>`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// [`AllocError`] when the system has no such block.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        let error = AllocError { bytes: len };
        let layout = Self::layout(len).ok_or(error.clone())?;
        // SAFETY: the layout's size is at least `ALIGN`, so never zero.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(error)?;
        // SAFETY: the offset is below `ALIGN`, and the block is `ALIGN` bytes longer than `len`.
        let start = unsafe { block.add(block.align_offset(ALIGN)) };
        Ok(Self { block, start, len })
    }

    /// Zero elements of one type: `count * size_of::<T>()` bytes.
    ///
    /// # Errors
    /// [`AllocError`] when the system has no such block, or its size overflows.
    pub fn of<T: Pod>(count: usize) -> Result<Self, AllocError> {
        let bytes = count.checked_mul(size_of::<T>()).ok_or(AllocError { bytes: usize::MAX })?;
        Self::zeroed(bytes)
    }

    fn layout(len: usize) -> Option<Layout> {
        Layout::from_size_align(len.checked_add(ALIGN)?, size_of::<usize>()).ok()
    }

    /// Number of bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a buffer of no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` points to `len` initialised bytes that this value owns.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// The buffer as whole elements of `T`; a remainder of bytes is left out.
    pub fn view<T: Pod>(&self) -> &[T] {
        let whole = self.len - self.len % size_of::<T>();
        bytemuck::cast_slice(&self.bytes()[..whole])
    }

    /// The buffer as whole writable elements of `T`; a remainder of bytes is left out.
    pub fn view_mut<T: Pod>(&mut self) -> &mut [T] {
        let whole = self.len - self.len % size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[..whole])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let layout = Self::layout(self.len).expect("the same layout was valid when allocated");
        // SAFETY: `block` came from `alloc_zeroed` with this very layout.
        unsafe { dealloc(self.block.as_ptr(), layout) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_aligned_and_zero_at_awkward_sizes() {
        for len in [0, 1, 63, 64, 65, 1000] {
            let buffer = Buffer::zeroed(len).unwrap();
            assert_eq!(buffer.bytes().as_ptr() as usize % ALIGN, 0);
            assert_eq!(buffer.bytes(), vec![0u8; len]);
        }
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        assert_eq!(Buffer::zeroed(usize::MAX).unwrap_err().bytes, usize::MAX);
        assert!(Buffer::zeroed(1 << 60).is_err());
        assert!(Buffer::of::<u64>(usize::MAX / 4).is_err());
    }
}
