//! Chat templates: messages to the text that a model was trained to continue.
//!
//! Templates are Jinja as Hugging Face runs it: blocks are trimmed, Python's string methods exist, and `raise_exception`,
//! `strftime_now`, `tojson` are provided.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error as Jinja, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};

use crate::Error;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

const NAME: &str = "chat";

/// Instructions after which a template counts as endless: some seconds' worth. Templates come with models, from anywhere.
const FUEL: u64 = 50_000_000;

impl ChatTemplate {
    /// Compiles a template; `bos` and `eos` are the spellings that it may use.
    ///
    /// # Errors
    /// [`Error::Template`] when the template is not valid.
    pub fn new(source: &str, bos: Option<&str>, eos: Option<&str>) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(template_error)?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, source.to_string()).map_err(template_error)?;
        Ok(Self { environment, bos: bos.unwrap_or_default().into(), eos: eos.unwrap_or_default().into() })
    }

    /// Renders a conversation, followed by the beginning of the assistant's turn if `generate`.
    ///
    /// # Errors
    /// [`Error::Template`] when the template fails or refuses the messages.
    pub fn render(&self, messages: &[Message], generate: bool) -> Result<String, Error> {
        let template = self.environment.get_template(NAME).map_err(template_error)?;
        let context = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => generate,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        template.render(context).map_err(template_error)
    }
}

fn template_error(error: Jinja) -> Error {
    match error.kind() {
        ErrorKind::InvalidOperation => Error::Template(error.detail().unwrap_or("failed").to_string()),
        _ => Error::Template(error.to_string()),
    }
}

fn raise_exception(message: String) -> Result<String, Jinja> {
    Err(Jinja::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> Result<String, Jinja> {
    jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
        .map_err(|e| Jinja::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}")))
}

/// `json.dumps` as Hugging Face calls it: nothing is escaped for HTML; `indent` asks for lines.
fn to_json(value: &Value, options: minijinja::value::Kwargs) -> Result<Value, Jinja> {
    let wrong = |e: serde_json::Error| Jinja::new(ErrorKind::BadSerialization, e.to_string());
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    match indent {
        Some(indent) => {
            let spaces = " ".repeat(indent);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, formatter)).map_err(wrong)?;
        }
        None => {
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)).map_err(wrong)?;
        }
    }
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out).into_owned()))
}

/// Python's default separators: `", "` and `": "`.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
