//! Configuration fields, from `config.json` or from GGUF metadata.
//!
//! Both sources are read through [`Fields`], which names the field in every error.

use kvern_weights::Source;
use serde_json::Value;

use crate::Error;

/// The `model_type` of a checkpoint.
pub(crate) fn model_type(source: &Source) -> Result<String, Error> {
    let (field, found) = match source {
        Source::Gguf(metadata) => ("general.architecture", metadata.str("general.architecture")?.map(String::from)),
        Source::Directory { config, .. } => ("model_type", config["model_type"].as_str().map(String::from)),
    };
    found.ok_or_else(|| Error::Config { field: field.into(), expected: "the model's name", found: "nothing".into() })
}

/// Checks that heads can be shared out evenly.
pub(crate) fn check_multiple(field: &str, heads: usize, expected: &'static str, of: usize) -> Result<(), Error> {
    let found = format!("{heads} heads for {of} key/value heads");
    if heads.is_multiple_of(of) { Ok(()) } else { Err(Error::Config { field: field.into(), expected, found }) }
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

    fn wrong(&self, field: &str, expected: &'static str) -> Error {
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

    pub(crate) fn flag(&self, field: &str) -> Result<Option<bool>, Error> {
        self.get(field, "true or false", Value::as_bool)
    }

    /// A list of strings.
    pub(crate) fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>, Error> {
        self.get(field, "a list of strings", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// Whether each of `layers` layers is of the first of two kinds, as `layer_types` says; absent without that field.
    pub(crate) fn layer_types(
        &self,
        layers: usize,
        [first, second]: [&str; 2],
        expected: &'static str,
    ) -> Result<Option<Vec<bool>>, Error> {
        let Some(kinds) = self.texts("layer_types")? else { return Ok(None) };
        if kinds.len() != layers {
            let found = format!("{} kinds", kinds.len());
            return Err(Error::Config { field: "layer_types".into(), expected: "a kind for each layer", found });
        }
        let is_first = |kind: &&str| match *kind {
            kind if kind == first => Ok(true),
            kind if kind == second => Ok(false),
            other => Err(Error::Config { field: "layer_types".into(), expected, found: other.into() }),
        };
        kinds.iter().map(is_first).collect::<Result<_, _>>().map(Some)
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, Error> {
        self.get(field, "a string", Value::as_str)
    }
}
