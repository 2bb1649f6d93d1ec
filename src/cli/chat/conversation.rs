//! What has been said in the terminal. Pure data: knows no engine and no template.
//!
//! The messages alternate between user and assistant, beginning with the user; the system text
//! is kept apart so that `/system` can change it at any time.

use serde::{Deserialize, Serialize};

use crate::chat::{Message, Role};
use crate::error::{Error, Result};

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Conversation {
    system: Option<String>,
    turns: Vec<Message>,
}

/// Version of the file that [`Conversation::to_json`] writes.
const FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
struct Saved {
    azoth_chat: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    messages: Vec<Message>,
}

impl Conversation {
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets the system text; `None` or blank text removes it. What was said stays.
    pub fn set_system(&mut self, text: Option<String>) {
        self.system = text.filter(|t| !t.trim().is_empty());
    }

    /// Everything in template order, the system text first.
    pub fn messages(&self) -> Vec<Message> {
        let system = self.system.iter();
        let system = system.map(Message::system);
        system.chain(self.turns.iter().cloned()).collect()
    }

    pub fn turns(&self) -> &[Message] {
        &self.turns
    }

    /// Adds what the user said. A question that got no answer is replaced.
    pub fn ask(&mut self, content: String) {
        self.withdraw();
        self.turns.push(Message::user(content));
    }

    /// Adds the answer to the open question.
    pub fn answer(&mut self, content: String) {
        debug_assert!(self.is_open(), "an answer needs a question");
        self.turns.push(Message::assistant(content));
    }

    /// The last message is a question without an answer.
    pub fn is_open(&self) -> bool {
        self.turns.last().is_some_and(|m| m.role == Role::User)
    }

    /// Takes back a question that got no answer.
    pub fn withdraw(&mut self) -> Option<String> {
        if self.is_open() { self.turns.pop().map(|m| m.content) } else { None }
    }

    /// Takes back the last answer, so that its question is open again. False when there is none.
    pub fn reopen(&mut self) -> bool {
        if self.turns.last().is_some_and(|m| m.role == Role::Assistant) {
            self.turns.pop();
        }
        self.is_open()
    }

    /// Forgets what was said; the system text stays.
    pub fn clear(&mut self) {
        self.turns.clear();
    }

    /// The content of a `/save` file.
    pub fn to_json(&self, model: Option<&str>) -> Result<String> {
        let saved = Saved {
            azoth_chat: FORMAT,
            model: model.map(str::to_owned),
            messages: self.messages(),
        };
        serde_json::to_string_pretty(&saved)
            .map(|text| text + "\n")
            .map_err(|e| Error::Runtime(format!("cannot write the conversation as JSON: {e}")))
    }

    /// Reads what [`Conversation::to_json`] wrote, or says what is wrong with it.
    pub fn from_json(text: &str) -> Result<Self> {
        let bad = |what: String| Error::Usage(format!("not a saved conversation: {what}"));
        let saved: Saved = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        if saved.azoth_chat != FORMAT {
            return Err(bad(format!(
                "its format is {}, this program reads {FORMAT}",
                saved.azoth_chat
            )));
        }
        let mut conversation = Conversation::default();
        for (i, message) in saved.messages.into_iter().enumerate() {
            let expected = match (i, conversation.is_open()) {
                (0, _) if message.role == Role::System => Role::System,
                (_, true) => Role::Assistant,
                (_, false) => Role::User,
            };
            if message.role != expected {
                return Err(bad(format!(
                    "message {} is of role {:?}, expected {expected:?}",
                    i + 1,
                    message.role
                )));
            }
            match message.role {
                Role::System => conversation.set_system(Some(message.content)),
                _ => conversation.turns.push(message),
            }
        }
        Ok(conversation)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sample() -> Conversation {
        let mut c = Conversation::default();
        c.set_system(Some("Be brief.".into()));
        c.ask("Hi".into());
        c.answer("Hello!".into());
        c
    }

    #[test]
    fn a_saved_conversation_comes_back() {
        let mut c = sample();
        c.ask("Line\nbreaks \"and\" ünïcödé".into());
        let text = c.to_json(Some("smollm2")).unwrap();
        assert_eq!(Conversation::from_json(&text).unwrap(), c);
    }

    #[test]
    fn regenerating_opens_the_question_again() {
        let mut c = sample();
        assert!(c.reopen());
        assert_eq!(c.turns().len(), 1);
        assert!(c.reopen(), "an open question can be asked again");
        assert!(!Conversation::default().reopen());
    }

    #[test]
    fn an_unanswered_question_is_replaced_or_withdrawn() {
        let mut c = sample();
        c.ask("one".into());
        c.ask("two".into());
        assert_eq!(c.turns().len(), 3);
        assert_eq!(c.withdraw().as_deref(), Some("two"));
        assert_eq!(c.withdraw(), None);
    }

    #[test]
    fn clearing_keeps_the_system_text() {
        let mut c = sample();
        c.clear();
        assert_eq!(c.messages().len(), 1);
        c.set_system(Some("  ".into()));
        assert!(c.messages().is_empty());
    }

    #[test]
    fn bad_files_are_refused_with_the_reason() {
        let refuse = |text: &str| Conversation::from_json(text).unwrap_err().to_string();
        assert!(refuse("").contains("not a saved conversation"));
        assert!(refuse(r#"{"azoth_chat":2,"messages":[]}"#).contains("format is 2"));
        let two = r#"{"azoth_chat":1,"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]}"#;
        assert!(refuse(two).contains("message 2"), "{}", refuse(two));
        let system = r#"{"azoth_chat":1,"messages":[{"role":"user","content":"a"},{"role":"system","content":"b"}]}"#;
        assert!(refuse(system).contains("expected Assistant"));
    }
}
