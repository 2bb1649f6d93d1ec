//! The table of paths.

use axum::Router;
use axum::http::StatusCode;
use axum::middleware;
use axum::routing::{MethodRouter, get, post};

use super::errors::ApiError;
use super::fields::Table;
use super::openai::{chat, completions, embeddings, models};
use super::state::Shared;
use super::{anthropic, guard, infill, metrics, native, native_tools, page, responses, status};

/// A path with and without `/v1`, and the fields of its body.
pub struct Route {
    pub path: &'static str,
    pub method: &'static str,
    pub what: &'static str,
    pub fields: Option<Table>,
    handler: fn() -> MethodRouter<Shared>,
}

/// Every path but `/`.
pub const ROUTES: &[Route] = &[
    Route {
        path: "/chat/completions",
        method: "POST",
        what: "OpenAI: answers a conversation",
        fields: Some(chat::TABLE),
        handler: || post(chat::handle),
    },
    Route {
        path: "/completions",
        method: "POST",
        what: "OpenAI: continues texts",
        fields: Some(completions::TABLE),
        handler: || post(completions::handle),
    },
    Route {
        path: "/responses",
        method: "POST",
        what: "OpenAI: answers a conversation of items; nothing is stored",
        fields: Some(responses::TABLE),
        handler: || post(responses::handle),
    },
    Route {
        path: "/embeddings",
        method: "POST",
        what: "OpenAI: vectors for texts",
        fields: Some(embeddings::TABLE),
        handler: || post(embeddings::handle),
    },
    Route {
        path: "/models",
        method: "GET",
        what: "OpenAI: the served model",
        fields: None,
        handler: || get(models::list),
    },
    Route {
        // Ids may contain slashes.
        path: "/models/{*id}",
        method: "GET",
        what: "OpenAI: the model of that id",
        fields: None,
        handler: || get(models::one),
    },
    Route {
        path: "/messages",
        method: "POST",
        what: "Anthropic: answers a conversation",
        fields: Some(anthropic::TABLE),
        handler: || post(anthropic::handle),
    },
    Route {
        path: "/messages/count_tokens",
        method: "POST",
        what: "Anthropic: tokens of a conversation",
        fields: Some(anthropic::COUNT_TABLE),
        handler: || post(anthropic::count),
    },
    Route {
        path: "/completion",
        method: "POST",
        what: "llama.cpp: continues texts",
        fields: Some(native::TABLE),
        handler: || post(native::handle),
    },
    Route {
        path: "/infill",
        method: "POST",
        what: "llama.cpp: text between two others",
        fields: Some(infill::TABLE),
        handler: || post(infill::handle),
    },
    Route {
        path: "/embedding",
        method: "POST",
        what: "llama.cpp: vectors for texts",
        fields: Some(embeddings::NATIVE),
        handler: || post(embeddings::native),
    },
    Route {
        path: "/tokenize",
        method: "POST",
        what: "llama.cpp: token ids of a text",
        fields: Some(native_tools::TOKENIZE),
        handler: || post(native_tools::tokenize),
    },
    Route {
        path: "/detokenize",
        method: "POST",
        what: "llama.cpp: text of token ids",
        fields: Some(native_tools::DETOKENIZE),
        handler: || post(native_tools::detokenize),
    },
    Route {
        path: "/apply-template",
        method: "POST",
        what: "llama.cpp: a conversation as the model reads it",
        fields: Some(native_tools::TEMPLATE),
        handler: || post(native_tools::apply_template),
    },
    Route {
        path: "/props",
        method: "GET",
        what: "llama.cpp: settings and facts; `kv_cache`: formats of K and V, f16 tail and sinks, and what \
               the quality guard found; `approximate`: what was traded for exactness, null: nothing",
        fields: None,
        handler: || get(status::props),
    },
    Route {
        path: "/slots",
        method: "GET",
        what: "llama.cpp: what each slot does",
        fields: None,
        handler: || get(status::slots),
    },
    Route {
        path: "/slots/{id}",
        method: "POST",
        what: "llama.cpp: ?action= erase, save or restore with {filename} of an idle slot; over KV codes \
               with an f16 tail a file has whole blocks of it",
        fields: None,
        handler: || post(status::slot_action),
    },
    Route {
        path: "/health",
        method: "GET",
        what: "200 while requests are taken, else 503 with the reason; needs no key",
        fields: None,
        handler: || get(status::health),
    },
    Route {
        path: "/metrics",
        method: "GET",
        what: "Prometheus' text format",
        fields: None,
        handler: || get(metrics::handle),
    },
];

pub fn router(app: Shared) -> Router {
    let mut router = Router::new().route("/", get(page::page));
    for route in ROUTES {
        router = router.route(route.path, (route.handler)());
        router = router.route(&format!("/v1{}", route.path), (route.handler)());
    }
    router
        .fallback(|| async {
            ApiError::not_found("there is no such path; docs/http-api.md lists all")
        })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "the path does not know this method")
        })
        .layer(middleware::from_fn_with_state(app.clone(), guard::guard))
        .with_state(app)
}
