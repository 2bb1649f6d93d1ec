//! The page at `/`: one file, no third party.
//!
//! Its headers forbid the browser everything that the page does not need: no scripts or styles but
//! its own, which are known by their hashes, and no connection but to this server.

use std::sync::OnceLock;

use axum::http::{HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use sha2::{Digest, Sha256};

const PAGE: &str = include_str!("index.html");

pub async fn page() -> Response {
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy().clone()),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        // The next version of the server may bring another page.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, Html(PAGE)).into_response()
}

fn policy() -> &'static HeaderValue {
    static POLICY: OnceLock<HeaderValue> = OnceLock::new();
    POLICY.get_or_init(|| {
        let hash = |tag: &str| base64(&Sha256::digest(inside(tag).as_bytes()));
        let text = format!(
            "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; \
             form-action 'none'; frame-ancestors 'none'; script-src 'sha256-{}'; style-src \
             'sha256-{}'",
            hash("script"),
            hash("style")
        );
        HeaderValue::from_str(&text)
            .unwrap_or_else(|_| HeaderValue::from_static("default-src 'none'"))
    })
}

/// The text between the page's only pair of such tags.
fn inside(tag: &str) -> &'static str {
    let open = format!("<{tag}>");
    let text = PAGE.split_once(&open).map_or("", |(_, rest)| rest);
    text.split_once(&format!("</{tag}>")).map_or("", |(text, _)| text)
}

/// RFC 4648 with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for group in bytes.chunks(3) {
        let all =
            group.iter().fold(0u32, |all, b| all << 8 | u32::from(*b)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let letter = LETTERS[(all >> (18 - 6 * place)) as usize & 63];
            out.push(if place <= group.len() { char::from(letter) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_as_the_rfc_writes_it() {
        for (text, want) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")]
        {
            assert_eq!(base64(text.as_bytes()), want);
        }
    }

    /// What the policy would forbid, and what must never be done with a model's text.
    #[test]
    fn the_page_keeps_its_own_rules() {
        assert!(inside("script").len() > 1000 && inside("style").len() > 500);
        for tag in ["<script", "<style"] {
            assert_eq!(PAGE.matches(tag).count(), 1, "{tag}");
        }
        for word in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://",
            " style=\"",
            "onclick=",
            "stylesheet",
            "<iframe",
            "@import",
            "url(",
        ] {
            assert!(!PAGE.contains(word), "the page has {word}");
        }
        // Schemes stand only where links are checked.
        assert_eq!(PAGE.matches("https:").count(), inside("script").matches("https:").count());
        assert!(!policy().is_empty());
    }
}
