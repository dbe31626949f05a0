//! [`Engine`]: admission, the step loop, and the life of a request.

use std::collections::{BTreeSet, VecDeque};

use kvern_backend::Backend;
use kvern_models::{Info, Model};
use kvern_state::{Batch, Demand, Identity, Kind, Limits, Pool, PrefixIndex, Usage};

use crate::sampler::{Sampled, Sampling, sample};
use crate::{Error, memory};

/// A share of the free memory that state may take when no budget is given; the rest is for everything else on the machine.
const STATE_SHARE: f64 = 0.8;
/// The budget when the system does not say how much memory is free.
const UNKNOWN_MEMORY: u64 = 4 << 30;

/// How an engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// The most rows that run together; at most the outputs that the model was loaded for.
    pub max_rows: usize,
    /// The most tokens of one step; at most the tokens that the model was loaded for.
    pub max_tokens: usize,
    /// Bytes of state; four fifths of the free memory when absent.
    pub state_memory: Option<u64>,
    /// Tokens of a row, if fewer than the model's context.
    pub context: Option<usize>,
    /// What may be kept of ended rows, so that later ones can begin where they are: at most half of the state's memory in pages, which are given up
    /// when a request needs them.
    pub prefixes: Limits,
    /// Tokens between two snapshots of a prompt, for models whose rows can only be resumed where a snapshot was taken.
    pub snapshot_stride: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        let prefixes = Limits { device: u64::MAX, ..Limits::default() };
        Self { max_rows: 64, max_tokens: 512, state_memory: None, context: None, prefixes, snapshot_stride: 512 }
    }
}

/// What somebody wants generated.
#[derive(Debug, Clone)]
pub struct Request {
    /// Token ids to continue.
    pub prompt: Vec<u32>,
    /// The most tokens to generate.
    pub max_tokens: usize,
    /// How to sample.
    pub sampling: Sampling,
    /// Ids that end the generation; they are not part of it.
    pub stops: BTreeSet<u32>,
    /// Lengths of the prompt at which other prompts may part from it, such as the ends of messages.
    pub boundaries: Vec<usize>,
    /// State is shared between requests of equal salt only.
    pub salt: String,
}

impl Request {
    /// A greedy request without stop ids.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        let (stops, boundaries, salt) = (BTreeSet::new(), Vec::new(), String::new());
        Self { prompt, max_tokens, sampling: Sampling::default(), stops, boundaries, salt }
    }
}

/// Names a request within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A generated token.
pub type Token = Sampled;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finish {
    /// A stop id was generated.
    Stop,
    /// The token limit or the context was reached.
    Length,
}

/// What a step did for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// The request.
    pub id: RequestId,
    /// A new token; absent when the generation ends on a stop id.
    pub token: Option<Token>,
    /// Set with the last event of a request.
    pub finish: Option<Finish>,
    /// Tokens of the prompt whose state was there already and was not computed again.
    pub cached: usize,
}

/// A request that runs; its row has the same index in the batch.
#[derive(Debug)]
pub(crate) struct Sequence {
    id: RequestId,
    /// Prompt and generated tokens. The row holds all of them but those still to be processed.
    pub(crate) tokens: Vec<u32>,
    prompt: usize,
    limit: usize,
    sampling: Sampling,
    stops: BTreeSet<u32>,
    /// Lengths at which to take a snapshot, ascending.
    boundaries: Vec<usize>,
    pub(crate) salt: String,
    cached: usize,
}

/// A model with its state and running requests.
pub struct Engine<B: Backend> {
    pub(crate) backend: B,
    model: Box<dyn Model<B>>,
    pub(crate) pages: B::Pages,
    pub(crate) batch: Batch,
    pub(crate) running: Vec<Sequence>,
    waiting: VecDeque<Sequence>,
    pub(crate) index: PrefixIndex,
    /// Whose state this is, but for the salt.
    pub(crate) identity: Identity,
    options: EngineOptions,
    context: usize,
    next: u64,
}

impl<B: Backend> Engine<B> {
    /// An engine without requests.
    ///
    /// # Errors
    /// The backend's, for page storage, or the system's, for the directory of checkpoints.
    pub fn new(backend: B, model: Box<dyn Model<B>>, mut options: EngineOptions) -> Result<Self, Error> {
        // Every row that generates takes a token of the step.
        options.max_rows = options.max_rows.min(options.max_tokens);
        let free = || memory::available().map_or(UNKNOWN_MEMORY, |bytes| (bytes as f64 * STATE_SHARE) as u64);
        let pool = Pool::new(model.info().spec.clone(), options.state_memory.unwrap_or_else(free));
        let pages = backend.pages(pool.spec())?;
        let context = options.context.map_or(model.info().context, |context| context.min(model.info().context));
        let device = options.prefixes.device.min(pool.usage().budget / 2);
        let index = PrefixIndex::new(pool.spec(), Limits { device, ..options.prefixes.clone() })?;
        let (model_name, policy) = (model.info().fingerprint.clone(), pool.spec().policy());
        let identity = Identity { model: model_name, policy, ..Identity::default() };
        let (batch, running, waiting) = (Batch::new(&pool), Vec::new(), VecDeque::new());
        Ok(Self { backend, model, pages, batch, running, waiting, index, identity, options, context, next: 0 })
    }

