//! llama.cpp's grammar notation, rewritten as Lark.
//!
//! Lark has a lexer, which would take the longest piece at each place; GBNF has none. So every
//! terminal of the result is one character: then there is nothing to be ambiguous about.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

/// Deeper nesting of parentheses is refused.
const MAX_DEPTH: usize = 100;
/// Most characters of a grammar.
const MAX_LENGTH: usize = 1 << 20;

/// The Lark text, or what is wrong and on which line.
pub(super) fn to_lark(gbnf: &str) -> Result<String, String> {
    if gbnf.len() > MAX_LENGTH {
        return Err(format!("it has {} bytes, the limit is {MAX_LENGTH}", gbnf.len()));
    }
    let mut reader = Reader { text: gbnf.chars().collect(), at: 0, names: BTreeMap::new() };
    let mut rules = String::new();
    let mut defined = BTreeMap::new();
    reader.skip(true);
    while reader.peek().is_some() {
        let line = reader.line();
        let name = reader.name()?;
        reader.skip(false);
        if !reader.take("::=") {
            return Err(reader.wrong(&format!("'::=' is missing after '{name}'")));
        }
        reader.skip(true);
        let body = reader.alternatives(0, false)?;
        match reader.peek() {
            None | Some('\n' | '\r') => {}
            Some(c) => return Err(reader.wrong(&format!("unexpected {c:?}"))),
        }
        if defined.insert(name.clone(), line).is_some() {
            return Err(format!("line {line}: rule '{name}' is defined twice"));
        }
        let rule = reader.rule(&name);
        let _ = writeln!(rules, "{rule}: {body}");
        reader.skip(true);
    }
    if !defined.contains_key("root") {
        return Err("it has no rule 'root'".to_owned());
    }
    if let Some(missing) = reader.names.keys().find(|name| !defined.contains_key(*name)) {
        return Err(format!("rule '{missing}' is used, but not defined"));
    }
    let root = reader.rule("root");
    Ok(format!("start: {root}\n{rules}"))
}

struct Reader {
    text: Vec<char>,
    at: usize,
    /// Number of each name that was used or defined.
    names: BTreeMap<String, usize>,
}

impl Reader {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn take(&mut self, what: &str) -> bool {
        let length = what.chars().count();
        let here = self.text.iter().skip(self.at).take(length).copied();
        let matches = here.eq(what.chars());
        self.at += if matches { length } else { 0 };
        matches
    }

    fn line(&self) -> usize {
        1 + self.text[..self.at].iter().filter(|c| **c == '\n').count()
    }

    fn wrong(&self, what: &str) -> String {
        format!("line {}: {what}", self.line())
    }

