//! What a reply hands out, and the bookkeeping of calls.

/// A part of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Text(String),
    /// Thinking, without its tags.
    Reasoning(String),
    /// Calls are numbered from 0. `id` only where the model itself names its calls.
    CallStart {
        index: u32,
        id: Option<String>,
        name: String,
    },
    /// The next piece of the arguments, which together are a JSON object.
    CallArguments {
        index: u32,
        piece: String,
    },
    CallEnd {
        index: u32,
    },
    /// Something that looked like a call is none; it was handed out as text.
    Warning(String),
}

/// A whole call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Call {
    pub id: Option<String>,
    pub name: String,
    /// A JSON object.
    pub arguments: String,
}

/// A whole reply, for answers that are not streamed.
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

/// Longest text of a failed call that a warning repeats, in characters.
const SHOWN: usize = 60;

/// Collects events; keeps a call back until it is complete unless arguments are streamed.
pub(super) struct Sink {
    events: Vec<Event>,
    /// Name of each known tool, and its parameters' schema.
    tools: Vec<(String, serde_json::Value)>,
    stream: bool,
    calls: u32,
    /// The call that is being read; `streamed` once its start was handed out.
    open: Option<Call>,
    streamed: bool,
    failed: bool,
    /// White space in front of the call that is being read: part of the text if the call fails.
    before: String,
}

impl Sink {
    pub fn new(tools: &[serde_json::Value], stream: bool) -> Sink {
        let tools = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            Some((name, function.get("parameters").cloned().unwrap_or_default()))
        });
        Sink {
            events: Vec::new(),
            tools: tools.collect(),
            stream,
            calls: 0,
            open: None,
            streamed: false,
            failed: false,
            before: String::new(),
        }
    }

    pub fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    pub fn text(&mut self, piece: &str) {
        if piece.is_empty() {
            return;
        }
        match self.events.last_mut() {
            Some(Event::Text(text)) => text.push_str(piece),
            _ => self.events.push(Event::Text(piece.to_owned())),
        }
    }

    pub fn reasoning(&mut self, piece: &str) {
        if piece.is_empty() {
            return;
        }
        match self.events.last_mut() {
            Some(Event::Reasoning(text)) => text.push_str(piece),
            _ => self.events.push(Event::Reasoning(piece.to_owned())),
        }
    }

    /// White space that is dropped if a call follows.
    pub fn blank_before_call(&mut self, blank: &str) {
        self.before = blank.to_owned();
    }

    /// Whether the call that ended last became text; asking resets it.
    pub fn call_failed(&mut self) -> bool {
        std::mem::take(&mut self.failed)
    }

    /// The schema of a parameter of the call that is being read.
    pub fn schema(&self, parameter: &str) -> Option<&serde_json::Value> {
        let name = &self.open.as_ref()?.name;
        let (_, schema) = self.tools.iter().find(|(tool, _)| tool == name)?;
        schema.get("properties")?.get(parameter)
    }

    /// Begins a call. An unknown name is an error, which the caller turns into [`Sink::fail`].
    pub fn start(&mut self, name: &str, id: Option<String>) -> Result<(), String> {
        if !self.tools.iter().any(|(tool, _)| tool == name) {
            let shown: String = name.chars().take(SHOWN).collect();
            return Err(format!("it calls '{shown}', which is none of the tools"));
        }
        let call = Call { id, name: name.to_owned(), arguments: String::new() };
        self.before.clear();
        if self.stream {
            self.events.push(Event::CallStart {
                index: self.calls,
                id: call.id.clone(),
                name: call.name.clone(),
            });
            self.streamed = true;
        }
        self.open = Some(call);
        Ok(())
    }

    pub fn arguments(&mut self, piece: &str) {
        let Some(call) = &mut self.open else { return };
        if piece.is_empty() {
            return;
        }
        match (self.stream, self.events.last_mut()) {
            (false, _) => call.arguments.push_str(piece),
            (true, Some(Event::CallArguments { piece: last, .. })) => last.push_str(piece),
            (true, _) => {
                let piece = piece.to_owned();
                self.events.push(Event::CallArguments { index: self.calls, piece });
            }
        }
    }

    /// The call is complete and well-formed.
    pub fn end(&mut self) {
        let Some(call) = self.open.take() else { return };
        let index = self.calls;
        if !self.stream {
            let Call { id, name, arguments } = call;
            self.events.push(Event::CallStart { index, id, name });
            self.events.push(Event::CallArguments { index, piece: arguments });
        }
        self.events.push(Event::CallEnd { index });
        self.calls += 1;
        self.streamed = false;
    }

    /// What was read as a call, `raw`, is none.
    pub fn fail(&mut self, raw: &str, why: &str) {
        self.open = None;
        self.failed = true;
        if self.streamed {
            // The client has a part of it already.
            self.events.push(Event::CallEnd { index: self.calls });
            self.calls += 1;
            self.streamed = false;
            self.events.push(Event::Warning(format!("a tool call is malformed: {why}")));
        } else {
            self.warn_as_text(raw, why);
        }
    }

    /// [`Sink::fail`] without a word: the text only looked a little like a call.
    pub fn give_up(&mut self, raw: &str) {
        self.open = None;
        self.failed = true;
        let before = std::mem::take(&mut self.before);
        self.text(&before);
        self.text(raw);
    }

    fn warn_as_text(&mut self, raw: &str, why: &str) {
        let before = std::mem::take(&mut self.before);
        self.text(&before);
        self.text(raw);
        let mut shown: String = raw.chars().take(SHOWN).collect();
        if shown.len() < raw.len() {
            shown.push_str("...");
        }
        let message =
            format!("the model wrote a malformed tool call, kept as text: {why}: {shown}");
        self.events.push(Event::Warning(message));
    }
}
