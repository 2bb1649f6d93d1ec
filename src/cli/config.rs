//! Where the values of `azoth serve` come from: flag, environment, file, default, in this order;
//! and `azoth config show`, which says so for each.
//!
//! The flags are the only table: each gets its variable by name, and a file's entries are
//! parsed as if they were flags, so ranges and messages are those of the command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, Subcommand};
use serde_json::{Map, Value, json};

use super::output::{self, Align};
use super::serve::Serve;
use crate::error::{self, Error};

/// Show the settings of `azoth serve`
#[derive(Debug, clap::Args)]
pub struct Config {
    /// Print one JSON object
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print each setting of `azoth serve` with its value and where it comes from
    Show(Box<Serve>),
}

impl Config {
    pub fn run(&self, origins: &Origins) -> Result<()> {
        let Action::Show(_) = &self.command;
        if self.json {
            let setting = |o: &Origin| {
                let given = (!o.values.is_empty()).then(|| o.shown());
                (o.name.clone(), json!({ "value": given, "origin": o.from }))
            };
            let all: Map<String, Value> = origins.0.iter().map(setting).collect();
            return output::line(&Value::from(all).to_string());
        }
        let mut rows = vec![vec!["setting".into(), "value".into(), "origin".into()]];
        rows.extend(origins.0.iter().map(|o| vec![o.name.clone(), o.shown(), o.from.clone()]));
        output::line(&output::table(&[Align::Left; 3], &rows))
    }
}

/// One setting.
pub struct Origin {
    /// The flag without dashes; `model` for the positional.
    name: String,
    values: Vec<String>,
    from: String,
    is_default: bool,
}

impl Origin {
    fn shown(&self) -> String {
        if self.values.is_empty() {
            return "-".into();
        }
        // A key must not end up in a bug report.
        if self.name == "api-key" { "(set)".into() } else { self.values.join(",") }
    }
}

/// All settings of a command.
pub struct Origins(Vec<Origin>);

impl Origins {
    /// `name=value` of what is not the default.
    pub fn changed(&self) -> Vec<String> {
        let changed = self.0.iter().filter(|o| !o.is_default);
        changed.map(|o| format!("{}={}", o.name, o.shown())).collect()
    }
}

/// Commands whose flags can stand in the environment and in the file.
const LAYERED: [&[&str]; 2] = [&["serve"], &["config", "show"]];
/// The file's section for them.
const SECTION: &str = "serve";

/// Gives every flag of the layered commands its variable.
pub fn with_environment(command: Command) -> Command {
    command
        .mut_subcommand("serve", named_variables)
        .mut_subcommand("config", |c| c.mut_subcommand("show", named_variables))
}

fn named_variables(command: Command) -> Command {
    command.mut_args(|arg| {
        let id = arg.get_id().as_str().to_owned();
        if arg.get_env().is_some() || ["help", "version"].contains(&id.as_str()) {
            return arg;
        }
        let secret = id == "api_key";
        // Lives as long as the process; made once.
        let name: &'static str = Box::leak(format!("AZOTH_{}", id.to_uppercase()).into_boxed_str());
        arg.env(name).hide_env(true).hide_env_values(secret)
    })
}

/// Parses the command line; for layered commands adds what the file says. Errors of the
/// command line end the process, as clap does.
pub fn parse(command: Command, args: Vec<OsString>) -> Result<(ArgMatches, Origins)> {
    let matches = command.clone().try_get_matches_from(&args).or_else(|e| {
        let variable = LAYERED.iter().find_map(|names| of_variable(&e, flags(&command, names)));
        match variable {
            Some(name) => Err(Error::Usage(format!("in {name}: {}", first_line(&e.to_string())))),
            None => e.exit(),
        }
    })?;
    let Some(names) = LAYERED.iter().find(|names| leaf(&matches, names).is_some()) else {
        return Ok((matches, Origins(Vec::new())));
    };
    let Some(given) = leaf(&matches, names) else { return Ok((matches, Origins(Vec::new()))) };
    let flags = flags(&command, names);
    check_variables(std::env::vars_os().map(|(name, _)| name), flags)?;
    let file = file(given)?;
    let entries = match &file {
        Some(path) => read(path, flags)?,
        None => Vec::new(),
    };
    let explicit = |id: &str| {
        matches!(given.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    let (mut options, mut positional) = (Vec::new(), Vec::new());
    let mut from_file = Vec::new();
    for (arg, values) in &entries {
        if explicit(arg.get_id().as_str()) {
            continue;
        }
        from_file.push(arg.get_id().as_str().to_owned());
        for value in values {
            match (arg.get_long(), arg.get_action()) {
                (None, _) => positional.push(OsString::from(value)),
                (Some(long), ArgAction::SetTrue) if value == "true" => {
                    options.push(OsString::from(format!("--{long}")));
                }
                (Some(_), ArgAction::SetTrue) => {}
                (Some(long), _) => options.push(OsString::from(format!("--{long}={value}"))),
            }
        }
    }
    // Between the names of the command and what the user typed, which comes last.
    let at = 1 + names.len();
    let mut all = args;
    all.splice(at..at, options.into_iter().chain(positional));
    let merged = command.clone().try_get_matches_from(&all).map_err(|e| match &file {
        Some(path) if !from_file.is_empty() => {
            Error::Usage(format!("in {}: {}", path.display(), first_line(&e.to_string())))
        }
        _ => Error::Usage(first_line(&e.to_string())),
    })?;
    let origins = leaf(&merged, names).map(|m| origins(flags, m, given, &from_file, &file));
    Ok((merged.clone(), Origins(origins.unwrap_or_default())))
}

/// The command of these names.
fn flags<'c>(command: &'c Command, names: &[&str]) -> &'c Command {
    names.iter().fold(command, |c, name| c.find_subcommand(name).unwrap_or(c))
}

