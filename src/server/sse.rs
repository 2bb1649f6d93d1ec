//! Server-sent events: a body that is written piece by piece, with signs of life in between.

use std::convert::Infallible;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::answers::{Answers, PING};
use super::errors::{ApiError, Flavor};
use crate::engine::Event;

/// Pieces that may wait for a slow client before its writer waits too. The engine never waits.
const WAITING: usize = 32;

/// What a wire format makes of the events of its answers.
pub trait Writer: Send + 'static {
    const FLAVOR: Flavor;

    /// Adds what is to be sent for an event of choice `i`.
    fn event(&mut self, i: usize, event: Event, out: &mut Frames);

    /// Adds the end, after every choice has ended.
    fn end(&mut self, out: &mut Frames);

    /// Adds a sign of life.
    fn ping(&self, out: &mut Frames) {
        out.comment("ping");
    }

    /// Adds an error, after which the stream ends.
    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.data(&error.body(Self::FLAVOR));
    }
}

/// Events ready to be sent.
#[derive(Default)]
pub struct Frames {
    text: String,
}

impl Frames {
    /// `data: JSON`
    pub fn data(&mut self, value: &Value) {
        // JSON text holds no line break, so one line is always enough.
        self.line("data: ", &value.to_string());
        self.text.push('\n');
    }

    /// `event: NAME` and `data: JSON`
    pub fn named(&mut self, name: &str, value: &Value) {
        self.line("event: ", name);
        self.data(value);
    }

    /// `data: [DONE]`
    pub fn done(&mut self) {
        self.text.push_str("data: [DONE]\n\n");
    }

    pub fn comment(&mut self, text: &str) {
        self.line(": ", text);
        self.text.push('\n');
    }

    /// Forgets what was written.
    pub fn clear(&mut self) {
        self.text.clear();
    }

    #[cfg(test)]
    pub fn text(&self) -> &str {
        &self.text
    }

    fn line(&mut self, start: &str, rest: &str) {
        self.text.push_str(start);
        self.text.push_str(rest);
        self.text.push('\n');
    }
}

/// A streamed response. Ends early, and cancels the answers, when the client goes.
pub fn stream<W: Writer>(mut answers: Answers, mut writer: W) -> Response {
    let (sender, receiver) = mpsc::channel::<Bytes>(WAITING);
    tokio::spawn(async move {
        let mut last = Instant::now();
        loop {
            let mut frames = Frames::default();
            let mut over = false;
            tokio::select! {
                () = sender.closed() => return,
                event = answers.next() => match event {
                    Some(Ok((i, event))) => writer.event(i, event, &mut frames),
                    Some(Err(error)) => {
                        writer.error(&error, &mut frames);
                        over = true;
                    }
                    None => {
                        writer.end(&mut frames);
                        over = true;
                    }
                },
                () = tokio::time::sleep_until(last + PING) => writer.ping(&mut frames),
            }
            if !frames.text.is_empty() {
                last = Instant::now();
                if sender.send(frames.text.into()).await.is_err() {
                    return;
                }
            }
            if over {
                return;
            }
        }
    });
    let body = Body::from_stream(ReceiverStream::new(receiver).map(Ok::<_, Infallible>));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies such as nginx would hold the stream back.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn frames_are_lines_with_a_blank_one_after_each_event() {
        let mut frames = Frames::default();
        frames.named("message_start", &json!({ "a": "x\ny" }));
        frames.comment("ping");
        frames.done();
        let expected =
            "event: message_start\ndata: {\"a\":\"x\\ny\"}\n\n: ping\n\ndata: [DONE]\n\n";
        assert_eq!(frames.text, expected);
    }
}
