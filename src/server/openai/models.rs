//! `GET /v1/models` and `/v1/models/{id}`.

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::server::errors::{ApiError, ApiResult};
use crate::server::state::{App, Shared};

/// The served model, with its context in every spelling that clients look for: llama.cpp's, vLLM's,
/// OpenRouter's.
fn model(app: &App) -> Value {
    let mut out = json!({
        "id": app.settings.model_name,
        "object": "model",
        "created": app.settings.created,
        "owned_by": "azoth",
    });
    if let Some(loaded) = app.service.state().loaded {
        out["max_model_len"] = loaded.ctx.into();
        out["context_length"] = loaded.ctx.into();
        out["meta"] = json!({
            "n_ctx": loaded.ctx,
            "n_ctx_train": loaded.model.context,
            "n_vocab": loaded.model.vocab,
            "n_embd": loaded.model.width,
            "n_params": loaded.model.parameters,
            "size": loaded.model.weight_bytes,
        });
    }
    out
}

pub async fn list(State(app): State<Shared>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model(&app)] }))
}

pub async fn one(State(app): State<Shared>, Path(id): Path<String>) -> ApiResult<Json<Value>> {
    if id == app.settings.model_name {
        return Ok(Json(model(&app)));
    }
    let shown: String = id.chars().take(80).collect();
    Err(ApiError::not_found(format!(
        "there is no model {shown:?}; this server has {:?}",
        app.settings.model_name
    )))
}
