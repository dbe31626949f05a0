//! The command line: every flag stands here once, with its help, its environment variable and its default.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use kvern::{Codec, Device, KvPolicy, Options, Sampling, kv_preset};

/// Runs language models on this machine.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
    #[command(flatten)]
    pub run: RunArgs,
}

/// How models run, for every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Every command")]
pub struct RunArgs {
    /// Where to run: cpu, cuda or cuda:N
    #[arg(long, global = true, env = "KVERN_DEVICE", default_value = "cpu", value_name = "DEVICE")]
    device: Device,
    /// Threads [default: all cores]
    #[arg(long, global = true, env = "KVERN_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Instruction set: scalar, avx2, avx512 or amx [default: the best one here]
    #[arg(long, global = true, env = "KVERN_ISA", value_name = "ISA")]
    isa: Option<String>,
    /// How keys and values are stored: f32, f16, bf16, k8v8, q8, k8v4, k8v3, q4, k5v4, k4v4, k4v3, k4v2, or KEYS/VALUES [default: the model's own type]
    #[arg(long, global = true, env = "KVERN_KV", value_name = "PRESET", value_parser = kv_preset)]
    pub kv: Option<(Codec, Codec)>,
    /// Store the state of the first and the last N layers in another way, as N:PRESET
    #[arg(long, global = true, env = "KVERN_KV_EDGE_LAYERS", value_name = "N:PRESET", value_parser = edges)]
    kv_edge_layers: Option<(usize, (Codec, Codec))>,
    /// Store a row's first tokens in the model's own type, and all of them as --kv says once there are more than N
    #[arg(long, global = true, env = "KVERN_KV_START", value_name = "N", requires = "kv", value_parser = clap::value_parser!(u32).range(1..))]
    kv_start: Option<u32>,
    /// Keep the state of prompts in this directory, and find there what earlier runs computed
    #[arg(long, global = true, env = "KVERN_PREFIX_DIR", value_name = "DIR")]
    prefix_dir: Option<PathBuf>,
    /// The most that the directory may hold, in MiB
    #[arg(long, global = true, env = "KVERN_PREFIX_DISK", value_name = "MIB", default_value_t = 4096)]
    prefix_disk: u64,
    /// Longest row in tokens [default: the model's context]
    #[arg(long, short = 'c', global = true, env = "KVERN_CTX", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
    /// Memory for state, in MiB [default: four fifths of what is free]
    #[arg(long, global = true, env = "KVERN_STATE_MEMORY", value_name = "MIB")]
    state_memory: Option<u64>,
    /// Decode weights to f32 and compute in f32: slow, for comparisons
    #[arg(long, global = true)]
    exact: bool,
    /// Print one JSON object on standard output
    #[arg(long, global = true)]
    pub json: bool,
}

fn edges(text: &str) -> Result<(usize, (Codec, Codec)), String> {
    let (count, preset) = text.split_once(':').ok_or("expected N:PRESET")?;
    let count = count.parse().map_err(|_| "the number of layers is not a number")?;
    Ok((count, kv_preset(preset).map_err(|error| error.to_string())?))
}

impl RunArgs {
    /// The library's options.
    pub fn options(&self) -> Options<'static> {
        Options {
            device: self.device,
            threads: self.threads.map(|threads| threads as usize),
            isa: self.isa.clone(),
            exact: self.exact,
            kv: KvPolicy {
                codecs: self.kv,
                edges: self.kv_edge_layers,
                start: self.kv_start.map(|tokens| tokens as usize),
            },
            prefixes: self.prefix_dir.clone().map(|path| (path, self.prefix_disk.saturating_mul(1 << 20))),
            context: self.ctx.map(|tokens| tokens as usize),
            state_memory: self.state_memory.map(|mib| mib.saturating_mul(1 << 20)),
            progress: None,
        }
    }
}

/// Which model.
#[derive(Debug, Args)]
pub struct ModelArg {
    /// A .gguf file, a directory in Hugging Face layout, or a built-in name
    #[arg(long, short, env = "KVERN_MODEL", default_value = "smollm2")]
    pub model: String,
}

