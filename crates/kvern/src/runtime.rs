//! [`Runtime`]: one loaded model, ready to answer.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvern_backend::Backend;
use kvern_cpu::{Cpu, CpuOptions};
use kvern_cuda::{Cuda, CudaOptions};
use kvern_engine::{Engine, EngineOptions, Event, Finish, Request, RequestId, Sampling};
use kvern_models::{Info, KvPolicy, LoadOptions, load};
use kvern_state::{Codec, Image, Limits, Preset};
use kvern_text::{Message, Text, TextStream};
use kvern_weights::Checkpoint;

use crate::{Cache, Device, Error};

/// How a model is loaded and run.
#[derive(Clone, Default)]
pub struct Options<'a> {
    /// Where it runs.
    pub device: Device,
    /// Threads; all cores when absent.
    pub threads: Option<usize>,
    /// Instruction set; the best when absent.
    pub isa: Option<String>,
    /// Everything in `f32`: slow, for comparisons.
    pub exact: bool,
    /// How keys and values are stored.
    pub kv: KvPolicy,
    /// A directory of checkpoints, with the most bytes that it may hold: prefixes that earlier runs computed are found there again.
    pub prefixes: Option<(PathBuf, u64)>,
    /// Tokens of a row, if fewer than the model's context.
    pub context: Option<usize>,
    /// Bytes of state; four fifths of the free memory when absent.
    pub state_memory: Option<u64>,
    /// Called with (tensors loaded, tensors in all).
    pub progress: Option<&'a (dyn Fn(usize, usize) + 'a)>,
}

/// Tokens of a page.
const PAGE: usize = 64;

/// What one step may hold: (tokens, tokens with logits). A GPU is filled by more tokens than a processor.
fn step(device: Device) -> (usize, usize) {
    match device {
        Device::Cpu => (256, 128),
        Device::Cuda(_) => (4096, 256),
    }
}

/// Codecs of keys and values: a [`Preset`]'s, one codec's for both, or `KEYS/VALUES`.
///
/// # Errors
/// [`Error::Preset`] for a name that is none.
pub fn kv_preset(name: &str) -> Result<(Codec, Codec), Error> {
    let known = || ["f32", "f16", "bf16"].into_iter().chain(Preset::ALL.map(|preset| preset.name)).collect();
    Preset::codecs(name).ok_or_else(|| Error::Preset { asked: name.into(), known: known() })
}

/// Tokens to continue.
#[derive(Debug, Clone, Default)]
pub struct Prompt {
    /// Their ids.
    pub tokens: Vec<u32>,
    /// Lengths at which other prompts may part from this one.
    pub boundaries: Vec<usize>,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self { tokens, boundaries: Vec::new() }
    }
}

/// A loaded model with its tokenizer.
pub struct Runtime {
    /// The engine.
    pub engine: Engine,
    /// Tokenizer and chat template.
    pub text: Text,
    /// How long loading took.
    pub load_time: Duration,
}

/// A finished generation.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The text, without stop strings.
    pub text: String,
    /// The generated ids.
    pub tokens: Vec<u32>,
    /// Log-probability of each token, if asked for.
    pub logprobs: Vec<Option<f32>>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose state was there already and was not computed again.
    pub cached_tokens: usize,
    /// Why it ended.
    pub finish: Finish,
    /// Time to the first token.
    pub prefill: Duration,
    /// Time from the first token to the last.
    pub decode: Duration,
}

impl Runtime {
    /// Loads the model `name`: a path, or a built-in name that is fetched on first use.
    ///
    /// # Errors
    /// [`Error`], for everything from a missing file to a lack of memory.
    pub fn load(name: &str, options: &Options<'_>) -> Result<Self, Error> {
        Self::open(&Cache::from_env().resolve(name, |_| ())?, options)
    }

