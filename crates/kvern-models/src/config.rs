//! Configuration fields, from `config.json` or from GGUF metadata.
//!
//! Both sources are read through [`Fields`], which names the field in every error.

use kvern_state::StateSpec;
use kvern_weights::Source;
use serde_json::Value;

use crate::{Error, Info, Weights};

/// The `model_type` of a checkpoint.
pub(crate) fn model_type(source: &Source) -> Result<String, Error> {
    let (field, found) = match source {
        Source::Gguf(metadata) => ("general.architecture", metadata.str("general.architecture")?.map(String::from)),
        Source::Directory { config, .. } => ("model_type", config["model_type"].as_str().map(String::from)),
    };
    found.ok_or_else(|| Error::Config { field: field.into(), expected: "the model's name", found: "nothing".into() })
}

/// Checks that heads, or experts, can be shared out evenly.
pub(crate) fn check_multiple(field: &str, count: usize, expected: &'static str, of: usize) -> Result<(), Error> {
    if count.is_multiple_of(of) {
        return Ok(());
    }
    Err(Error::Config { field: field.into(), expected, found: format!("{count}, with {of} of those") })
}

/// What every decoder's configuration says.
#[derive(Debug, Clone)]
pub(crate) struct Outline {
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) vocab: usize,
    pub(crate) context: usize,
    pub(crate) eps: f32,
    /// Whether the embedding is also the head, if the configuration says.
    pub(crate) tied: Option<bool>,
}

impl Outline {
    /// Reads the fields; `context` where the configuration has none.
    pub(crate) fn new(fields: Fields<'_>, context: usize) -> Result<Self, Error> {
        Ok(Self {
            hidden: fields.needed("hidden_size")?,
            layers: fields.needed("num_hidden_layers")?,
            heads: fields.needed("num_attention_heads")?,
            vocab: fields.needed("vocab_size")?,
            context: fields.count("max_position_embeddings")?.unwrap_or(context),
            eps: fields.float("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            tied: fields.flag("tie_word_embeddings")?,
        })
    }

    /// Heads of keys and values: a divisor of the query heads.
    pub(crate) fn kv_heads(&self, fields: Fields<'_>) -> Result<usize, Error> {
        let kv_heads = fields.count("num_key_value_heads")?.unwrap_or(self.heads);
        check_multiple("num_attention_heads", self.heads, "a multiple of num_key_value_heads", kv_heads)?;
        Ok(kv_heads)
    }

    /// What is known of the model once it is loaded.
    pub(crate) fn info(&self, architecture: &str, spec: StateSpec, fingerprint: String, weights: Weights) -> Info {
        Info {
            architecture: architecture.into(),
            layers: self.layers,
            hidden: self.hidden,
            heads: self.heads,
            vocab: self.vocab,
            context: self.context,
            spec,
            fingerprint,
            weights,
        }
    }
}

/// A JSON object whose fields are wanted by name and type.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    object: &'a Value,
    /// Prefix of names in errors.
    path: &'a str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Value, path: &'a str) -> Self {
        Self { object, path }
    }

    /// The error of a field that should be something else.
    pub(crate) fn wrong(&self, field: &str, expected: &'static str) -> Error {
        let found = self.object.get(field).map_or("nothing".into(), Value::to_string);
        Error::Config { field: format!("{}{field}", self.path), expected, found }
    }

    /// A field that is absent or null is `None`.
    fn get<T>(
        &self,
        field: &str,
        expected: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        match self.object.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(field, expected)),
        }
    }

    pub(crate) fn object(&self, field: &'a str, path: &'a str) -> Result<Option<Fields<'a>>, Error> {
        self.get(field, "an object", |value| value.is_object().then(|| Fields::new(value, path)))
    }

    pub(crate) fn count(&self, field: &str) -> Result<Option<usize>, Error> {
        let read =
            |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=1 << 32).contains(n));
        self.get(field, "a positive integer", read)
    }

    /// A count that may be zero.
    pub(crate) fn index(&self, field: &str) -> Result<Option<usize>, Error> {
        let read = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n <= 1 << 32);
        self.get(field, "an integer that is not negative", read)
    }

    pub(crate) fn needed(&self, field: &str) -> Result<usize, Error> {
        self.count(field)?.ok_or_else(|| self.wrong(field, "a positive integer"))
    }

    pub(crate) fn float(&self, field: &str) -> Result<Option<f64>, Error> {
        self.get(field, "a finite number", |value| value.as_f64().filter(|x| x.is_finite()))
    }

    pub(crate) fn needed_float(&self, field: &str) -> Result<f64, Error> {
        self.float(field)?.ok_or_else(|| self.wrong(field, "a finite number"))
    }

    /// A number above zero.
    pub(crate) fn positive(&self, field: &str) -> Result<Option<f64>, Error> {
        self.get(field, "a positive number", |value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0))
    }

    /// Checks that a field, if it is there, has the only value that the graph knows.
    pub(crate) fn only(&self, field: &str, expected: &'static str) -> Result<(), Error> {
        match self.object.get(field) {
            None | Some(Value::Null) => Ok(()),
            Some(Value::String(found)) if found == expected => Ok(()),
            Some(_) => Err(self.wrong(field, expected)),
        }
    }

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, Error> {
        self.get(field, "true or false", Value::as_bool)
    }

    /// A list of integers that are not negative.
    pub(crate) fn indices(&self, field: &str) -> Result<Option<Vec<usize>>, Error> {
        let index = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.get(field, "a list of indices", |value| value.as_array()?.iter().map(index).collect())
    }

    /// A list of strings.
    pub(crate) fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>, Error> {
        self.get(field, "a list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Whether each of `layers` layers is of the first of two kinds, as `layer_types` says; absent without that field.
    pub(crate) fn layer_types(
        &self,
        layers: usize,
        kinds: [&str; 2],
        expected: &'static str,
    ) -> Result<Option<Vec<bool>>, Error> {
        self.kinds("layer_types", layers, kinds, expected)
    }

    /// The same of another field with a kind for each layer.
    pub(crate) fn kinds(
        &self,
        field: &str,
        layers: usize,
        [first, second]: [&str; 2],
        expected: &'static str,
    ) -> Result<Option<Vec<bool>>, Error> {
        let Some(kinds) = self.texts(field)? else { return Ok(None) };
        let wrong = |expected, found| Error::Config { field: format!("{}{field}", self.path), expected, found };
        if kinds.len() != layers {
            return Err(wrong("a kind for each layer", format!("{} kinds", kinds.len())));
        }
        let is_first = |kind: &&str| match *kind {
            kind if kind == first => Ok(true),
            kind if kind == second => Ok(false),
            other => Err(wrong(expected, other.into())),
        };
        kinds.iter().map(is_first).collect::<Result<_, _>>().map(Some)
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, Error> {
        self.get(field, "a string", Value::as_str)
    }
}
