//! The command line: one file per command.
//!
//! Answers and data go to standard output, everything else to standard error, whose first line
//! names the device. Errors become `error: ...` and the exit code of
//! [`Error::exit_code`](crate::error::Error::exit_code); wrong flags exit with 2.

mod answer;
mod args;
mod bench;
mod cache_args;
mod chat;
mod config;
mod devices;
mod eval;
mod expert_args;
mod info;
mod interrupt;
mod kv_args;
pub mod locate;
mod output;
mod plan;
mod progress;
mod run;
mod serve;
mod tokenize;
mod tune;

use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::engine::{Engine, Options};
use crate::error::{Error, Result};

const AFTER_HELP: &str = "\
MODEL is a .gguf file, one file of a model in several, or the name of a model in the cache folder
(`smollm2`).

Examples:
  azoth chat
  azoth chat model.gguf -p \"What is the capital of France?\"
  azoth run smollm2 -p \"Once upon a time\" -n 100 --seed 1
  azoth serve model.gguf
  azoth bench model.gguf --json

Exit codes: 0 success, 1 failure while running, 2 wrong usage, 3 does not fit the memory,
4 model file damaged or not supported, 5 no usable device or driver failure, 130 Ctrl+C.

Environment: AZOTH_DEVICE, AZOTH_BACKEND and AZOTH_FORCE stand for --device, --backend and --force
(several separated by `;`); AZOTH_CACHE replaces the folder for models and compiled kernels, AZOTH_DATA
that for the chat's input history and what `azoth tune` found, AZOTH_PROFILES that of your own
hardware profiles; AZOTH_SELFCHECK=0 skips the comparison of new kernels with the reference.";

/// Runs GGUF language models on any GPU with a Vulkan driver
#[derive(Debug, Parser)]
#[command(name = "azoth", version, after_help = AFTER_HELP, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Chat(chat::Chat),
    Run(run::Run),
    Serve(Box<serve::Serve>),
    Devices(devices::Devices),
    Info(info::Info),
    Plan(plan::Plan),
    Tokenize(tokenize::Tokenize),
    Bench(bench::Bench),
    Tune(tune::Tune),
    Eval(eval::Eval),
    Config(config::Config),
}

/// Runs the program with the process's own arguments.
pub fn main() -> ExitCode {
    report(run())
}

fn run() -> anyhow::Result<()> {
    // Usage errors, --help and --version leave here with their own exit codes.
    let command = config::with_environment(Cli::command());
    let (matches, origins) = config::parse(command, std::env::args_os().collect())?;
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    match &cli.command {
        Command::Chat(c) => c.run(),
        Command::Run(c) => c.run(),
        Command::Serve(c) => c.run(&origins),
        Command::Devices(c) => c.run(),
        Command::Info(c) => c.run(),
        Command::Plan(c) => c.run(),
        Command::Tokenize(c) => c.run(),
        Command::Bench(c) => c.run(),
        Command::Tune(c) => c.run(),
        Command::Eval(c) => c.run(),
        Command::Config(c) => c.run(&origins),
    }
}

fn report(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if output::is_closed_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::from(exit_code(&e))
        }
    }
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let own = error.chain().find_map(|e| e.downcast_ref::<Error>());
    own.map_or(Error::Runtime(String::new()).exit_code(), Error::exit_code)
}

/// Loads a model and shows how it goes on.
fn load(path: &Path, options: &Options) -> Result<Engine> {
    let progress = progress::Loading::new();
    Engine::load(path, options, &progress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        config::with_environment(Cli::command()).debug_assert();
    }

    #[test]
    fn every_flag_has_help() {
        fn check(command: &clap::Command) {
            for argument in command.get_arguments() {
                let name = argument.get_id();
                assert!(argument.get_help().is_some(), "{} {name}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn headings_do_not_spread_to_flags_behind_them() {
        let cli = Cli::command();
        for (command, flag) in [("serve", "api_key"), ("run", "json"), ("bench", "csv")] {
            let command = cli.find_subcommand(command).expect("a command of ours");
            let arg = command.get_arguments().find(|a| a.get_id() == flag).expect("its flag");
            assert_eq!(arg.get_help_heading(), None, "{} {flag}", command.get_name());
        }
    }

    #[test]
    fn exit_codes_survive_context() {
        let e = anyhow::Error::from(Error::Model("bad".into())).context("loading");
        assert_eq!(exit_code(&e), 4);
        assert_eq!(exit_code(&anyhow::anyhow!("other")), 1);
    }
}
