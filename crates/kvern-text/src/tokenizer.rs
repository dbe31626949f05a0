//! [`Tokenizer`]: text to token ids and back, with the model's special tokens.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use kvern_weights::Source;
use serde_json::Value;

use crate::{ChatTemplate, Error, gguf};

/// Everything textual about a model.
#[derive(Debug)]
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The chat template, if the model has one.
    pub template: Option<ChatTemplate>,
}

/// Text to token ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    /// Recognizes control tokens written out in text, except while [`Self::encode_plain`] holds it. A second one would cost as much
    /// memory as a small model's layers.
    inner: RwLock<tokenizers::Tokenizer>,
    stops: BTreeSet<u32>,
}

impl Text {
    /// Reads tokenizer and template of a checkpoint.
    ///
    /// # Errors
    /// [`Error`] when the tokenizer is missing, damaged, or of a kind that cannot be rebuilt.
    pub fn load(source: &Source) -> Result<Self, Error> {
        match source {
            Source::Gguf(metadata) => gguf::text(metadata),
            Source::Directory { path, config } => from_directory(path, config),
        }
    }
}

impl Tokenizer {
    pub(crate) fn new(inner: tokenizers::Tokenizer, stops: BTreeSet<u32>) -> Self {
        Self { inner: RwLock::new(inner), stops }
    }

    fn read(&self) -> RwLockReadGuard<'_, tokenizers::Tokenizer> {
        self.inner.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Token ids of a text, with the tokens that the model puts around a text (such as a beginning token) if `wrap`.
    /// Control tokens that are spelled out in the text become those tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the text cannot be represented.
    pub fn encode(&self, text: &str, wrap: bool) -> Result<Vec<u32>, Error> {
        Ok(self.read().encode_fast(text, wrap)?.get_ids().to_vec())
    }

    /// As [`Self::encode`], for text that somebody else wrote: what looks like a control token stays plain text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the text cannot be represented.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut inner = self.inner.write().unwrap_or_else(PoisonError::into_inner);
        inner.set_encode_special_tokens(true);
        let encoding = inner.encode_fast(text, false);
        inner.set_encode_special_tokens(false);
        Ok(encoding?.get_ids().to_vec())
    }

    /// The text of token ids, without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the decoder fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Error> {
        Ok(self.read().decode(ids, true)?)
    }

    /// The ids that end a generation.
    pub fn stops(&self) -> &BTreeSet<u32> {
        &self.stops
    }

    /// The id of a token given in the vocabulary's own spelling.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.read().token_to_id(token)
    }

    /// Number of ids, added tokens included.
    pub fn vocab(&self) -> usize {
        self.read().get_vocab_size(true)
    }
}

fn from_directory(path: &Path, config: &Value) -> Result<Text, Error> {
    let file = path.join("tokenizer.json");
    let wrong = |what: String| Error::File { path: file.clone(), what };
    let bytes = fs::read(&file).map_err(|e| wrong(e.to_string()))?;
    let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| wrong(e.to_string()))?;
    // A file may carry the truncation and padding of somebody's training run.
    inner.with_truncation(None)?.with_padding(None);
    let optional = |name: &str| -> Result<Value, Error> {
        let file = path.join(name);
        match fs::read(&file) {
            Err(_) => Ok(Value::Null),
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| Error::File { path: file, what: e.to_string() }),
        }
    };
    let settings = optional("tokenizer_config.json")?;
    let generation = optional("generation_config.json")?;
    let text_config = &config["text_config"];
    let mut stops = BTreeSet::new();
    for ids in [&generation["eos_token_id"], &config["eos_token_id"], &text_config["eos_token_id"]] {
        let ids = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
        stops.extend(ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok()));
    }
    let special = |name: &str| {
        let value = &settings[name];
        value.as_str().or_else(|| value["content"].as_str()).map(String::from)
    };
    let (bos, eos) = (special("bos_token"), special("eos_token"));
    stops.extend(eos.as_ref().and_then(|eos| inner.token_to_id(eos)));
    let source = fs::read_to_string(path.join("chat_template.jinja")).ok().or_else(|| template_in(&settings));
    let template = source.map(|source| ChatTemplate::new(&source, bos.as_deref(), eos.as_deref())).transpose()?;
    Ok(Text { tokenizer: Tokenizer::new(inner, stops), template })
}

/// `chat_template` is a string, or a list of named ones of which `default` is meant.
fn template_in(settings: &Value) -> Option<String> {
    let template = &settings["chat_template"];
    let named = || template.as_array()?.iter().find(|t| t["name"] == "default")?["template"].as_str();
    template.as_str().or_else(named).map(String::from)
}
