//! The kernel sets that tests run on: the instruction sets of this processor, or the GPU when `KVERN_TEST_DEVICE` is `cuda`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvern_cpu::{Cpu, CpuOptions, KernelSet};
use kvern_cuda::{Cuda, CudaOptions};

/// A kernel set under test.
#[derive(Debug, Clone, Copy)]
pub enum Set {
    /// An instruction set of the processor.
    Cpu(KernelSet),
    /// The first GPU.
    Cuda,
}

#[allow(dead_code, reason = "each test uses its own part of this")]
impl Set {
    /// Its name, for messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu(set) => set.name(),
            Self::Cuda => "cuda",
        }
    }
}

/// Every kernel set to test.
pub fn sets() -> Vec<Set> {
    match std::env::var("KVERN_TEST_DEVICE").as_deref() {
        Ok("cuda") => vec![Set::Cuda],
        _ => KernelSet::available().into_iter().map(Set::Cpu).collect(),
    }
}

/// The kernel sets that differ for weights that are not bf16, as those of the fixtures are: tiles are for bf16.
#[allow(dead_code, reason = "each test uses its own part of this")]
pub fn sets_of_fixtures() -> Vec<Set> {
    sets().into_iter().filter(|set| set.name() != "amx").collect()
}

/// A CPU with one of this machine's instruction sets.
pub fn cpu(set: KernelSet, threads: usize, exact: bool) -> Cpu {
    Cpu::new(&CpuOptions { threads: Some(threads), isa: Some(set.name().into()), exact }).unwrap()
}

/// A new GPU backend; an eager one records no steps.
#[allow(dead_code, reason = "each test uses its own part of this")]
pub fn gpu(exact: bool, eager: bool) -> Cuda {
    Cuda::new(&CudaOptions { exact, eager, ..CudaOptions::default() }).unwrap()
}

/// The GPU, for one test at a time.
#[allow(dead_code, reason = "each test uses its own part of this")]
pub fn shared_gpu(exact: bool) -> MutexGuard<'static, Option<Cuda>> {
    static GPUS: [Mutex<Option<Cuda>>; 2] = [Mutex::new(None), Mutex::new(None)];
    // A test that failed leaves the GPU usable.
    let mut guard = GPUS[usize::from(exact)].lock().unwrap_or_else(PoisonError::into_inner);
    guard.get_or_insert_with(|| gpu(exact, false));
    guard
}

/// Evaluates an expression with a reference to a backend of a kernel set: `on!(set, threads, exact, |backend| …)`.
#[allow(unused_macros, reason = "each test uses its own part of this")]
macro_rules! on {
    ($set:expr, $threads:expr, $exact:expr, |$backend:ident| $body:expr) => {
        match $set {
            $crate::subjects::Set::Cpu(set) => {
                let $backend = &$crate::subjects::cpu(set, $threads, $exact);
                $body
            }
            $crate::subjects::Set::Cuda => {
                let guard = $crate::subjects::shared_gpu($exact);
                let $backend = guard.as_ref().unwrap();
                $body
            }
        }
    };
}
#[allow(unused_imports, reason = "each test uses its own part of this")]
pub(crate) use on;
