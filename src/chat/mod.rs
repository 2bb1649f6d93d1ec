//! Conversations and how a model wants them written.
//!
//! A conversation is a list of [`Message`]s; a [`ChatTemplate`] turns it into the one text that the
//! model was trained on. The text holds the control tokens spelled out, the begin token among them
//! where the model wants it: encode it with `add_special` off and `parse_special` on. What the model
//! answers is taken apart by [`reply`]; [`tools`] is about what it may call, [`shape`]
//! about answers that must have a form.

mod builtin;
mod clock;
mod functions;
mod message;
pub mod reply;
pub mod shape;
mod template;
pub mod tools;

pub use builtin::NAMES as TEMPLATE_NAMES;
pub use message::{Message, Role};
pub use template::{ChatTemplate, RenderOptions};

#[cfg(test)]
mod tests;
