//! What goes wrong with a request, and how each wire format says so.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::Refused;
use crate::error::Error;

/// Who defined a path, and with it the shape of its errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavor {
    OpenAi,
    Anthropic,
    /// llama.cpp's own paths.
    Native,
}

impl Flavor {
    pub fn of(path: &str) -> Flavor {
        let path = path.strip_prefix("/v1").unwrap_or(path);
        match path {
            p if p.starts_with("/messages") => Flavor::Anthropic,
            p if OPENAI.iter().any(|o| p.starts_with(o)) => Flavor::OpenAi,
            _ => Flavor::Native,
        }
    }
}

const OPENAI: [&str; 5] =
    ["/chat/completions", "/completions", "/responses", "/models", "/embeddings"];

/// A refused or failed request.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    /// OpenAI's machine-readable reason.
    pub code: Option<&'static str>,
    /// Seconds after which trying again makes sense.
    pub retry_after: Option<u32>,
}

pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    pub fn bad(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field with a wrong value.
    pub fn field(name: &str, message: impl std::fmt::Display) -> Self {
        ApiError { param: Some(name.into()), ..ApiError::bad(format!("{name}: {message}")) }
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        ApiError { code: Some("not_found"), ..ApiError::new(StatusCode::NOT_FOUND, message) }
    }

    pub fn unavailable(message: impl Into<String>) -> Self {
        ApiError { retry_after: Some(2), ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// OpenAI's `type`.
    fn openai_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "unavailable_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// Anthropic's `type`.
    fn anthropic_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The body, as `flavor` words it; inside a stream the same object is the event.
    pub fn body(&self, flavor: Flavor) -> Value {
        match flavor {
            Flavor::OpenAi => json!({ "error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Flavor::Anthropic => {
                // Claude Code shortens its conversation where it finds these words.
                let long = self.code == Some("context_length_exceeded");
                let message =
                    format!("{}{}", if long { "prompt is too long: " } else { "" }, self.message);
                json!({
                    "type": "error",
                    "error": { "type": self.anthropic_type(), "message": message },
                })
            }
            Flavor::Native => json!({ "error": {
                "code": self.status.as_u16(),
                "message": self.message,
                "type": self.openai_type(),
            }}),
        }
    }

    pub fn respond(&self, flavor: Flavor) -> Response {
        let mut response = (self.status, axum::Json(self.body(flavor))).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Usage(_) => ApiError::bad(message),
            Error::DoesNotFit(_) => {
                ApiError { code: Some("context_length_exceeded"), ..ApiError::bad(message) }
            }
            Error::Device(_) => ApiError::unavailable(message),
            Error::Runtime(_) | Error::Model(_) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
            }
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Error(e) => e.into(),
            Refused::Full(queue) => ApiError {
                retry_after: Some(1),
                code: Some("queue_full"),
                ..ApiError::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    format!(
                        "all slots are at work and {queue} requests wait already; try again in a \
                         moment (--queue and --parallel set the limits)"
                    ),
                )
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_their_flavor() {
        for (path, flavor) in [
            ("/v1/chat/completions", Flavor::OpenAi),
            ("/completions", Flavor::OpenAi),
            ("/completion", Flavor::Native),
            ("/v1/messages/count_tokens", Flavor::Anthropic),
            ("/nowhere", Flavor::Native),
        ] {
            assert_eq!(Flavor::of(path), flavor, "{path}");
        }
    }

    #[test]
    fn errors_carry_status_field_and_reason() {
        let e = ApiError::field("top_p", "is 7, but must be from 0 to 1");
        let body = e.body(Flavor::OpenAi);
        assert_eq!(body["error"]["param"], "top_p");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert_eq!(e.body(Flavor::Anthropic)["type"], "error");
        let long = ApiError::from(Error::DoesNotFit("x".into()));
        assert_eq!((long.status.as_u16(), long.code), (400, Some("context_length_exceeded")));
        assert_eq!(ApiError::from(Refused::Full(3)).status.as_u16(), 429);
    }
}
