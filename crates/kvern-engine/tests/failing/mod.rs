//! A CPU whose verbs on state fail when a fuse has burnt down.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvern_backend::{Activation, Attention, Backend, DeltaInputs, DeltaRule, Error, Indexer, Part, Routing, Slot};
use kvern_cpu::{Cpu, CpuOptions};
use kvern_engine::{Engine, EngineOptions};
use kvern_models::{LoadOptions, load};
use kvern_state::{StateSpec, StepPlan, Table};
use kvern_weights::{Checkpoint, Tensor as Weight};

struct Failing {
    cpu: Cpu,
    /// Verbs that still succeed.
    fuse: Arc<AtomicUsize>,
}

impl Failing {
    fn burn(&self) -> Result<(), Error> {
        match self.fuse.load(Ordering::Relaxed) {
            0 => Err(Error::Unsupported { what: "everything", found: "a fault".into(), needs: "luck" }),
            left => {
                self.fuse.store(left - 1, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

/// An engine, and the number of verbs that still succeed.
pub fn engine(model: &Path) -> (Engine, Arc<AtomicUsize>) {
    let cpu = Cpu::new(&CpuOptions { threads: Some(2), ..CpuOptions::default() }).unwrap();
    let fuse = Arc::new(AtomicUsize::new(usize::MAX));
    let backend = Failing { cpu, fuse: fuse.clone() };
    let options = LoadOptions { max_outputs: 64, page: 16, ..LoadOptions::default() };
    let model = load(&backend, Checkpoint::open(model).unwrap(), &options).unwrap();
    let options = EngineOptions { max_tokens: 64, state_memory: Some(1 << 30), ..EngineOptions::default() };
    (Engine::new(backend, model, options).unwrap(), fuse)
}

type Tensor = <Cpu as Backend>::Tensor;
type Linear = <Cpu as Backend>::Linear;
type Pages = <Cpu as Backend>::Pages;

/// Verbs that go to the CPU as they are, and those that burn the fuse first.
macro_rules! verbs {
    ($($kind:ident fn $name:ident(&self $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;)*) => {
        $(verbs!(@ $kind $name ($($arg: $type),*) ($($out)?));)*
    };
    (@ plain $name:ident ($($arg:ident: $type:ty),*) ($($out:ty)?)) => {
        fn $name(&self $(, $arg: $type)*) $(-> $out)? {
            self.cpu.$name($($arg),*)
        }
    };
    (@ fails $name:ident ($($arg:ident: $type:ty),*) ($($out:ty)?)) => {
        fn $name(&self $(, $arg: $type)*) $(-> $out)? {
            self.burn()?;
            self.cpu.$name($($arg),*)
        }
    };
}

impl Backend for Failing {
    type Tensor = Tensor;
    type Linear = Linear;
    type Vector = Vec<f32>;
    type Pages = Pages;
    type Step = StepPlan;

    fn plan<'a>(&self, step: &'a StepPlan) -> &'a StepPlan {
        step
    }

    verbs! {
        plain fn describe(&self) -> String;
        plain fn linear(&self, weight: Weight, bias: Option<Weight>) -> Result<Linear, Error>;
        plain fn stack(&self, weight: Weight, bias: Option<Weight>, count: usize) -> Result<Linear, Error>;
        plain fn linear_bytes(&self, linear: &Linear) -> usize;
        plain fn vector(&self, values: &[f32]) -> Result<Vec<f32>, Error>;
        plain fn tensor(&self, rows: usize, width: usize) -> Result<Tensor, Error>;
        plain fn resize(&self, tensor: &mut Tensor, rows: usize) -> Result<(), Error>;
        plain fn pages(&self, spec: &StateSpec) -> Result<Pages, Error>;
        fails fn begin(&self, plan: StepPlan, pages: &mut Pages) -> Result<StepPlan, Error>;
        plain fn at_outputs(&self, step: &StepPlan) -> Option<StepPlan>;
        plain fn route(
            &self, logits: &Tensor, routing: Routing, sides: [Option<&Vec<f32>>; 2], picks: &mut Tensor
        ) -> Result<(), Error>;
        plain fn project_picked(
            &self, x: &Tensor, picks: &Tensor, outs: &mut [(&Linear, &mut Tensor)]
        ) -> Result<(), Error>;
        plain fn combine(&self, x: &Tensor, picks: &Tensor, out: &mut Tensor) -> Result<(), Error>;
        plain fn combine_add(&self, x: &Tensor, picks: &Tensor, acc: &mut Tensor) -> Result<(), Error>;
        plain fn project_heads(&self, x: &Tensor, stack: &Linear, out: &mut Tensor) -> Result<(), Error>;
        plain fn layer_norm_in_place(&self, x: &mut Tensor, affine: [&Vec<f32>; 2], eps: f32) -> Result<(), Error>;
        plain fn embed(&self, step: &StepPlan, table: &Linear, scale: f32, out: &mut Tensor) -> Result<(), Error>;
        plain fn rms_norm_add(&self, x: &Tensor, weight: &Vec<f32>, eps: f32, acc: &mut Tensor) -> Result<(), Error>;
        plain fn activate(&self, activation: Activation, x: &mut Tensor) -> Result<(), Error>;
        plain fn decay(&self, rate: &Vec<f32>, bias: &Vec<f32>, x: &mut Tensor) -> Result<(), Error>;
        plain fn softcap(&self, cap: f32, x: &mut Tensor) -> Result<(), Error>;
        plain fn rms_norm(&self, x: &Tensor, weight: &Vec<f32>, eps: f32, out: &mut Tensor) -> Result<(), Error>;
        plain fn rms_norm_in_place(&self, x: &mut Tensor, weight: &Vec<f32>, eps: f32) -> Result<(), Error>;
        plain fn project(&self, x: &Tensor, outs: &mut [(&Linear, &mut Tensor)]) -> Result<(), Error>;
        plain fn project_add(&self, x: &Tensor, weight: &Linear, acc: &mut Tensor) -> Result<(), Error>;
        plain fn rope_angles(&self, step: &StepPlan, f: &Vec<f32>, scale: f32, out: &mut Tensor) -> Result<(), Error>;
        plain fn rope(&self, x: &mut Tensor, angles: &Tensor, head_dim: usize) -> Result<(), Error>;
        fails fn append(
            &self, step: &StepPlan, pages: &mut Pages, slot: Slot, planes: &[&Tensor]
        ) -> Result<(), Error>;
        fails fn attend(
            &self, step: &StepPlan, pages: &Pages, attention: Attention, sinks: Option<&Vec<f32>>, q: &Tensor,
            out: &mut Tensor
        ) -> Result<(), Error>;
        fails fn select(
            &self, step: &StepPlan, pages: &Pages, indexer: Indexer, inputs: (&Tensor, &Tensor), picks: &mut Tensor
        ) -> Result<(), Error>;
        fails fn attend_picked(
            &self, step: &StepPlan, pages: &Pages, attention: Attention, picks: &Tensor, q: &Tensor, out: &mut Tensor
        ) -> Result<(), Error>;
        fails fn convolve(
            &self, step: &StepPlan, pages: &mut Pages, state: (Slot, usize), kernel: &Vec<f32>, x: &Tensor,
            out: &mut Tensor
        ) -> Result<(), Error>;
        fails fn delta_rule(
            &self, step: &StepPlan, pages: &mut Pages, rule: DeltaRule, inputs: DeltaInputs<'_, Tensor>,
            out: &mut Tensor
        ) -> Result<(), Error>;
        plain fn gate(&self, activation: Activation, gate: &mut Tensor, up: &Tensor) -> Result<(), Error>;
        plain fn gate_clamped(&self, unit: (f32, f32), gate: &mut Tensor, up: &Tensor) -> Result<(), Error>;
        plain fn scale(&self, factor: f32, x: &mut Tensor) -> Result<(), Error>;
        plain fn slice(&self, x: &Tensor, first: usize, out: &mut Tensor) -> Result<(), Error>;
        plain fn join(&self, heads: usize, a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<(), Error>;
        plain fn outputs(&self, step: &StepPlan, x: &Tensor, out: &mut Tensor) -> Result<(), Error>;
        plain fn upload(&self, values: &[f32], tensor: &mut Tensor) -> Result<(), Error>;
        fails fn download(&self, tensor: &Tensor) -> Result<Vec<f32>, Error>;
        fails fn export(
            &self, pages: &Pages, part: Part, table: &Table, columns: Range<usize>, out: &mut [u8]
        ) -> Result<(), Error>;
        fails fn import(
            &self, pages: &mut Pages, part: Part, table: &Table, columns: Range<usize>, bytes: &[u8]
        ) -> Result<(), Error>;
    }
}