    /// What is known of the model.
    pub fn info(&self) -> &Info {
        self.model.info()
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Tokens that a row can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Bytes of state in use and promised.
    pub fn usage(&self) -> Usage {
        self.batch.pool().usage()
    }

    /// True when no request runs or waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Queues a request.
    ///
    /// # Errors
    /// A request that could never run is refused at once: [`Error::EmptyPrompt`], [`Error::Context`], [`Error::Memory`],
    /// [`Error::Token`] or [`Error::Parameter`].
    pub fn submit(&mut self, request: Request) -> Result<RequestId, Error> {
        let Request { prompt, max_tokens, sampling, stops, mut boundaries, salt } = request;
        sampling.check()?;
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if prompt.len() >= self.context {
            return Err(Error::Context { tokens: prompt.len(), context: self.context });
        }
        let vocab = self.info().vocab;
        if let Some(&token) = prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(Error::Token { token, vocab });
        }
        let limit = prompt.len().saturating_add(max_tokens).min(self.context);
        let (needed, budget) = (self.info().spec.peak_bytes(self.demand(limit)), self.usage().budget);
        if needed > budget {
            return Err(Error::Memory { tokens: limit, needed, budget });
        }
        if self.needs_snapshots() {
            boundaries.retain(|&at| at < prompt.len());
            boundaries.extend(self.snapshots(prompt.len()));
            boundaries.sort_unstable();
            boundaries.dedup();
        } else {
            boundaries.clear();
        }
        let id = RequestId(self.next);
        self.next += 1;
        let (prompt, tokens, cached) = (prompt.len(), prompt, 0);
        self.waiting.push_back(Sequence { id, prompt, tokens, limit, sampling, stops, boundaries, salt, cached });
        Ok(id)
    }

    /// Whether rows can be resumed only where a snapshot was taken, so that a request's boundaries matter.
    pub fn needs_snapshots(&self) -> bool {
        self.info().spec.groups().iter().any(|group| group.window.is_some() || group.kind == Kind::Recurrent)
    }

    /// Lengths of a prompt at which to take a snapshot for the next prompt that begins like it: at a fixed stride, and at the last whole page that
    /// leaves something to compute.
    fn snapshots(&self, prompt: usize) -> impl Iterator<Item = usize> + use<B> {
        let (stride, page) = (self.options.snapshot_stride.max(1), self.info().spec.page());
        let last = (prompt - 1) / page * page;
        (stride..prompt).step_by(stride).chain((last > 0).then_some(last))
    }

    /// What a row of so many tokens needs.
    fn demand(&self, tokens: usize) -> Demand {
        Demand { tokens, step: self.options.max_tokens, round: 0 }
    }

