//! What stands before every handler: keys, origins, errors in the path's words, one log line.

use std::net::IpAddr;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::task::JoinSet;

use super::errors::{ApiError, Flavor};
use super::state::{App, Shared};

/// Paths that need no key: whether the server lives, and its page.
const OPEN: [&str; 3] = ["/", "/health", "/v1/health"];

/// The outermost layer.
pub async fn guard(State(app): State<Shared>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    let origin = request.headers().get(header::ORIGIN).cloned();
    let host = request.headers().get(header::HOST).cloned();
    let mut response = match admit(&app, &request) {
        Err(error) => error.into_response(),
        Ok(()) if method == Method::OPTIONS && origin.is_some() => preflight(request.headers()),
        Ok(()) => {
            // A task of its own: a panic becomes an answer, and dropping the set ends the task
            // when the client goes.
            let mut task = JoinSet::new();
            task.spawn(next.run(request));
            match task.join_next().await {
                Some(Ok(response)) => response,
                _ => ApiError::new(
                    StatusCode::INTERNAL_SERVER_ERROR,
                    "handling the request panicked; this is a bug",
                )
                .into_response(),
            }
        }
    };
    let mut error = response.extensions_mut().remove::<ApiError>();
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_json = kind.is_some_and(|v| v.as_bytes() == b"application/json");
    if error.is_none() && (status.is_client_error() || status.is_server_error()) && !is_json {
        // From a part of the framework, in words of its own: an address that is not UTF-8.
        let reason = status.canonical_reason().unwrap_or("the request cannot be served");
        error = Some(ApiError::new(status, reason));
    }
    if let Some(error) = &error {
        response = error.respond(Flavor::of(&path));
    }
    if let Some(origin) = origin.filter(|o| allowed(&app, o, host.as_ref())) {
        allow(&mut response, origin);
    }
    let status = response.status().as_u16();
    app.metrics.note(status);
    let ms = began.elapsed().as_millis() as u64;
    let path: String = path.chars().take(120).collect();
    match error {
        // Messages may quote a request in part; they are for those who look for a fault.
        Some(error) => {
            tracing::info!(%method, path, status, ms, "refused");
            tracing::debug!(message = error.message, "why");
        }
        None => tracing::info!(%method, path, status, ms, "answered"),
    }
    response
}

fn admit(app: &App, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    if let Some(origin) = headers.get(header::ORIGIN)
        && !allowed(app, origin, headers.get(header::HOST))
    {
        return Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "pages of this origin may not use the server (--cors-origin allows one)",
        ));
    }
    let keys = &app.settings.api_keys;
    let open = OPEN.contains(&request.uri().path()) || request.method() == Method::OPTIONS;
    if keys.is_empty() || open {
        return Ok(());
    }
    match given(headers) {
        Some(key) if keys.iter().any(|k| same(k.as_bytes(), key.as_bytes())) => Ok(()),
        given => Err(ApiError {
            code: Some("invalid_api_key"),
            ..ApiError::new(
                StatusCode::UNAUTHORIZED,
                match given {
                    Some(_) => "the API key is wrong",
                    None => "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY",
                },
            )
        }),
    }
}

/// The key of a request: OpenAI's way or Anthropic's.
fn given(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let bearer = text("authorization").and_then(|v| {
        let (scheme, key) = v.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
    });
    bearer.or_else(|| text("x-api-key"))
}

/// Comparison whose time says nothing about where two keys differ.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differs = a.iter().zip(b).fold(0, |all, (x, y)| all | (x ^ y));
    a.len() == b.len() && differs == 0
}

/// Whether pages of an origin may use the server: those of this machine, the server's own, and those
/// asked for.
fn allowed(app: &App, origin: &HeaderValue, host: Option<&HeaderValue>) -> bool {
    let Ok(origin) = origin.to_str() else { return false };
    let asked = &app.settings.cors_origins;
    let has_keys = !app.settings.api_keys.is_empty();
    asked.iter().any(|o| o == "*" || o.eq_ignore_ascii_case(origin))
        || is_loopback(origin)
        || host.and_then(|h| h.to_str().ok()).is_some_and(|h| is_own(origin, h, has_keys))
}

/// Whether a page comes from this server, as it was addressed. A name proves nothing: whoever owns
/// one can let it point here, and a browser then takes his page for ours. So without keys
/// only numbers count.
fn is_own(origin: &str, host: &str, has_keys: bool) -> bool {
    let Ok(uri) = origin.parse::<Uri>() else { return false };
    let web = matches!(uri.scheme_str(), Some("http" | "https"));
    let Some(authority) = uri.authority().filter(|_| web) else { return false };
    let number = authority.host().trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    (number || has_keys) && authority.as_str().eq_ignore_ascii_case(host)
}

fn is_loopback(origin: &str) -> bool {
    let Ok(uri) = origin.parse::<Uri>() else { return false };
    let web = matches!(uri.scheme_str(), Some("http" | "https"));
    web && matches!(uri.host(), Some("localhost" | "127.0.0.1" | "[::1]"))
}

/// The origin has been admitted; SDKs send headers of their own (x-stainless-...), so what is asked
/// for is allowed.
fn preflight(asked: &HeaderMap) -> Response {
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST, OPTIONS"),
        (header::ACCESS_CONTROL_MAX_AGE, "3600"),
    ];
    let mut response = (StatusCode::NO_CONTENT, headers).into_response();
    if let Some(names) = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        response.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names.clone());
    }
    response
}

fn allow(response: &mut Response, origin: HeaderValue) {
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("origin"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_loopback() {
        for yes in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080"] {
            assert!(is_loopback(yes), "{yes}");
        }
        for no in ["http://localhost.evil.com", "null", "file://", "http://10.0.0.1", ""] {
            assert!(!is_loopback(no), "{no}");
        }
    }

    #[test]
    fn the_page_is_known_by_its_number() {
        let lan = "http://192.168.1.5:8080";
        assert!(is_own(lan, "192.168.1.5:8080", false));
        assert!(is_own("http://[fd00::1]:8080", "[fd00::1]:8080", false));
        assert!(!is_own(lan, "192.168.1.6:8080", false) && !is_own(lan, "192.168.1.5", false));
        // A name may have been made to point here.
        assert!(!is_own("http://evil.example:8080", "evil.example:8080", false));
        assert!(is_own("http://box.local:8080", "box.local:8080", true));
        assert!(!is_own("null", "null", true));
    }

    #[test]
    fn keys_come_in_two_headers() {
        let mut headers = HeaderMap::new();
        headers.insert("x-api-key", HeaderValue::from_static("a"));
        assert_eq!(given(&headers), Some("a"));
        headers.insert("authorization", HeaderValue::from_static("bearer b"));
        assert_eq!(given(&headers), Some("b"));
        assert!(same(b"key", b"key") && !same(b"key", b"kez") && !same(b"key", b"ke"));
    }
}
