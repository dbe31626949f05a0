//! [`Engine`]: admission, the step loop, and the life of a request.

use std::collections::{BTreeSet, VecDeque};

use kvern_backend::Backend;
use kvern_models::{Info, Model};
use kvern_state::{Batch, Demand, Identity, Kind, Limits, Pending, Pool, PrefixIndex, StepPlan, Usage};

use crate::executor::{Executor, Loaded};
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
    /// A key or value of the request was not finite, so that its codec has no code for it. Others go on.
    NotFinite {
        /// The group of layers.
        group: usize,
        /// The layer within the group.
        layer: usize,
        /// The column.
        column: usize,
    },
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
    /// Prompt and generated tokens, as far as they are known. The row holds all of them but those still to be processed.
    pub(crate) tokens: Vec<u32>,
    /// The output of the step in flight from which one more token is drawn.
    awaits: Option<u32>,
    prompt: usize,
    limit: usize,
    sampling: Sampling,
    stops: BTreeSet<u32>,
    /// Lengths at which to take a snapshot, ascending.
    boundaries: Vec<usize>,
    pub(crate) salt: String,
    cached: usize,
}

/// A step that was begun and whose tokens were not looked at: one for each output, in the plan's order.
struct Flight {
    requests: Vec<RequestId>,
    /// Whether the backend draws the token.
    drawn: Vec<bool>,
}

impl Flight {
    /// Whether another step can be begun before its tokens are known.
    fn ahead(&self) -> bool {
        self.drawn.iter().all(|&drawn| drawn)
    }
}

/// A model with its state and running requests.
///
/// Where the backend draws tokens by itself, the engine runs one step ahead of what it knows: a step takes tokens that the one before it is still drawing. A
/// row that turns out to have ended has then computed one token for nothing, and nobody sees it.
pub struct Engine {
    pub(crate) executor: Box<dyn Executor>,
    /// Steps begun, oldest first.
    flights: VecDeque<Flight>,
    /// What happened and was not told yet.
    events: Vec<Event>,
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

impl Engine {
    /// An engine without requests.
    ///
    /// # Errors
    /// The backend's, for page storage, or the system's, for the directory of checkpoints.
    pub fn new<B: Backend>(backend: B, model: Box<dyn Model<B>>, mut options: EngineOptions) -> Result<Self, Error> {
        // Every row that generates takes a token of the step.
        options.max_rows = options.max_rows.min(options.max_tokens);
        let free = match backend.free_memory()? {
            Some(bytes) => Some(bytes),
            None => memory::available(),
        };
        let share = || free.map_or(UNKNOWN_MEMORY, |bytes| (bytes as f64 * STATE_SHARE) as u64);
        let info = model.info();
        let pool = Pool::new(info.spec.clone(), options.state_memory.unwrap_or_else(share));
        let pages = backend.pages(pool.spec())?;
        let context = options.context.map_or(info.context, |context| context.min(info.context));
        let device = options.prefixes.device.min(pool.usage().budget / 2);
        let index = PrefixIndex::new(pool.spec(), Limits { device, ..options.prefixes.clone() })?;
        let (model_name, policy) = (info.fingerprint.clone(), pool.spec().policy());
        let identity = Identity { model: model_name, policy, ..Identity::default() };
        let executor = Box::new(Loaded { backend, model, pages });
        Ok(Self {
            executor,
            flights: VecDeque::new(),
            events: Vec::new(),
            batch: Batch::new(&pool),
            running: Vec::new(),
            waiting: VecDeque::new(),
            index,
            identity,
            options,
            context,
            next: 0,
        })
    }

    /// What is known of the model.
    pub fn info(&self) -> &Info {
        self.executor.info()
    }