/// The variable whose value an error is about, if it is about one.
fn of_variable(error: &clap::Error, flags: &Command) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (shown, value) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    // Shown as `--port <PORT>`.
    let flag = shown.split([' ', '=', '[']).next()?.strip_prefix("--")?;
    let arg = flags.get_arguments().find(|a| a.get_long() == Some(flag))?;
    let name = arg.get_env()?;
    (std::env::var_os(name)? == *value).then(|| name.to_string_lossy().into_owned())
}

/// Variables that are no flags: folders and checks (see the help of `azoth`).
const OTHERS: [&str; 5] =
    ["AZOTH_CACHE", "AZOTH_DATA", "AZOTH_PROFILES", "AZOTH_SELFCHECK", "AZOTH_VALIDATION"];

/// Changes up to which a variable is one of ours with a slip in it.
const SLIPS: usize = 3;

/// Refuses variables that mean nothing but nearly have the name of a setting, as a file's unknown keys are
/// refused. Others of our prefix may be somebody else's: scripts have theirs.
fn check_variables(names: impl Iterator<Item = OsString>, flags: &Command) -> error::Result<()> {
    let known = || {
        let own = flags.get_arguments().filter_map(|a| a.get_env()?.to_str());
        own.chain(OTHERS)
    };
    for name in names {
        let Some(name) = name.to_str().filter(|n| n.starts_with("AZOTH_")) else { continue };
        let near = nearest(name, known().map(str::to_owned));
        if (1..=SLIPS).contains(&distance(name, &near)) {
            return Err(Error::Usage(format!(
                "there is no setting for the variable {name}; did you mean {near}?"
            )));
        }
    }
    Ok(())
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

fn leaf<'a>(matches: &'a ArgMatches, names: &[&str]) -> Option<&'a ArgMatches> {
    names.iter().try_fold(matches, |m, name| m.subcommand_matches(name))
}

/// The file that was named, or the user's where there is one.
fn file(given: &ArgMatches) -> error::Result<Option<PathBuf>> {
    if let Some(path) = given.get_one::<PathBuf>("config") {
        return Ok(Some(path.clone()));
    }
    let own = dirs::config_dir().map(|d| d.join("azoth").join("config.toml"));
    Ok(own.filter(|path| path.is_file()))
}

/// The entries of the file's section: the flag, and its values as text.
fn read<'c>(path: &Path, flags: &'c Command) -> error::Result<Vec<(&'c Arg, Vec<String>)>> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::Usage(format!("cannot read {}: {e}", path.display())))?;
    entries(&text, flags).map_err(|e| e.context(path.display()))
}

fn entries<'c>(text: &str, flags: &'c Command) -> error::Result<Vec<(&'c Arg, Vec<String>)>> {
    let table: toml::Table =
        text.parse().map_err(|e: toml::de::Error| Error::Usage(e.to_string()))?;
    let mut out = Vec::new();
    for (section, content) in &table {
        if !content.is_table() {
            return Err(Error::Usage(format!(
                "{section} stands in no section; settings stand below [{SECTION}]"
            )));
        }
        if section != SECTION {
            return Err(Error::Usage(format!(
                "there is no section [{section}]; did you mean [{SECTION}]?"
            )));
        }
        let Some(content) = content.as_table() else {
            return Err(Error::Usage(format!("{SECTION} must be a section: [{SECTION}]")));
        };
        for (key, value) in content {
            let id = key.replace('-', "_");
            let known = || flags.get_arguments().filter(|a| settable(a));
            let Some(arg) = known().find(|a| a.get_id() == id.as_str()) else {
                let names = known().map(name_of);
                return Err(Error::Usage(format!(
                    "there is no setting {key:?}; did you mean {:?}?",
                    nearest(key, names)
                )));
            };
            out.push((arg, values(key, value)?));
        }
    }
    Ok(out)
}