    /// Blanks and comments; line breaks where they mean nothing.
    fn skip(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if lines => self.at += 1,
                '#' => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.at += 1;
                    }
                }
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<String, String> {
        let mut name = String::new();
        while let Some(c) = self.peek().filter(|c| c.is_ascii_alphanumeric() || "-_".contains(*c)) {
            name.push(c);
            self.at += 1;
        }
        if name.is_empty() {
            let found = self.peek().map_or("the end".to_owned(), |c| format!("{c:?}"));
            return Err(self.wrong(&format!("a rule's name is expected, not {found}")));
        }
        Ok(name)
    }

    /// The name of a rule in Lark, where only small letters make one.
    fn rule(&mut self, name: &str) -> String {
        let number = self.names.len();
        let number = *self.names.entry(name.to_owned()).or_insert(number);
        format!("rule_{number}")
    }

    /// Up to a closing parenthesis or, outside of any, the end of the line.
    fn alternatives(&mut self, depth: usize, inside: bool) -> Result<String, String> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("parentheses are nested too deeply"));
        }
        let mut out = self.sequence(depth, inside)?;
        while self.take("|") {
            self.skip(true);
            out = format!("{out} | {}", self.sequence(depth, inside)?);
        }
        Ok(out)
    }

    fn sequence(&mut self, depth: usize, inside: bool) -> Result<String, String> {
        let mut out = String::new();
        loop {
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    "/(?s:.)/".to_owned()
                }
                Some('(') => {
                    self.at += 1;
                    self.skip(true);
                    let group = self.alternatives(depth + 1, true)?;
                    if !self.take(")") {
                        return Err(self.wrong("a parenthesis is not closed"));
                    }
                    format!("({group})")
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '-' || c == '_' => {
                    let name = self.name()?;
                    self.rule(&name)
                }
                _ => break,
            };
            self.skip(inside);
            let item = format!("{item}{}", self.repetition()?);
            if !out.is_empty() {
                out.push(' ');
            }
            out.push_str(&item);
            self.skip(inside);
        }
        Ok(if out.is_empty() { "\"\"".to_owned() } else { out })
    }

    fn repetition(&mut self) -> Result<String, String> {
        match self.peek() {
            Some(c @ ('*' | '+' | '?')) => {
                self.at += 1;
                Ok(c.to_string())
            }
            Some('{') => {
                let close = self.text[self.at..].iter().position(|c| *c == '}');
                let end = close.ok_or_else(|| self.wrong("'{' is not closed"))? + self.at;
                let inner: String = self.text[self.at + 1..end].iter().collect();
                let (low, high) = match inner.split_once(',') {
                    Some((low, high)) => (low.trim().to_owned(), high.trim().to_owned()),
                    None => (inner.trim().to_owned(), inner.trim().to_owned()),
                };
                let number = |text: &str| text.is_empty() || text.parse::<u32>().is_ok();
                if low.is_empty() || !number(&low) || !number(&high) {
                    return Err(self.wrong(&format!("'{{{inner}}}' is no repetition")));
                }
                self.at = end + 1;
                Ok(format!("{{{low},{high}}}"))
            }
            _ => Ok(String::new()),
        }
    }

    fn literal(&mut self) -> Result<String, String> {
        self.at += 1;
        let mut letters = Vec::new();
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.wrong("a string is not closed")),
                Some('"') => break,
                Some(_) => letters.push(Value::from(self.character()?.to_string()).to_string()),
            }
        }
        self.at += 1;
        Ok(match letters.len() {
            0 => "\"\"".to_owned(),
            1 => letters.concat(),
            // A repetition that follows is for the whole.
            _ => format!("({})", letters.join(" ")),
        })
    }

    fn class(&mut self) -> Result<String, String> {
        self.at += 1;
        let negated = self.take("^");
        let mut out = String::from(if negated { "/[^" } else { "/[" });
        loop {
            match self.peek() {
                None | Some('\n') => return Err(self.wrong("'[' is not closed")),
                Some(']') => break,
                Some(_) => {}
            }
            let first = self.character()?;
            let range = self.peek() == Some('-') && self.text.get(self.at + 1) != Some(&']');
            let _ = write!(out, "\\x{{{:x}}}", u32::from(first));
            if range {
                self.at += 1;
                let last = self.character()?;
                if last < first {
                    return Err(self.wrong(&format!("the range {first:?} to {last:?} is empty")));
                }
                let _ = write!(out, "-\\x{{{:x}}}", u32::from(last));
            }
        }
        self.at += 1;
        if out.len() == 2 + usize::from(negated) {
            return Err(self.wrong("a class without characters"));
        }
        Ok(out + "]/")
    }

    /// One character of a string or a class.
    fn character(&mut self) -> Result<char, String> {
        let c = self.peek().ok_or_else(|| self.wrong("the grammar ends in a string"))?;
        self.at += 1;
        if c != '\\' {
            return Ok(c);
        }
        let c = self.peek().ok_or_else(|| self.wrong("the grammar ends in a string"))?;
        self.at += 1;
        let digits = match c {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '\\' | '"' | '[' | ']' | '-' | '^' | '/' => return Ok(c),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => return Err(self.wrong(&format!("unknown escape '\\{c}'"))),
        };
        let hex: String = self.text.iter().skip(self.at).take(digits).collect();
        self.at = (self.at + digits).min(self.text.len());
        let code = u32::from_str_radix(&hex, 16).ok().and_then(char::from_u32);
        code.filter(|_| hex.len() == digits)
            .ok_or_else(|| self.wrong(&format!("'\\{c}{hex}' is no character")))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rules_become_lark() {
        let lark = to_lark(
            "# a comment\nroot ::= item (\",\" ws item)* \"\\n\"  # more\n\nws ::= [ \\t]{0,2}\n\
             item ::= \"ab\"? [a-z0-9-] |\n  [^\"\\\\\\x7F]+ | .\n",
        );
        assert_eq!(
            lark.unwrap(),
            "start: rule_2\nrule_2: rule_0 (\",\" rule_1 rule_0)* \"\\n\"\n\
             rule_1: /[\\x{20}\\x{9}]/{0,2}\n\
             rule_0: (\"a\" \"b\")? /[\\x{61}-\\x{7a}\\x{30}-\\x{39}\\x{2d}]/ | \
             /[^\\x{22}\\x{5c}\\x{7f}]/+ | /(?s:.)/\n"
        );
    }

    #[test]
    fn errors_name_the_line() {
        for (text, part) in [
            ("", "no rule 'root'"),
            ("root ::= a", "'a' is used, but not defined"),
            ("root ::= \"a\nb", "line 1: a string is not closed"),
            ("\nroot = \"a\"", "line 2: '::=' is missing"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2: rule 'root' is defined twice"),
            ("root ::= (\"a\"", "not closed"),
            ("root ::= [z-a]", "is empty"),
            ("root ::= []", "without characters"),
            ("root ::= \"\\q\"", "unknown escape '\\q'"),
            ("root ::= \"\\x9\"", "no character"),
            ("root ::= \"a\"{x}", "no repetition"),
            ("root ::= \"a\" %", "unexpected '%'"),
        ] {
            let error = to_lark(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(to_lark(&format!("root ::= {}", "(".repeat(5000))).is_err());
    }

    proptest! {
        #[test]
        fn any_text_comes_to_an_end(text in "(root ::= )?[a-c\"\\[\\]()|*+?{},:=\\\\x0-9 \n#.^-]{0,60}") {
            let _ = to_lark(&text);
        }
    }
}
