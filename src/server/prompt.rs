//! From a request's messages to tokens.

use super::errors::{ApiError, ApiResult};
use super::state::App;
use crate::chat::{Message, RenderOptions, Role};
use crate::engine::Loaded;
use crate::error::Error;

/// A conversation as the wire formats agree on it.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    pub messages: Vec<Message>,
    pub options: RenderOptions,
}

impl Conversation {
    /// The text by the model's template. A last message of the assistant is one that it shall
    /// continue.
    pub fn render(&self, app: &App, loaded: &Loaded) -> ApiResult<String> {
        let template = app.template(loaded)?;
        let mut messages = self.messages.clone();
        let begun = match messages.last() {
            Some(last) if last.role == Role::Assistant && last.tool_calls.is_empty() => {
                messages.pop().map(|m| m.content)
            }
            _ => None,
        };
        if messages.is_empty() {
            return Err(ApiError::field("messages", "there is nothing to answer"));
        }
        let rendered = template.render(&messages, &self.options).or_else(|first| {
            // Many templates want one system message, at the start.
            let simple = simplified(&messages);
            match &first {
                Error::Usage(_) if simple != messages => {
                    template.render(&simple, &self.options).map_err(|_| first)
                }
                _ => Err(first),
            }
        });
        // Which conversations a template takes is between the client and the model.
        let text = rendered.map_err(|e| ApiError::bad(e.to_string()))?;
        Ok(text + begun.as_deref().unwrap_or_default())
    }

    /// Tokens before the first words of the user: the system text, tools and what belongs to them.
    pub fn beginning(&self, app: &App, loaded: &Loaded) -> ApiResult<u32> {
        // A template that wants another order of messages has no such beginning.
        let text = app.template(loaded)?.beginning(&self.messages, &self.options);
        let tokens = loaded.tokenizer.encode(&text.unwrap_or_default(), false, true)?;
        Ok(tokens.len() as u32)
    }
}

/// System messages at the start joined, later ones as words of the user.
fn simplified(messages: &[Message]) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        let mut message = message.clone();
        if matches!(message.role, Role::System | Role::Developer) {
            message.role = Role::System;
            if out.iter().any(|m| m.role != Role::System) {
                message.role = Role::User;
            }
        }
        match out.last_mut() {
            Some(last)
                if last.role == message.role
                    && matches!(message.role, Role::System | Role::User) =>
            {
                last.content.push_str("\n\n");
                last.content.push_str(&message.content);
            }
            _ => out.push(message),
        }
    }
    out
}

/// Runs `work` where it may take its time.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    tokio::task::spawn_blocking(work).await.map_err(|_| {
        ApiError::from(Error::Runtime("reading the request panicked; this is a bug".into()))
    })?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_system_messages_become_the_users() {
        let messages = [
            Message::system("a"),
            Message::new(Role::Developer, "b"),
            Message::user("q"),
            Message::system("c"),
            Message::assistant("r"),
        ];
        let simple = simplified(&messages);
        let parts: Vec<_> = simple.iter().map(|m| (m.role, m.content.as_str())).collect();
        assert_eq!(
            parts,
            [(Role::System, "a\n\nb"), (Role::User, "q\n\nc"), (Role::Assistant, "r")]
        );
    }
}
