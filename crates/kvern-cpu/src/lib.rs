//! The CPU backend: one set of kernels over AVX-512, AVX2 or portable code, and a thread pool.
//!
//! **What.** [`Cpu`] implements [`Backend`] with weights repacked into panels ([`pack`]), quantized activations ([`quantize`]), matrix
//! products ([`matmul`], on AMX [`tiles`]), paged attention ([`attention`]) and recurrences ([`recurrent`]). The instruction set is chosen once, when the backend is made.
//!
//! **Why.** Decoding is bound by reading weights and state once, prefill by integer dot products; one panel layout serves both.
//!
//! **Invariants.** An output's rounding depends on its row alone: not on the number of rows, the threads, or the pages' places.
//!
//! ```
//! use kvern_backend::Backend;
//! use kvern_cpu::{Cpu, CpuOptions};
//! let cpu = Cpu::new(&CpuOptions { threads: Some(2), ..CpuOptions::default() })?;
//! println!("{}", cpu.describe());
//! # Ok::<(), kvern_cpu::Error>(())
//! ```

pub mod attention;
mod backend;
pub mod coded;
pub mod elementwise;
pub mod isa;
mod limits;
pub mod matmul;
pub mod pack;
pub mod pages;
mod picked;
pub mod pool;
pub mod quantize;
pub mod recurrent;
mod sparse;
mod tensor;
#[cfg(target_arch = "x86_64")]
pub mod tiles;

pub use backend::{Cpu, CpuOptions, Error};
pub use isa::KernelSet;
pub use kvern_backend::Backend;
pub use tensor::{Matrix, Tensor};
