//! [`Cuda`]: a GPU with what its verbs share, and how kernels are started on it.

use std::collections::VecDeque;
use std::sync::Mutex;

use cudarc::driver::CudaEvent;
use kvern_backend::Error as BackendError;

use crate::device::{Argument, Device, Error, Grid, Memory, Pinned, Trying, between, lock};
use crate::record::{Mode, Recorder};
use crate::step::Uploads;

/// Names of kernels and the seconds that each took, in order.
pub type KernelTimes = Vec<(&'static str, f64)>;

/// How a [`Cuda`] is made.
#[derive(Debug, Clone, Default)]
pub struct CudaOptions {
    /// Which GPU, of those that the driver shows.
    pub device: usize,
    /// Decode quantized weights to `f32` and multiply in `f32`: slow, for comparisons.
    pub exact: bool,
    /// Record no steps.
    pub eager: bool,
}

/// Memory that is left to others: workspaces, recorded steps, the driver.
pub(crate) const RESERVE: u64 = 1 << 30;

/// The GPU backend. Verbs share scratch memory and one stream, so one thread at a time drives a `Cuda`; a model and its engine have one of their own.
pub struct Cuda {
    pub(crate) device: Device,
    pub(crate) exact: bool,
    pub(crate) eager: bool,
    pub(crate) state: Mutex<State>,
}

/// What verbs share.
pub(crate) struct State {
    pub(crate) mode: Mode,
    pub(crate) recorder: Recorder,
    pub(crate) uploads: Uploads,
    /// Activations of a product, in 16 bits, a factor for each row, and the sums of its units.
    pub(crate) inputs: Scratch,
    pub(crate) scales: Scratch,
    pub(crate) sums: Scratch,
    /// Partial results of attention.
    pub(crate) parts: Scratch,
    /// Tokens drawn by the last step that drew.
    pub(crate) drawn: Memory,
    pub(crate) results: VecDeque<Drawn>,
    pub(crate) spare: Vec<Pinned>,
    /// Kernels with marks before and after, while somebody wants to know.
    pub(crate) profile: Option<Vec<(&'static str, CudaEvent, CudaEvent)>>,
}

/// Tokens on their way to the host.
pub(crate) struct Drawn {
    pub(crate) pinned: Pinned,
    pub(crate) event: CudaEvent,
    pub(crate) count: usize,
}

/// The most outputs of one step.
pub(crate) const OUTPUTS: usize = 1 << 14;

/// Memory that grows with the largest step.
pub(crate) struct Scratch(pub(crate) Memory);

impl Scratch {
    /// Its address, with room for so many bytes; true when it moved.
    fn reserve(&mut self, device: &Device, bytes: usize) -> Result<bool, Error> {
        let grows = bytes > self.0.bytes();
        if grows {
            self.0 = device.allocate(bytes.next_power_of_two())?;
        }
        Ok(grows)
    }
}

/// Activations `[rows, width]`.
pub struct Tensor {
    pub(crate) memory: Memory,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) capacity: usize,
}

impl Tensor {
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.rows, self.width)
    }

    pub(crate) fn len(&self) -> usize {
        self.rows * self.width
    }

    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }
}

impl Cuda {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`Error`] when the driver or NVRTC is not installed, or there is no such GPU.
    pub fn new(options: &CudaOptions) -> Result<Self, Error> {
        let device = Device::open(options.device)?;
        let scratch = || Ok::<_, Error>(Scratch(device.allocate(1 << 20)?));
        let state = State {
            mode: Mode::Enqueue,
            recorder: Recorder::default(),
            uploads: Uploads::new(&device)?,
            inputs: scratch()?,
            scales: scratch()?,
            sums: scratch()?,
            parts: scratch()?,
            drawn: device.allocate(OUTPUTS * 4)?,
            results: VecDeque::new(),
            spare: Vec::new(),
            profile: None,
        };
        let (exact, eager) = (options.exact, options.eager);
        Ok(Self { device, exact, eager, state: Mutex::new(state) })
    }

    /// Enqueues a kernel, unless a recorded step stands for it.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(crate) unsafe fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        arguments: &[&dyn Argument],
    ) -> Result<(), BackendError> {
        let mut state = lock(&self.state);
        if state.mode == Mode::Skip {
            return Ok(());
        }
        let start = state.profile.as_ref().map(|_| self.device.mark()).transpose()?;
        // SAFETY: the caller answers for the arguments.
        unsafe { self.device.launch(name, grid, arguments) }?;
        if let (Some(profile), Some(start)) = (&mut state.profile, start) {
            profile.push((name, start, self.device.mark()?));
        }
        Ok(())
    }

    /// Seconds that the device takes for what `enqueue` enqueues.
    ///
    /// # Errors
    /// `enqueue`'s, or the device's.
    pub fn time<E: From<Error>>(&self, enqueue: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
        let start = self.device.mark()?;
        enqueue()?;
        let end = self.device.mark()?;
        Ok(between(&start, &end)?)
    }

    /// Runs `enqueue` with a clock around each kernel that it starts plainly; gives their names and seconds, in order.
    ///
    /// # Errors
    /// `enqueue`'s, or the device's.
    pub fn profile<T, E: From<Error>>(&self, enqueue: impl FnOnce() -> Result<T, E>) -> Result<(T, KernelTimes), E> {
        lock(&self.state).profile = Some(Vec::new());
        let outcome = enqueue();
        let marks = lock(&self.state).profile.take().unwrap_or_default();
        let times = marks.iter().map(|(name, start, end)| Ok((*name, between(start, end)?)));
        let times = times.collect::<Result<_, Error>>()?;
        Ok((outcome?, times))
    }

    /// Makes sure that scratch memory has room; what was recorded with another address is forgotten.
    pub(crate) fn reserve(&self, of: impl Fn(&mut State) -> &mut Scratch, bytes: usize) -> Result<u64, Error> {
        let mut state = lock(&self.state);
        if of(&mut state).reserve(&self.device, bytes)? {
            state.recorder.clear();
        }
        Ok(of(&mut state).0.address())
    }

    /// Enqueues the copy of drawn tokens to the host.
    pub(crate) fn fetch(&self, count: usize) -> Result<(), Error> {
        let mut state = lock(&self.state);
        let mut pinned = match state.spare.pop() {
            Some(pinned) => pinned,
            None => Pinned::new(&self.device, OUTPUTS * 4)?,
        };
        state.drawn.give(&mut pinned, count * 4)?;
        let event = self.device.stream().record_event(None).trying("record an event")?;
        state.results.push_back(Drawn { pinned, event, count });
        Ok(())
    }
}
