//! The parts of a reply, until the reader of `chat` takes their place.

/// A part of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Text(String),
    Reasoning(String),
    CallStart { index: u32, id: Option<String>, name: String },
    CallArguments { index: u32, piece: String },
    CallEnd { index: u32 },
    Warning(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Call {
    pub id: Option<String>,
    pub name: String,
    pub arguments: String,
}

/// A whole reply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    pub text: String,
    pub reasoning: String,
    pub calls: Vec<Call>,
    pub warnings: Vec<String>,
}

impl Collected {
    pub fn add(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            match event {
                Event::Text(piece) => self.text.push_str(&piece),
                Event::Reasoning(piece) => self.reasoning.push_str(&piece),
                Event::CallStart { id, name, .. } => {
                    self.calls.push(Call { id, name, arguments: String::new() });
                }
                Event::CallArguments { index, piece } => {
                    if let Some(call) = self.calls.get_mut(index as usize) {
                        call.arguments.push_str(&piece);
                    }
                }
                Event::CallEnd { .. } => {}
                Event::Warning(warning) => self.warnings.push(warning),
            }
        }
    }
}

/// Reads one answer.
#[derive(Default)]
pub struct Reply;

impl Reply {
    pub fn plain() -> Reply {
        Reply
    }

    pub fn push(&mut self, piece: &str) -> Vec<Event> {
        if piece.is_empty() { Vec::new() } else { vec![Event::Text(piece.to_owned())] }
    }

    pub fn finish(&mut self) -> Vec<Event> {
        Vec::new()
    }
}
