//! NVIDIA GPUs: the verbs of [`kvern_backend::Backend`] as CUDA kernels.
//!
//! **What.** [`Cuda`] runs model graphs on one GPU. Kernels are CUDA C++ in `src/kernels`, compiled for the device when they are first used and then kept on
//! disk. A step of rows that generate is recorded once for each size and then played as one CUDA graph, from the drawing of its tokens back to their
//! embedding, without the host in between.
//!
//! **Why.** The driver and NVRTC are loaded when a [`Cuda`] is made, so one program runs with and without a GPU, and builds without a CUDA toolkit.
//!
//! **Invariants.** One stream has everything, so what is enqueued later sees what was enqueued before. Every reduction has one order that follows from shapes
//! alone: a row has the same bits alone and among others, in a step of any size, recorded or not. A fresh page is zeros, so that no column that was never
//! written can be anything else.
//!
//! ```no_run
//! use kvern_backend::Backend;
//! let gpu = kvern_cuda::Cuda::new(&kvern_cuda::CudaOptions::default())?;
//! println!("{}", gpu.describe());
//! # Ok::<(), kvern_cuda::Error>(())
//! ```

mod attention;
mod backend;
mod compile;
mod device;
mod gpu;
mod linear;
mod pages;
mod product;
mod record;
mod step;

pub use compile::{MODULES, Module, OPTIONS, source};
pub use device::Error;
pub use gpu::{Cuda, CudaOptions, KernelTimes, Tensor};
