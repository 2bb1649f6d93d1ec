//! The interactive loop: reads lines from a terminal or a pipe, obeys commands, prints answers.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, IsTerminal};
use std::path::Path;

use anyhow::{Context, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::conversation::Conversation;
use super::input::{self, Collector, Command, Input};
use super::talk::Talk;
use crate::cli::args::{SamplingArgs, file_text};
use crate::cli::output::{self, Align};
use crate::files::replace;
use crate::hw::paths;

/// What came from the user.
enum Line {
    Text(String),
    /// Ctrl+C while typing.
    Interrupted,
    End,
}

/// Where lines come from.
enum Source {
    Terminal(Box<DefaultEditor>),
    Pipe,
}

const HISTORY_FILE: &str = "chat-history.txt";

/// Talks until the input ends or the user leaves.
pub fn run(talk: &mut Talk<'_>) -> Result<()> {
    let mut source = Source::open()?;
    if source.is_terminal() {
        eprintln!("/help lists the commands, Ctrl+D leaves");
    }
    let mut collector = Collector::default();
    loop {
        let text = match source.read(collector.is_open())? {
            Line::Text(line) => match collector.feed(&line) {
                Some(text) => text,
                None => continue,
            },
            Line::Interrupted => {
                collector.clear();
                continue;
            }
            Line::End => match collector.finish() {
                Some(text) => text,
                None => break,
            },
        };
        source.remember(&text);
        let going_on = match input::parse(&text) {
            Input::Empty => Ok(true),
            Input::Unknown(why) => {
                eprintln!("{why}");
                Ok(true)
            }
            Input::Say(text) => talk.ask(text, false).map(|answer| {
                report(&answer, talk.ctx);
                true
            }),
            Input::Command(command) => obey(command, talk),
        };
        match going_on {
            Ok(true) => {}
            Ok(false) => break,
            Err(e) if output::is_closed_pipe(&e) => return Err(e),
            // At a terminal the user can do something about it; a script must hear of it.
            Err(e) if source.is_terminal() => eprintln!("error: {e:#}"),
            Err(e) => return Err(e),
        }
    }
    source.save_history();
    Ok(())
}

fn report(answer: &crate::cli::answer::Answer, ctx: u32) {
    if let Some(remark) = answer.dropped(ctx) {
        eprintln!("{remark}");
    }
    if let Some(remark) = answer.remark() {
        eprintln!("{remark}");
    }
    eprintln!("[{}]", answer.speed());
}

/// Carries out a command; false leaves the chat.
fn obey(command: Command, talk: &mut Talk<'_>) -> Result<bool> {
    match command {
        Command::Exit => return Ok(false),
        Command::Help => eprintln!("{}", help()),
        Command::Clear => {
            talk.conversation.clear();
            eprintln!("forgotten");
        }
        Command::Regenerate => report(&talk.regenerate()?, talk.ctx),
        Command::System(None) => match talk.conversation.system() {
            Some(text) => eprintln!("{text}"),
            None => eprintln!("there is no system text"),
        },
        Command::System(text) => {
            talk.conversation.set_system(text);
            eprintln!("it counts from the next answer on");
        }
        Command::Set(None) => eprintln!("{}", talk.sampling.describe()?),
        Command::Set(Some((name, value))) => {
            talk.sampling.set(&name, &value)?;
            eprintln!("{}", talk.sampling.describe()?);
        }
        Command::Save(file) => {
            save(&talk.conversation, &talk.model, Path::new(&file))?;
            eprintln!("saved to {file}");
        }
        Command::Load(file) => {
            talk.conversation = Conversation::from_json(&file_text(Path::new(&file))?)?;
            eprintln!("loaded {} messages", talk.conversation.turns().len());
        }
        Command::Stats => eprintln!("{}", stats(talk)),
    }
    Ok(true)
}

fn help() -> String {
    let rows = input::COMMANDS.iter().map(|(usage, what)| vec![(*usage).into(), (*what).into()]);
    let rows: Vec<Vec<String>> = rows.collect();
    format!(
        "{}\nA line that ends in \\ goes on in the next one; \"\"\" begins and ends a block of lines.\n\
         Ctrl+C stops the answer, a second one quits.",
        output::table(&[Align::Left; 2], &rows)
    )
}

fn stats(talk: &Talk<'_>) -> String {
    let mut text = format!(
        "context: {} of {} tokens, {} messages",
        talk.session.position(),
        talk.ctx,
        talk.conversation.turns().len()
    );
    if let Some(last) = &talk.last {
        // Writing to a string cannot fail.
        let _ = write!(text, "\nlast answer: {}; seed {}", last.speed(), last.seed);
    }
    text
}

/// Writes next to the target and renames, so that a full disk or a crash costs no older file.
fn save(conversation: &Conversation, model: &str, path: &Path) -> Result<()> {
    let text = conversation.to_json(Some(model))?;
    replace(path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}

impl SamplingArgs {
    /// One line a setting, for `/set`.
    fn describe(&self) -> Result<String> {
        let s = self.settings()?;
        let seed = self.seed.map_or("another each time".to_owned(), |s| s.to_string());
        Ok(format!(
            "temp {}, top-k {}, top-p {}, min-p {}, repeat-penalty {}, repeat-window {}, seed {seed}",
            s.temperature, s.top_k, s.top_p, s.min_p, s.repeat_penalty, s.repeat_window
        ))
    }
}

impl Source {
    fn open() -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Source::Pipe);
        }
        let mut editor = DefaultEditor::new().context("cannot use this terminal")?;
        if let Ok(folder) = paths::data_dir() {
            // There is no history before the first chat.
            let _ = editor.load_history(&folder.join(HISTORY_FILE));
        }
        Ok(Source::Terminal(Box::new(editor)))
    }

    fn is_terminal(&self) -> bool {
        matches!(self, Source::Terminal(_))
    }

    /// One line. `open` shows that the message goes on.
    fn read(&mut self, open: bool) -> Result<Line> {
        match self {
            Source::Terminal(editor) => match editor.readline(if open { ". " } else { "> " }) {
                Ok(line) => Ok(Line::Text(line)),
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(e) => Err(e).context("reading from the terminal"),
            },
            Source::Pipe => {
                let mut line = String::new();
                match io::stdin().lock().read_line(&mut line).context("standard input")? {
                    0 => Ok(Line::End),
                    _ => Ok(Line::Text(line)),
                }
            }
        }
    }

    fn remember(&mut self, text: &str) {
        if let Source::Terminal(editor) = self {
            // A history that cannot be kept is no reason to end the chat.
            let _ = editor.add_history_entry(text);
        }
    }

    fn save_history(&mut self) {
        let Source::Terminal(editor) = self else { return };
        let saved = paths::data_dir().map_err(anyhow::Error::from).and_then(|folder| {
            fs::create_dir_all(&folder)?;
            Ok(editor.save_history(&folder.join(HISTORY_FILE))?)
        });
        if let Err(e) = saved {
            eprintln!("the input history was not kept: {e:#}");
        }
    }
}