    /// Ends a request without further events. Its state stays only as a prefix for others.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|sequence| sequence.id != id);
        if let Some(row) = self.running.iter().position(|sequence| sequence.id == id) {
            self.keep(row);
        }
        let keep: Vec<usize> = (0..self.running.len()).filter(|&row| self.running[row].id != id).collect();
        self.retain(&keep);
    }

    /// Keeps the rows named by `keep`, ascending.
    fn retain(&mut self, keep: &[usize]) {
        if keep.len() < self.running.len() && self.batch.filter(keep).is_ok() {
            let mut row = 0;
            self.running.retain(|_| {
                row += 1;
                keep.binary_search(&(row - 1)).is_ok()
            });
        }
    }

    /// Moves waiting requests into the batch, in order, as long as there is room for all they can need.
    fn admit(&mut self) {
        while let Some(sequence) = self.waiting.front() {
            if self.running.len() >= self.options.max_rows {
                return;
            }
            let (tokens, salt, limit) = (sequence.tokens.clone(), sequence.salt.clone(), sequence.limit);
            let (row, cached) = self.begin(&tokens, &salt);
            let demand = self.demand(limit);
            match self.batch.prepare_admit(vec![(row, demand)]) {
                Ok(admission) => admission.commit(),
                // What is kept of other rows gives way, then the request waits for others to end.
                Err(refused) => {
                    drop(refused);
                    if self.make_room() {
                        continue;
                    }
                    return;
                }
            }
            self.running.extend(self.waiting.pop_front().map(|sequence| Sequence { cached, ..sequence }));
        }
    }

    /// Runs one step: admits, computes, samples.
    ///
    /// # Errors
    /// The model's or the state's. The rows of a failed step are as they were before it.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        let mut events = self.end_requests_for_nothing();
        self.admit();
        let mut room = self.options.max_tokens;
        // Rows that generate come first; prompts share what is left, in order.
        let mut counts: Vec<usize> =
            self.running.iter().zip(self.batch.rows()).map(|(s, row)| s.tokens.len() - row.len()).collect();
        room = room.saturating_sub(counts.iter().filter(|&&count| count == 1).count());
        for count in counts.iter_mut().filter(|count| **count > 1) {
            *count = room.min(*count);
            room -= *count;
        }
        for (count, (sequence, row)) in counts.iter_mut().zip(self.running.iter().zip(self.batch.rows())) {
            let boundary = sequence.boundaries.iter().find(|&&at| at > row.len());
            *count = (*count).min(row.room()).min(boundary.map_or(usize::MAX, |at| at - row.len()));
        }
        let (mut tokens, mut outputs, mut sampled) = (Vec::new(), Vec::new(), Vec::new());
        for (index, ((sequence, row), &count)) in self.running.iter().zip(self.batch.rows()).zip(&counts).enumerate() {
            tokens.extend_from_slice(&sequence.tokens[row.len()..row.len() + count]);
            if count > 0 && row.len() + count == sequence.tokens.len() {
                outputs.push(tokens.len() as u32 - 1);
                sampled.push(index);
            }
        }
        if tokens.is_empty() {
            return Ok(events);
        }
        // A page that a running row shares with what is kept must be copied before it is written; what is kept gives way to that.
        let append = loop {
            let error = match self.batch.prepare_append(&counts) {
                // No step runs a draft head yet.
                Ok(append) => break append.without_companions(),
                Err(error) => error,
            };
            if !matches!(error, kvern_state::Error::Budget { .. }) || !self.make_room() {
                return Err(error.into());
            }
        };
        let step = self.backend.begin(append.plan(&tokens, &outputs)?, &mut self.pages)?;
        let logits = self.model.forward(&self.backend, &step, &mut self.pages)?;
        let mut logits = self.backend.download(logits)?;
        append.commit();
        let snapshots = self.needs_snapshots();
        for (row, _) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let (sequence, len) = (&self.running[row], self.batch.rows()[row].len());
            if sequence.boundaries.contains(&len) || (!snapshots && len == sequence.prompt) {
                self.keep(row);
            }
        }
        let vocab = self.model.info().vocab;
        let mut ended = BTreeSet::new();
        for (logits, row) in logits.chunks_exact_mut(vocab).zip(sampled) {
            let event = self.running[row].advance(logits);
            if event.finish.is_some() {
                ended.insert(row);
            }
            events.push(event);
        }
        for &row in &ended {
            self.keep(row);
        }
        let keep: Vec<usize> = (0..self.running.len()).filter(|row| !ended.contains(row)).collect();
        self.retain(&keep);
        self.tidy();
        Ok(events)
    }

    /// Requests for zero tokens end before they begin.
    fn end_requests_for_nothing(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.waiting.retain(|sequence| {
            if sequence.limit > sequence.prompt {
                return true;
            }
            events.push(Event { id: sequence.id, token: None, finish: Some(Finish::Length), cached: 0 });
            false
        });
        events
    }

    /// Runs `tokens` through the model from an empty row and calls `visit(position, logits)` for every position, in order, with chunks
    /// of at most `chunk` tokens. Uses no running request's state.
    ///
    /// # Errors
    /// As [`Self::submit`] and [`Self::step`].
    pub fn score(
        &mut self,
        tokens: &[u32],
        chunk: usize,
        mut visit: impl FnMut(usize, &mut [f32]),
    ) -> Result<(), Error> {
        let vocab = self.info().vocab;
        if tokens.len() > self.context {
            return Err(Error::Context { tokens: tokens.len(), context: self.context });
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
            return Err(Error::Token { token, vocab });
        }
        let mut batch = Batch::new(self.batch.pool());
        loop {
            match batch.prepare_admit(vec![(batch.pool().row(), self.demand(tokens.len()))]) {
                Ok(admission) => break admission.commit(),
                Err(refused) if !self.make_room() => return Err(refused.error.into()),
                Err(_) => {}
            }
        }
        let (mut position, mut rest) = (0, tokens);
        while !rest.is_empty() {
            let most = chunk.clamp(1, self.options.max_tokens).min(batch.rows()[0].room()).min(rest.len());
            let (chunk, later) = rest.split_at(most);
            rest = later;
            let outputs: Vec<u32> = (0..chunk.len() as u32).collect();
            let append = batch.prepare_append(&[chunk.len()])?.without_companions();
            let step = self.backend.begin(append.plan(chunk, &outputs)?, &mut self.pages)?;
            let logits = self.model.forward(&self.backend, &step, &mut self.pages)?;
            let mut logits = self.backend.download(logits)?;
            append.commit();
            for logits in logits.chunks_exact_mut(vocab) {
                visit(position, logits);
                position += 1;
            }
        }
        Ok(())
    }
}

impl Sequence {
    /// Samples the next token and says what became of the request.
    fn advance(&mut self, logits: &mut [f32]) -> Event {
        let token = sample(&self.sampling, logits, &self.tokens, self.tokens.len() as u64);
        if self.stops.contains(&token.id) {
            return Event { id: self.id, token: None, finish: Some(Finish::Stop), cached: self.cached };
        }
        self.tokens.push(token.id);
        let finish = (self.tokens.len() >= self.limit).then_some(Finish::Length);
        Event { id: self.id, token: Some(token), finish, cached: self.cached }
    }
}
