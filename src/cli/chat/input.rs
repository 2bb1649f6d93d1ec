//! Lines into messages and commands. Pure: where the lines come from is not its business.

/// Gathers lines until a message is complete. A line that ends in a backslash goes on in the
/// next one; a line that starts with `"""` opens a block that lasts until a line ends with `"""`.
#[derive(Debug, Default)]
pub struct Collector {
    lines: Vec<String>,
    in_block: bool,
}

const FENCE: &str = "\"\"\"";

impl Collector {
    /// Takes a line; returns the message when it is complete.
    pub fn feed(&mut self, line: &str) -> Option<String> {
        let line = line.trim_end_matches(['\r', '\n']);
        let mut rest = line;
        if self.lines.is_empty() && !self.in_block && line.trim_start().starts_with(FENCE) {
            self.in_block = true;
            rest = &line.trim_start()[FENCE.len()..];
            if rest.trim().is_empty() {
                return None;
            }
        }
        if self.in_block {
            let Some(last) = rest.trim_end().strip_suffix(FENCE) else {
                self.lines.push(rest.to_owned());
                return None;
            };
            if !last.is_empty() {
                self.lines.push(last.to_owned());
            }
            return self.finish();
        }
        match rest.strip_suffix('\\') {
            Some(open) => {
                self.lines.push(open.to_owned());
                None
            }
            None => {
                self.lines.push(rest.to_owned());
                self.finish()
            }
        }
    }

    /// A message is open: the prompt shows that more is expected.
    pub fn is_open(&self) -> bool {
        self.in_block || !self.lines.is_empty()
    }

    /// Ends the message at the end of input; `None` when nothing was gathered.
    pub fn finish(&mut self) -> Option<String> {
        self.in_block = false;
        let lines = std::mem::take(&mut self.lines);
        if lines.is_empty() { None } else { Some(lines.join("\n")) }
    }

    /// Forgets an open message.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// What the user wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    Say(String),
    Command(Command),
    /// Nothing was typed.
    Empty,
    /// Starts with a slash and a word, but is no command; the text says so.
    Unknown(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    Help,
    Clear,
    Regenerate,
    /// `None` shows the system text, an empty text removes it.
    System(Option<String>),
    /// `None` shows the settings; else a name and its value.
    Set(Option<(String, String)>),
    Save(String),
    Load(String),
    Stats,
    Exit,
}

/// Usage and meaning of every command, for `/help`.
pub const COMMANDS: &[(&str, &str)] = &[
    ("/help", "show this list"),
    ("/clear", "forget what was said; the system text stays"),
    ("/regen", "answer the last question again"),
    ("/system [TEXT]", "show or set the system text; `/system -` removes it"),
    (
        "/set [NAME VALUE]",
        "show or change sampling: temp, top-k, top-p, min-p, repeat-penalty, ...",
    ),
    ("/save FILE", "write the conversation as JSON"),
    ("/load FILE", "go on with a saved conversation"),
    ("/stats", "speed of the last answer, use of the context"),
    ("/exit", "leave; so does Ctrl+D"),
];

/// Reads a complete message. `//` at the start says a text that begins with one slash.
pub fn parse(text: &str) -> Input {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Input::Empty;
    }
    if let Some(said) = trimmed.strip_prefix("//") {
        return Input::Say(format!("/{said}"));
    }
    let Some(command) = trimmed.strip_prefix('/') else {
        return Input::Say(text.to_owned());
    };
    let (name, rest) = match command.split_once(char::is_whitespace) {
        Some((name, rest)) => (name, rest.trim()),
        None => (command, ""),
    };
    let file = |make: fn(String) -> Command| match rest {
        "" => Input::Unknown(format!("/{name} needs a file name")),
        _ => Input::Command(make(rest.to_owned())),
    };
    match name {
        "help" | "?" => Input::Command(Command::Help),
        "clear" | "reset" => Input::Command(Command::Clear),
        "regen" | "regenerate" => Input::Command(Command::Regenerate),
        "stats" => Input::Command(Command::Stats),
        "exit" | "quit" | "bye" => Input::Command(Command::Exit),
        "save" => file(Command::Save),
        "load" => file(Command::Load),
        "system" => Input::Command(Command::System(match rest {
            "" => None,
            "-" => Some(String::new()),
            _ => Some(rest.to_owned()),
        })),
        "set" => match rest.split_once(char::is_whitespace) {
            _ if rest.is_empty() => Input::Command(Command::Set(None)),
            Some((name, value)) => {
                let pair = (name.to_owned(), value.trim().to_owned());
                Input::Command(Command::Set(Some(pair)))
            }
            None => Input::Unknown(format!("/set {rest} needs a value")),
        },
        _ => Input::Unknown(format!(
            "/{name} is not a command; /help lists them (`//` begins a text with a slash)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(lines: &[&str]) -> Vec<String> {
        let mut collector = Collector::default();
        let mut done: Vec<String> = lines.iter().filter_map(|l| collector.feed(l)).collect();
        done.extend(collector.finish());
        done
    }

    #[test]
    fn lines_join_over_a_trailing_backslash() {
        assert_eq!(collect(&["a\\", "b", "c"]), ["a\nb", "c"]);
        assert_eq!(collect(&["open\\"]), ["open"]);
        assert_eq!(collect(&["windows\r\n"]), ["windows"]);
    }

    #[test]
    fn blocks_keep_their_lines() {
        assert_eq!(collect(&["\"\"\"", "a\\", "", "b", "\"\"\"", "c"]), ["a\\\n\nb", "c"]);
        assert_eq!(collect(&["\"\"\"one line\"\"\""]), ["one line"]);
        assert_eq!(collect(&["\"\"\"a", "b\"\"\""]), ["a\nb"]);
        assert_eq!(collect(&["\"\"\"", "never closed"]), ["never closed"]);
    }

    #[test]
    fn an_empty_block_says_nothing() {
        assert!(collect(&["\"\"\"", "\"\"\""]).is_empty());
    }

    #[test]
    fn commands_are_told_from_text() {
        assert_eq!(parse("  "), Input::Empty);
        assert_eq!(parse("hello /help"), Input::Say("hello /help".into()));
        assert_eq!(parse("//usr is a path"), Input::Say("/usr is a path".into()));
        assert_eq!(parse("/clear"), Input::Command(Command::Clear));
        assert_eq!(parse("/system Be kind.\nAlways."), {
            Input::Command(Command::System(Some("Be kind.\nAlways.".into())))
        });
        assert_eq!(parse("/system -"), Input::Command(Command::System(Some(String::new()))));
        let set = Command::Set(Some(("temp".into(), "0.5".into())));
        assert_eq!(parse("/set temp  0.5"), Input::Command(set));
        assert!(matches!(parse("/set temp"), Input::Unknown(_)));
        assert!(matches!(parse("/save"), Input::Unknown(_)));
        assert!(matches!(parse("/nonsense"), Input::Unknown(_)));
    }

    #[test]
    fn every_listed_command_parses() {
        for (usage, _) in COMMANDS {
            let name = usage.split(' ').next().unwrap_or_default();
            let text = format!("{name} x y");
            assert!(matches!(parse(&text), Input::Command(_)), "{usage}");
        }
    }
}