/// How tokens are drawn.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// 0 always takes the most probable token
    #[arg(long, short = 't', default_value_t = 0.0)]
    temperature: f32,
    /// Keep the K most probable tokens (0: all)
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: usize,
    /// Keep the most probable tokens whose mass reaches P
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    top_p: f32,
    /// Drop tokens less probable than this share of the most probable one
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    min_p: f32,
    /// Divide the logits of tokens already seen
    #[arg(long, default_value_t = 1.0, value_name = "X")]
    repetition_penalty: f32,
    /// Subtract from the logits of tokens already seen, once
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_hyphen_values = true)]
    presence_penalty: f32,
    /// Subtract from the logits of tokens already seen, for each occurrence
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_hyphen_values = true)]
    frequency_penalty: f32,
    /// How many of the last tokens count as seen (0: all)
    #[arg(long, default_value_t = 0, value_name = "N")]
    penalty_window: usize,
    /// Add to a token's logit, as ID=BIAS; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = logit_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
    /// End before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text.split_once('=').ok_or("expected ID=BIAS")?;
    Ok((id.parse().map_err(|_| "the id is not a number")?, bias.parse().map_err(|_| "the bias is not a number")?))
}

impl SamplingArgs {
    /// The library's parameters, with `logprobs` as a command wants them.
    pub fn sampling(&self, logprobs: Option<usize>) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            penalty_window: self.penalty_window,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed,
            logprobs,
        }
    }
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer a question, or talk
    Chat(ChatArgs),
    /// Complete a text
    Generate(GenerateArgs),
    /// Measure speed against this machine's limits
    Bench(BenchArgs),
    /// Measure perplexity, and the divergence from another model or state
    Perplexity(PerplexityArgs),
    /// Write the logits of a token list to a file
    Logits(LogitsArgs),
    /// Show what a model is and what fits, or what a checkpoint holds
    Inspect {
        /// A .gguf file, a directory, a built-in name, or a checkpoint of state
        model: String,
    },
    /// Fetch a built-in model into the cache
    Pull {
        /// Its name
        name: String,
    },
}

#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The question; without one, a conversation begins
    pub prompt: Option<String>,
    #[command(flatten)]
    pub model: ModelArg,
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// The most tokens of an answer
    #[arg(long, short = 'n', default_value_t = 1024, value_name = "N")]
    pub max_tokens: usize,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArg,
    /// The text to continue
    #[arg(long, short, value_name = "TEXT", required_unless_present = "resume")]
    pub prompt: Option<String>,
    /// Go on from a checkpoint; the prompt, if any, follows on its text
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Write a checkpoint at the end
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// The most tokens to generate
    #[arg(long, short = 'n', default_value_t = 128, value_name = "N")]
    pub max_tokens: usize,
    /// Report each token's log-probability
    #[arg(long)]
    pub logprobs: bool,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArg,
    /// Prompt lengths
    #[arg(long, default_value = "512", value_delimiter = ',', value_name = "N,…")]
    pub prompt: Vec<usize>,
    /// Tokens to generate in each row
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub generate: usize,
    /// Rows that decode together
    #[arg(long, default_value = "1,8,32", value_delimiter = ',', value_name = "N,…")]
    pub batch: Vec<usize>,
    /// Tokens already in each row
    #[arg(long, default_value = "0,4096", value_delimiter = ',', value_name = "N,…")]
    pub depth: Vec<usize>,
    /// Repetitions; the best one counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub repeat: usize,
}

#[derive(Debug, Args)]
pub struct PerplexityArgs {
    #[command(flatten)]
    pub model: ModelArg,
    /// A text file
    #[arg(long, short, value_name = "FILE")]
    pub file: PathBuf,
    /// Compare with this model's probabilities; with --kv alone, with the same model's in f32 state
    #[arg(long, value_name = "MODEL")]
    pub against: Option<String>,
    /// Compute the other side of the comparison in f32
    #[arg(long)]
    pub against_exact: bool,
    /// Tokens of each independent chunk of the text
    #[arg(long, default_value_t = 512, value_name = "TOKENS")]
    pub chunk: usize,
    /// The most tokens to read
    #[arg(long, value_name = "TOKENS")]
    pub limit: Option<usize>,
}

#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub model: ModelArg,
    /// A JSON array of token ids
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,
    /// A safetensors file to write, with `logits` of [tokens, vocabulary] in f32
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
}
