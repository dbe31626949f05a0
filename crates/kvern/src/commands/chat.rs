//! `kvern chat`: one answer, or a conversation.

use std::io::{self, BufRead, IsTerminal};

use kvern::{Error, Generation, Message, Runtime};

use super::generate::report;
use crate::cli::{ChatArgs, RunArgs};
use crate::output::{load_for, print, print_json};

pub fn run(args: &ChatArgs, run: &RunArgs) -> Result<(), Error> {
    let mut runtime = load_for(&args.model.model, run)?;
    let mut messages: Vec<Message> = args.system.iter().map(|text| Message::new("system", text)).collect();
    if let Some(prompt) = &args.prompt {
        messages.push(Message::new("user", prompt));
        let answer = answer(&mut runtime, &messages, args, !run.json)?;
        return if run.json { print_json(&report(&answer, &runtime)) } else { print("\n") };
    }
    if io::stdin().is_terminal() {
        eprintln!("{}; end with Ctrl-D", runtime.info().architecture);
    }
    let mut lines = io::stdin().lock().lines();
    loop {
        if io::stdin().is_terminal() {
            print("> ")?;
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line =
            line.map_err(|source| Error::Io { action: "read", path: "standard input".into(), source, hint: "" })?;
        if line.trim().is_empty() {
            continue;
        }
        messages.push(Message::new("user", line));
        let answer = answer(&mut runtime, &messages, args, !run.json)?;
        if run.json {
            print_json(&report(&answer, &runtime))?
        } else {
            print("\n")?
        }
        messages.push(Message::new("assistant", answer.text));
    }
}

fn answer(runtime: &mut Runtime, messages: &[Message], args: &ChatArgs, show: bool) -> Result<Generation, Error> {
    let prompt = runtime.chat_prompt(messages)?;
    let mut written = Ok(());
    let answer =
        runtime.generate(&prompt, args.max_tokens, &args.sampling.sampling(None), &args.sampling.stop, |piece| {
            if show && written.is_ok() {
                written = print(piece);
            }
        })?;
    runtime.flush()?;
    written.map(|()| answer)
}
