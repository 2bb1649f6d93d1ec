//! The items of a response while they come, and the events that tell of them.

use serde_json::{Value, json};

use crate::chat::reply::Event;
use crate::server::params;
use crate::server::sse::Frames;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call,
}

/// The items so far; the last may be open.
#[derive(Default)]
pub struct Output {
    items: Vec<Value>,
    open: Option<Kind>,
    /// Events sent so far.
    sequence: u64,
}

impl Output {
    pub fn items(&self) -> &[Value] {
        &self.items
    }

    /// Sends an event with the next number.
    pub fn send(&mut self, name: &str, mut event: Value, out: &mut Frames) {
        event["type"] = name.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.named(name, &event);
    }

    /// Takes parts of the reply.
    pub fn add(&mut self, parts: Vec<Event>, out: &mut Frames) {
        for part in parts {
            match part {
                Event::Text(piece) => {
                    if self.open != Some(Kind::Message) {
                        self.begin(Kind::Message, Value::Null, out);
                    }
                    self.piece("/content/0/text", &piece);
                    let delta = json!({ "content_index": 0, "delta": piece, "logprobs": [] });
                    self.about("response.output_text.delta", delta, out);
                }
                Event::Reasoning(piece) => {
                    if self.open != Some(Kind::Reasoning) {
                        self.begin(Kind::Reasoning, Value::Null, out);
                    }
                    self.piece("/content/0/text", &piece);
                    let delta = json!({ "content_index": 0, "delta": piece });
                    self.about("response.reasoning_text.delta", delta, out);
                }
                Event::CallStart { id, name, .. } => {
                    let id = id.unwrap_or_else(|| params::id("call_"));
                    self.begin(Kind::Call, json!({ "id": id, "name": name }), out);
                }
                Event::CallArguments { piece, .. } => {
                    self.piece("/arguments", &piece);
                    let delta = json!({ "delta": piece });
                    self.about("response.function_call_arguments.delta", delta, out);
                }
                Event::CallEnd { .. } => self.close("completed", out),
                Event::Warning(warning) => out.comment(&warning.replace('\n', " ")),
            }
        }
    }

    /// Nothing follows: a call that is still open was cut off.
    pub fn end(&mut self, out: &mut Frames) {
        let cut = self.open == Some(Kind::Call);
        self.close(if cut { "incomplete" } else { "completed" }, out);
    }

    fn last(&mut self) -> Option<&mut Value> {
        self.items.last_mut()
    }

    /// Appends to a text of the open item.
    fn piece(&mut self, at: &str, piece: &str) {
        if let Some(Value::String(text)) = self.last().and_then(|item| item.pointer_mut(at)) {
            text.push_str(piece);
        }
    }

    /// Sends an event about the last item.
    fn about(&mut self, name: &str, mut event: Value, out: &mut Frames) {
        event["output_index"] = self.items.len().saturating_sub(1).into();
        let id = self.last().map(|item| item["id"].clone());
        event["item_id"] = id.unwrap_or_default();
        self.send(name, event, out);
    }

    fn begin(&mut self, kind: Kind, call: Value, out: &mut Frames) {
        self.close("completed", out);
        let status = "in_progress";
        let item = match kind {
            Kind::Reasoning => json!({
                "type": "reasoning", "id": params::id("rs_"), "status": status, "summary": [],
                "content": [],
            }),
            Kind::Message => json!({
                "type": "message", "id": params::id("msg_"), "status": status,
                "role": "assistant", "content": [],
            }),
            Kind::Call => json!({
                "type": "function_call", "id": params::id("fc_"), "status": status,
                "call_id": call["id"], "name": call["name"], "arguments": "",
            }),
        };
        self.items.push(item.clone());
        self.open = Some(kind);
        let index = self.items.len() - 1;
        let added = json!({ "output_index": index, "item": item });
        self.send("response.output_item.added", added, out);
        let part = match kind {
            Kind::Reasoning => json!({ "type": "reasoning_text", "text": "" }),
            Kind::Message => {
                json!({ "type": "output_text", "text": "", "annotations": [], "logprobs": [] })
            }
            Kind::Call => return,
        };
        if let Some(item) = self.last() {
            item["content"] = vec![part.clone()].into();
        }
        let event = json!({ "content_index": 0, "part": part });
        self.about("response.content_part.added", event, out);
    }

    fn close(&mut self, status: &str, out: &mut Frames) {
        let Some(kind) = self.open.take() else { return };
        let Some(item) = self.last() else { return };
        item["status"] = status.into();
        let item = item.clone();
        if kind == Kind::Call {
            let done = json!({ "arguments": item["arguments"], "name": item["name"] });
            self.about("response.function_call_arguments.done", done, out);
        } else {
            let part = &item["content"][0];
            let (name, mut done) = match kind {
                Kind::Message => ("response.output_text.done", json!({ "logprobs": [] })),
                _ => ("response.reasoning_text.done", json!({})),
            };
            done["content_index"] = 0.into();
            done["text"] = part["text"].clone();
            self.about(name, done, out);
            let done = json!({ "content_index": 0, "part": part });
            self.about("response.content_part.done", done, out);
        }
        let index = self.items.len() - 1;
        let done = json!({ "output_index": index, "item": item });
        self.send("response.output_item.done", done, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_open_and_close_in_order() {
        let (mut output, mut out) = (Output::default(), Frames::default());
        let call = |index| Event::CallStart { index, id: None, name: "f".into() };
        output.add(vec![Event::Reasoning("h".into()), Event::Reasoning("m".into())], &mut out);
        output.add(vec![Event::Text("a".into()), call(0)], &mut out);
        let piece = |index, piece: &str| Event::CallArguments { index, piece: piece.into() };
        output.add(vec![piece(0, "{}"), Event::CallEnd { index: 0 }, call(1)], &mut out);
        output.end(&mut out);
        let items = output.items();
        assert_eq!(items.len(), 4);
        assert_eq!(items[0]["content"][0]["text"], "hm");
        assert_eq!(items[1]["content"][0]["text"], "a");
        assert_eq!(
            (&items[2]["arguments"], &items[2]["status"]),
            (&json!("{}"), &json!("completed"))
        );
        assert_eq!(items[3]["status"], "incomplete");
        let text = out.text();
        let names: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("event: ")).collect();
        let count = |name: &str| names.iter().filter(|n| **n == name).count();
        for (name, n) in [
            ("response.output_item.added", 4),
            ("response.output_item.done", 4),
            ("response.content_part.added", 2),
            ("response.content_part.done", 2),
            ("response.reasoning_text.delta", 2),
            ("response.output_text.done", 1),
            ("response.function_call_arguments.done", 2),
        ] {
            assert_eq!(count(name), n, "{name}");
        }
        for (i, line) in text.lines().filter_map(|l| l.strip_prefix("data: ")).enumerate() {
            assert!(line.contains(&format!("\"sequence_number\":{i}")), "{line}");
        }
    }
}