    /// Loads the model at `path`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn open(path: &Path, options: &Options<'_>) -> Result<Self, Error> {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(path)?;
        // Before the weights, which then reuse the memory that building a tokenizer frees.
        let text = Text::load(checkpoint.source())?;
        let engine = match options.device {
            Device::Cpu => {
                let (threads, isa) = (options.threads, options.isa.clone());
                Self::engine(Cpu::new(&CpuOptions { threads, isa, exact: options.exact })?, checkpoint, options)?
            }
            Device::Cuda(device) => {
                let cuda = Cuda::new(&CudaOptions { device, exact: options.exact, ..CudaOptions::default() })?;
                Self::engine(cuda, checkpoint, options)?
            }
        };
        Ok(Self { engine, text, load_time: start.elapsed() })
    }

    /// Loads a checkpoint's graph on a backend.
    fn engine<B: Backend>(backend: B, checkpoint: Checkpoint, options: &Options<'_>) -> Result<Engine, Error> {
        let progress = options.progress.map(|progress| {
            move |done, total| {
                progress(done, total);
                ControlFlow::Continue(())
            }
        });
        let exact = options.exact.then_some((Codec::F32, Codec::F32));
        let (max_tokens, max_outputs) = step(options.device);
        let load_options = LoadOptions {
            kv: KvPolicy { codecs: options.kv.codecs.or(exact), ..options.kv },
            max_tokens,
            max_outputs,
            page: PAGE,
            draft: false,
            progress: progress.as_ref().map(|progress| progress as &dyn Fn(usize, usize) -> ControlFlow<()>),
        };
        let model = load(&backend, checkpoint, &load_options)?;
        let defaults = EngineOptions::default();
        let (directory, disk) = options.prefixes.clone().unzip();
        let engine_options = EngineOptions {
            max_rows: max_outputs,
            max_tokens,
            state_memory: options.state_memory,
            context: options.context,
            prefixes: Limits { directory, disk: disk.unwrap_or(0), ..defaults.prefixes },
            ..defaults
        };
        Ok(Engine::new(backend, model, engine_options)?)
    }

    /// What is known of the model.
    pub fn info(&self) -> &Info {
        self.engine.info()
    }

    /// Token ids of a plain text.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.text.tokenizer.encode(text, true)?)
    }

    /// A conversation, up to the beginning of the assistant's next turn. Where a model's rows can be resumed at boundaries alone, others are expected to
    /// part from it at the end of its system message and before its last one.
    ///
    /// # Errors
    /// [`kvern_text::Error::NoTemplate`] or the template's own.
    pub fn chat_prompt(&self, messages: &[Message]) -> Result<Prompt, Error> {
        let template = self.text.template.as_ref().ok_or(kvern_text::Error::NoTemplate)?;
        // The template writes the tokens around a text itself.
        let encode = |messages: &[Message], open: bool| -> Result<Vec<u32>, Error> {
            Ok(self.text.tokenizer.encode(&template.render(messages, open)?, false)?)
        };
        let tokens = encode(messages, true)?;
        if !self.engine.needs_snapshots() {
            return Ok(tokens.into());
        }
        let system = messages.iter().take_while(|message| message.role == "system").count();
        let ends =
            [system, messages.len().saturating_sub(1)].into_iter().filter(|&end| end > 0 && end < messages.len());
        // A template that cannot render a part of a conversation has no boundaries to tell.
        let boundary = |end: usize| {
            let part = encode(&messages[..end], false).ok()?;
            Some(part.iter().zip(&tokens).take_while(|(a, b)| a == b).count())
        };
        let boundaries = ends.filter_map(boundary).collect();
        Ok(Prompt { tokens, boundaries })
    }

    /// Generates from `prompt` until a stop id of the model, one of `stop_strings`, or `max_tokens`; `piece` sees the text as it comes.
    ///
    /// # Errors
    /// The engine's, or the tokenizer's.
    pub fn generate(
        &mut self,
        prompt: &Prompt,
        max_tokens: usize,
        sampling: &Sampling,
        stop_strings: &[String],
        mut piece: impl FnMut(&str),
    ) -> Result<Generation, Error> {
        let request = Request {
            sampling: sampling.clone(),
            stops: self.text.tokenizer.stops().clone(),
            boundaries: prompt.boundaries.clone(),
            ..Request::new(prompt.tokens.clone(), max_tokens)
        };
        let id = self.engine.submit(request)?;
        let outcome = self.follow(id, prompt.tokens.len(), stop_strings, &mut piece);
        if outcome.is_err() {
            // Nothing of a failed request stays behind.
            self.engine.cancel(id);
        }
        outcome
    }

    /// Writes a checkpoint of `tokens`, with the state after as many of them as have been computed; gives that number and the file's bytes.
    ///
    /// # Errors
    /// [`kvern_engine::Error::NoState`] when none of them has, or the system's.
    pub fn save(&mut self, tokens: &[u32], path: &Path) -> Result<(usize, u64), Error> {
        let image = self.engine.image(tokens, "")?;
        let bytes = image.save(path).map_err(kvern_engine::Error::from)?;
        Ok((image.tokens().len(), bytes))
    }

    /// Writes what is kept of prompts to the directory of prefixes, if there is one, and waits for it.
    ///
    /// # Errors
    /// The system's, for the first file that could not be written.
    pub fn flush(&mut self) -> Result<(), Error> {
        Ok(self.engine.flush()?)
    }

    /// Restores a checkpoint, so that prompts that begin with its tokens go on from there; gives all its tokens.
    ///
    /// # Errors
    /// A file that is damaged, or of another model, codec or page size.
    pub fn resume(&mut self, path: &Path) -> Result<Vec<u32>, Error> {
        let image = Image::load(path).map_err(kvern_engine::Error::from)?;
        self.engine.restore(&image)?;
        Ok([image.tokens(), &image.manifest().pending].concat())
    }

    /// Steps the engine until the request `id` ends.
    fn follow(
        &mut self,
        id: RequestId,
        prompt_tokens: usize,
        stop_strings: &[String],
        piece: &mut dyn FnMut(&str),
    ) -> Result<Generation, Error> {
        let start = Instant::now();
        let mut stream = TextStream::new(stop_strings.to_vec());
        let mut out = Generation {
            text: String::new(),
            tokens: Vec::new(),
            logprobs: Vec::new(),
            prompt_tokens,
            cached_tokens: 0,
            finish: Finish::Length,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
        };
        let mut emit = |text: &mut String, new: String| {
            if !new.is_empty() {
                piece(&new);
                text.push_str(&new);
            }
        };
        while !self.engine.is_idle() {
            for Event { token, finish, cached, .. } in self.engine.step()?.into_iter().filter(|event| event.id == id) {
                out.cached_tokens = cached;
                if out.prefill.is_zero() {
                    out.prefill = start.elapsed();
                }
                if let Some(token) = token {
                    emit(&mut out.text, stream.push(&self.text.tokenizer, token.id)?);
                    out.tokens.push(token.id);
                    out.logprobs.push(token.logprob);
                }
                if let Some(Finish::NotFinite { group, layer, column }) = finish {
                    return Err(kvern_engine::Error::NotFinite { row: 0, group, layer, column }.into());
                }
                out.finish = finish.unwrap_or(out.finish);
            }
            if stream.stopped() {
                out.finish = Finish::Stop;
                self.engine.cancel(id);
            }
        }
        emit(&mut out.text, stream.finish());
        out.decode = start.elapsed().saturating_sub(out.prefill);
        Ok(out)
    }
}
