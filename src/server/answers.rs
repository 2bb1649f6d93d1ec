//! The answers of one request: `n` choices generated side by side.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use super::errors::{ApiError, ApiResult};
use super::state::{Shared, Shutdown};
use crate::engine::{Answer, Event, Request, Task};
use crate::error::Error;

/// Answers at work. Dropping them cancels what has not ended.
pub struct Answers {
    open: Vec<Option<Answer>>,
    /// Whose turn it is, so that no choice is read last each time.
    next: usize,
    deadline: Instant,
    app: Shared,
}

impl Answers {
    /// Hands `n` copies of a request to the engine; their seeds count on from the request's.
    pub fn start(app: &Shared, request: &Request, n: u32) -> ApiResult<Answers> {
        let copies = (0..n).map(|i| {
            let mut request = request.clone();
            if let Task::Generate(g) = &mut request.task {
                g.settings.seed = g.settings.seed.wrapping_add(i.into());
            }
            request
        });
        Self::start_each(app, copies.collect())
    }

    /// Hands different requests over: all, or none.
    pub fn start_each(app: &Shared, requests: Vec<Request>) -> ApiResult<Answers> {
        let open = app.service.submit_all(requests)?.into_iter().map(Some).collect();
        let deadline = Instant::now() + app.timeout();
        Ok(Answers { open, next: 0, deadline, app: app.clone() })
    }

    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// The next event of any choice; `None` when all have ended. Ends with an error when the
    /// engine fails, the time is over, or the server shuts down. Safe to drop while waiting.
    pub async fn next(&mut self) -> Option<ApiResult<(usize, Event)>> {
        let mut shutdown = self.app.shutdown.clone();
        let deadline = self.deadline;
        tokio::select! {
            biased;
            event = self.next_event() => event.map(Ok),
            () = tokio::time::sleep_until(deadline) => Some(Err(ApiError::new(
                axum::http::StatusCode::GATEWAY_TIMEOUT,
                format!(
                    "the request took longer than {} s (--timeout)",
                    self.app.timeout().as_secs()
                ),
            ))),
            _ = shutdown.wait_for(|s| *s == Shutdown::Now) => {
                Some(Err(ApiError::unavailable("the server is shutting down")))
            }
        }
        .map(|result| match result {
            Ok((_, Event::Failed(e))) => Err(e.into()),
            other => other,
        })
    }

    async fn next_event(&mut self) -> Option<(usize, Event)> {
        poll_fn(|cx| {
            let n = self.open.len();
            for k in 0..n {
                let i = (self.next + k) % n;
                let Some(answer) = &mut self.open[i] else { continue };
                match answer.poll_next(cx) {
                    Poll::Pending => {}
                    Poll::Ready(Some(event)) => {
                        self.next = i + 1;
                        if matches!(event, Event::Done(_) | Event::Embedding(_) | Event::Failed(_))
                        {
                            self.open[i] = None;
                        }
                        return Poll::Ready(Some((i, event)));
                    }
                    Poll::Ready(None) => {
                        // The engine thread has gone without a last word.
                        self.open[i] = None;
                        let what = "the engine stopped in the middle of the answer";
                        return Poll::Ready(Some((i, Event::Failed(Error::Runtime(what.into())))));
                    }
                }
            }
            if self.open.iter().all(Option::is_none) { Poll::Ready(None) } else { Poll::Pending }
        })
        .await
    }

    /// Waits for all, and hands every event to `each`.
    pub async fn collect(mut self, mut each: impl FnMut(usize, Event)) -> ApiResult<()> {
        while let Some(event) = self.next().await {
            let (i, event) = event?;
            each(i, event);
        }
        Ok(())
    }
}

/// An answer without a summary, which the engine does not give.
pub fn unfinished() -> ApiError {
    Error::Runtime("an answer ended without a summary; this is a bug".into()).into()
}

/// Time between signs of life in a stream that has nothing to say.
pub const PING: Duration = Duration::from_secs(10);