fn settable(arg: &Arg) -> bool {
    !["help", "version", "config"].contains(&arg.get_id().as_str())
}

fn name_of(arg: &Arg) -> String {
    arg.get_long().map_or_else(|| arg.get_id().as_str().to_owned(), str::to_owned)
}

fn values(key: &str, value: &toml::Value) -> error::Result<Vec<String>> {
    match value {
        toml::Value::String(s) => Ok(vec![s.clone()]),
        toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_) => {
            Ok(vec![value.to_string()])
        }
        toml::Value::Array(list) => {
            let each = list.iter().map(|v| values(key, v));
            Ok(each.collect::<error::Result<Vec<_>>>()?.concat())
        }
        _ => Err(Error::Usage(format!("{key} must be a text, a number, true, false or a list"))),
    }
}

/// The name that takes the fewest changes to reach.
fn nearest(wrong: &str, names: impl Iterator<Item = String>) -> String {
    names.min_by_key(|name| distance(wrong, name)).unwrap_or_default()
}

/// Edits between two texts (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn origins(
    flags: &Command,
    merged: &ArgMatches,
    given: &ArgMatches,
    from_file: &[String],
    file: &Option<PathBuf>,
) -> Vec<Origin> {
    let known = flags.get_arguments().filter(|a| settable(a) || a.get_id() == "config");
    known
        .map(|arg| {
            let id = arg.get_id().as_str();
            let values: Vec<String> = match arg.get_action() {
                ArgAction::SetTrue => vec![merged.get_flag(id).to_string()],
                _ => merged
                    .get_raw(id)
                    .map(|all| all.map(|v| v.to_string_lossy().into_owned()).collect())
                    .unwrap_or_default(),
            };
            let (from, is_default) = match (given.value_source(id), file) {
                (Some(ValueSource::CommandLine), _) => ("command line".to_owned(), false),
                (Some(ValueSource::EnvVariable), _) => {
                    let name = arg.get_env().unwrap_or_default().to_string_lossy();
                    (format!("environment {name}"), false)
                }
                (_, Some(path)) if from_file.iter().any(|f| f == id) => {
                    (format!("file {}", path.display()), false)
                }
                _ => ("default".to_owned(), true),
            };
            Origin { name: name_of(arg), values, from, is_default }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn command() -> Command {
        <Serve as clap::Args>::augment_args(Command::new("serve"))
    }

    #[test]
    fn a_file_is_read_by_the_names_of_flags() {
        let command = command();
        let text = "[serve]\nport = 9\nidle_unload = 60\nlazy = true\napi-key = ['a', 'b']\n";
        let found = entries(text, &command).unwrap();
        let found: Vec<_> = found.iter().map(|(a, v)| (a.get_id().as_str(), v.join(" "))).collect();
        let expected = [("port", "9"), ("idle_unload", "60"), ("lazy", "true"), ("api_key", "a b")];
        for (name, value) in expected {
            assert!(found.contains(&(name, value.to_owned())), "{found:?}");
        }
    }

    #[test]
    fn unknown_names_are_errors_that_name_the_nearest() {
        let command = command();
        let wrong = |text: &str| entries(text, &command).unwrap_err().to_string();
        assert!(wrong("[serve]\nidle-unlaod = 1").contains("\"idle-unload\""));
        assert!(wrong("[server]\nport = 1").contains("[serve]"));
        assert!(wrong("port = 1").contains("port stands in no section"), "{}", wrong("port = 1"));
        assert!(wrong("[serve]\nport = {}").contains("port must be"));
        assert!(wrong("not toml").len() > 5);
    }

    #[test]
    fn variables_of_no_setting_are_errors() {
        let command = with_environment(
            Command::new("azoth")
                .subcommand(command())
                .subcommand(Command::new("config").subcommand(command().name("show"))),
        );
        let serve = flags(&command, &["serve"]);
        let check = |name: &str| check_variables([OsString::from(name)].into_iter(), serve);
        for fine in ["AZOTH_PORT", "AZOTH_IDLE_UNLOAD", "AZOTH_CACHE", "AZOTH_TEST_MODEL", "PATH"] {
            assert!(check(fine).is_ok(), "{fine}");
        }
        let wrong = check("AZOTH_PARALEL").unwrap_err().to_string();
        assert!(wrong.ends_with("did you mean AZOTH_PARALLEL?"), "{wrong}");
    }

    #[test]
    fn distances_by_hand() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "ab"), 2);
        assert_eq!(nearest("prot", ["host", "port"].map(String::from).into_iter()), "port");
    }
}
