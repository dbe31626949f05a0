//! What commands print: results on standard output, everything else on standard error.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvern::{Cache, Error, Options, Runtime};
use serde_json::Value;

use crate::cli::RunArgs;

/// Writes text to standard output at once.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|source| Error::Io {
        action: "write",
        path: "standard output".into(),
        source,
        hint: "",
    })
}

/// Prints a result as one JSON object.
pub fn print_json(value: &Value) -> Result<(), Error> {
    print(&format!("{value:#}\n"))
}

/// A bar on standard error, if that is a terminal.
pub fn bar(total: u64, what: &'static str) -> ProgressBar {
    let target = if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), target).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len}") {
        bar.set_style(style);
    }
    bar
}

/// Shows that something is going on while `run` does it.
pub fn busy<T>(what: String, run: impl FnOnce() -> T) -> T {
    let terminal = io::stderr().is_terminal();
    if !terminal {
        eprintln!("{what}");
    }
    let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let spinner = ProgressBar::with_draw_target(None, target).with_message(what);
    spinner.enable_steady_tick(Duration::from_millis(100));
    let out = run();
    spinner.finish_and_clear();
    out
}

/// Loads a model, showing what happens.
pub fn load(name: &str, options: &Options<'_>) -> Result<Runtime, Error> {
    let cache = Cache::from_env();
    let mut spinner = None;
    let path = cache.resolve(name, |model| {
        let what = format!("fetching {} ({})", model.name, model.description);
        if io::stderr().is_terminal() {
            let bar = ProgressBar::new_spinner().with_message(what);
            bar.enable_steady_tick(Duration::from_millis(100));
            spinner = Some(bar);
        } else {
            eprintln!("{what}");
        }
    });
    if let Some(spinner) = spinner {
        spinner.finish_and_clear();
    }
    let bar = bar(1, "loading");
    let progress = |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let runtime = Runtime::open(&path?, &Options { progress: Some(&progress), ..options.clone() });
    bar.finish_and_clear();
    runtime
}

/// Loads the model a command names with the options that all commands share.
pub fn load_for(name: &str, args: &RunArgs) -> Result<Runtime, Error> {
    load(name, &args.options())
}
