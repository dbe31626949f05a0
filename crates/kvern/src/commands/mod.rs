//! The commands, one file each.

mod bench;
mod chat;
mod generate;
mod inspect;
mod logits;
mod perplexity;
mod pull;

use kvern::Error;

use crate::cli::{Cli, Command};

/// Runs the command that was asked for.
pub fn run(cli: &Cli) -> Result<(), Error> {
    match &cli.command {
        Command::Chat(args) => chat::run(args, &cli.run),
        Command::Generate(args) => generate::run(args, &cli.run),
        Command::Bench(args) => bench::run(args, &cli.run),
        Command::Perplexity(args) => perplexity::run(args, &cli.run),
        Command::Logits(args) => logits::run(args, &cli.run),
        Command::Inspect { model } => inspect::run(model, &cli.run),
        Command::Pull { name } => pull::run(name, &cli.run),
    }
}