    /// The device in words, and as names and values.
    pub fn describe(&self) -> (String, Vec<(&'static str, String)>) {
        self.executor.describe()
    }

    /// The device's limits, measured, if its backend knows how.
    ///
    /// # Errors
    /// The backend's.
    pub fn limits(&self) -> Result<Option<kvern_backend::Limits>, Error> {
        Ok(self.executor.limits()?)
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
        let (prompt, tokens, awaits, cached) = (prompt.len(), prompt, None, 0);
        let sequence = Sequence { id, tokens, awaits, prompt, limit, sampling, stops, boundaries, salt, cached };
        self.waiting.push_back(sequence);
        Ok(id)
    }

    /// Whether rows can be resumed only where a snapshot was taken, so that a request's boundaries matter.
    pub fn needs_snapshots(&self) -> bool {
        self.info().spec.groups().iter().any(|group| group.window.is_some() || group.kind == Kind::Recurrent)
    }

    /// Lengths of a prompt at which to take a snapshot for the next prompt that begins like it: at a fixed stride, and at the last whole page that
    /// leaves something to compute.
    fn snapshots(&self, prompt: usize) -> impl Iterator<Item = usize> + use<> {
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
        self.events.retain(|event| event.id != id);
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

    /// Admits, begins a step, and gives the tokens that are known by now: those of this step, or of the one before where the engine runs ahead.
    ///
    /// # Errors
    /// The model's or the state's. The rows of a failed step are as they were before it.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.end_requests_for_nothing();
        self.admit();
        // A step whose tokens are drawn here can be in flight only because taking them failed.
        while self.flights.front().is_some_and(|flight| !flight.ahead()) {
            self.land()?;
        }
        let begun = self.begin_step()?;
        while self.flights.len() > usize::from(begun) || self.flights.front().is_some_and(|flight| !flight.ahead()) {
            self.land()?;
        }
        self.tidy();
        Ok(std::mem::take(&mut self.events))
    }

    /// Tokens that each running row takes in the next step.
    fn counts(&self) -> Vec<usize> {
        let mut room = self.options.max_tokens;
        let rows = || self.running.iter().zip(self.batch.rows());
        // Rows that generate come first; prompts share what is left, in order.
        let mut counts: Vec<usize> = rows().map(|(sequence, row)| sequence.open() - row.len()).collect();
        room = room.saturating_sub(counts.iter().filter(|&&count| count == 1).count());
        for count in counts.iter_mut().filter(|count| **count > 1) {
            *count = room.min(*count);
            room -= *count;
        }
        for (count, (sequence, row)) in counts.iter_mut().zip(rows()) {
            let boundary = sequence.boundaries.iter().find(|&&at| at > row.len());
            *count = (*count).min(row.room()).min(boundary.map_or(usize::MAX, |at| at - row.len()));
        }
        counts
    }

    /// Begins a step, if there is something to compute.
    fn begin_step(&mut self) -> Result<bool, Error> {
        let counts = self.counts();
        let draws = self.executor.draws();
        let mut inputs = StepPlan::default();
        let (mut flight, mut awaits) = (Flight { requests: Vec::new(), drawn: Vec::new() }, Vec::new());
        for ((sequence, row), &count) in self.running.iter().zip(self.batch.rows()).zip(&counts) {
            let end = row.len() + count;
            let known = &sequence.tokens[row.len()..end.min(sequence.tokens.len())];
            inputs.tokens.extend_from_slice(known);
            if let Some(output) = sequence.awaits.filter(|_| known.len() < count) {
                inputs.pending.push(Pending { token: inputs.tokens.len() as u32, output });
                inputs.tokens.push(0);
            }
            let wanted = count > 0 && end == sequence.open();
            awaits.push(wanted.then_some(flight.requests.len() as u32));
            if wanted {
                let draw = if draws { sequence.sampling.draw(end as u64) } else { None };
                inputs.outputs.push(inputs.tokens.len() as u32 - 1);
                inputs.draws.push(draw);
                flight.requests.push(sequence.id);
                flight.drawn.push(draw.is_some());
            }
        }
        if inputs.tokens.is_empty() {
            return Ok(false);
        }
        // A page that a running row shares with what is kept must be copied before it is written; what is kept gives way to that.
        let append = loop {
            let error = match self.batch.prepare_append(&counts) {
                // No step runs a draft head yet.
                Ok(append) => break append.without_companions(),
                Err(error) => error,
            };
            // What gives way may have to be copied to the host, which waits for the step in flight.
            if !matches!(error, kvern_state::Error::Budget { .. }) || !self.make_room() {
                return Err(error.into());
            }
        };
        let plan = append.plan(&inputs.tokens, &inputs.outputs)?;
        match self.executor.run(StepPlan { draws: inputs.draws, pending: inputs.pending, ..plan }) {
            Ok(()) => append.commit(),
            // The step has not happened; the others take it without this row.
            Err(Error::NotFinite { row, group, layer, column }) => {
                drop(append);
                let (id, cached) = (self.running[row].id, self.running[row].cached);
                let finish = Some(Finish::NotFinite { group, layer, column });
                self.events.push(Event { id, token: None, finish, cached });
                let keep: Vec<usize> = (0..self.running.len()).filter(|&other| other != row).collect();
                self.retain(&keep);
                return self.begin_step();
            }
            Err(error) => return Err(error),
        }
        self.flights.push_back(flight);
        let snapshots = self.needs_snapshots();
        for (row, (&count, awaits)) in counts.iter().zip(awaits).enumerate() {
            if count > 0 {
                self.running[row].awaits = awaits;
                let (sequence, len) = (&self.running[row], self.batch.rows()[row].len());
                if sequence.boundaries.contains(&len) || (!snapshots && len == sequence.prompt) {
                    self.keep(row);
                }
            }
        }
        Ok(true)
    }

    /// Takes the tokens of the oldest step in flight, waiting for them.
    fn land(&mut self) -> Result<(), Error> {
        let Some(flight) = self.flights.front() else { return Ok(()) };
        let mut logits = if flight.drawn.contains(&false) { self.executor.logits()? } else { Vec::new() };
        let tokens = if flight.drawn.contains(&true) { self.executor.drawn()? } else { Vec::new() };
        let Some(flight) = self.flights.pop_front() else { return Ok(()) };
        let vocab = self.info().vocab;
        let mut ended = BTreeSet::new();
        for (output, (id, &drawn)) in flight.requests.iter().zip(&flight.drawn).enumerate() {
            // A request that ended meanwhile wants no token.
            let Some(row) = self.running.iter().position(|sequence| sequence.id == *id) else { continue };
            let sequence = &mut self.running[row];
            let token = if drawn {
                Token { id: tokens[output], logprob: None, top: Vec::new() }
            } else {
                let logits = &mut logits[output * vocab..][..vocab];
                sample(&sequence.sampling, logits, &sequence.tokens, sequence.tokens.len() as u64)
            };
            // The step that was begun meanwhile may have taken the token already, and then it awaits the next one.
            if self.batch.rows()[row].len() <= sequence.tokens.len() {
                sequence.awaits = None;
            }
            let event = sequence.advance(token);
            if event.finish.is_some() {
                ended.insert(row);
            }
            self.events.push(event);
        }
        for &row in &ended {
            self.keep(row);
        }
        let keep: Vec<usize> = (0..self.running.len()).filter(|row| !ended.contains(row)).collect();
        self.retain(&keep);
        Ok(())
    }

    /// Requests for zero tokens end before they begin.
    fn end_requests_for_nothing(&mut self) {
        let Self { waiting, events, .. } = self;
        waiting.retain(|sequence| {
            if sequence.limit > sequence.prompt {
                return true;
            }
            events.push(Event { id: sequence.id, token: None, finish: Some(Finish::Length), cached: 0 });
            false
        });
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
            self.executor.run(append.plan(chunk, &outputs)?)?;
            let mut logits = self.executor.logits()?;
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
    /// Tokens that the row may hold by now, the one that it awaits included; a last token is never processed.
    fn open(&self) -> usize {
        (self.tokens.len() + usize::from(self.awaits.is_some())).min(self.limit - 1)
    }

    /// Takes the next token and says what became of the request.
    fn advance(&mut self, token: Token) -> Event {
        // A stop id is no part of the answer, but the row may have processed it.
        self.tokens.push(token.id);
        if self.stops.contains(&token.id) {
            return Event { id: self.id, token: None, finish: Some(Finish::Stop), cached: self.cached };
        }
        let finish = (self.tokens.len() >= self.limit).then_some(Finish::Length);
        Event { id: self.id, token: Some(token), finish, cached: self.cached }
    }
}
