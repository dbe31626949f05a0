//! [`Executor`]: a model, the backend that runs it and the pages of its rows, as the engine sees them.
//!
//! The engine schedules; it does not care on what. Behind this trait a model's type parameters end, so one [`crate::Engine`] serves every device.

use kvern_backend::{Backend, Error as BackendError, Limits, freeze, thaw};
use kvern_models::{Info, Model};
use kvern_state::{Identity, Image, Pool, Row, StepPlan};

use crate::Error;

/// What runs an engine's steps.
pub(crate) trait Executor: Send {
    /// What is known of the model.
    fn info(&self) -> &Info;

    /// The device in words, and as names and values.
    fn describe(&self) -> (String, Vec<(&'static str, String)>);

    /// The device's limits, measured.
    fn limits(&self) -> Result<Option<Limits>, BackendError>;

    /// Whether it draws tokens by itself; see [`Backend::draws`].
    fn draws(&self) -> bool;

    /// Begins a step. Its results come from [`Self::logits`], before another step begins, and [`Self::drawn`].
    fn run(&mut self, plan: StepPlan) -> Result<(), Error>;

    /// The logits of the step that was begun last, `[outputs, vocab]`.
    fn logits(&mut self) -> Result<Vec<f32>, BackendError>;

    /// The tokens that the oldest step with draws, not asked for before, drew.
    fn drawn(&mut self) -> Result<Vec<u32>, BackendError>;

    /// Copies a row's state out.
    fn freeze(&self, row: &Row, identity: &Identity, tokens: &[u32]) -> Result<Image, BackendError>;

    /// A row with an image's state.
    fn thaw(&mut self, pool: &Pool, image: &Image, identity: &Identity) -> Result<Row, BackendError>;
}

/// An [`Executor`] on any backend.
pub(crate) struct Loaded<B: Backend> {
    pub(crate) backend: B,
    pub(crate) model: Box<dyn Model<B>>,
    pub(crate) pages: B::Pages,
}

impl<B: Backend> Executor for Loaded<B> {
    fn info(&self) -> &Info {
        self.model.info()
    }

    fn describe(&self) -> (String, Vec<(&'static str, String)>) {
        (self.backend.describe(), self.backend.facts())
    }

    fn limits(&self) -> Result<Option<Limits>, BackendError> {
        self.backend.limits()
    }

    fn draws(&self) -> bool {
        self.backend.draws()
    }

    fn run(&mut self, plan: StepPlan) -> Result<(), Error> {
        let Self { backend, model, pages } = self;
        let step = backend.begin(plan, pages)?;
        backend.run(&step, pages, |pages| {
            let logits = model.forward(backend, &step, pages)?;
            backend.draw(&step, logits)?;
            Ok(())
        })
    }

    fn logits(&mut self) -> Result<Vec<f32>, BackendError> {
        self.backend.download(self.model.logits())
    }

    fn drawn(&mut self) -> Result<Vec<u32>, BackendError> {
        self.backend.drawn()
    }

    fn freeze(&self, row: &Row, identity: &Identity, tokens: &[u32]) -> Result<Image, BackendError> {
        freeze(&self.backend, &self.pages, row, identity.clone(), tokens)
    }

    fn thaw(&mut self, pool: &Pool, image: &Image, identity: &Identity) -> Result<Row, BackendError> {
        thaw(&self.backend, &mut self.pages, pool, image, identity)
    }
}
