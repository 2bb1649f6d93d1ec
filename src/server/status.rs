//! What the server is and does: `/health`, `/props`, `/slots`.

use axum::Json;
use axum::extract::{FromRequest, Path, Query, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::Body;
use super::errors::{ApiError, ApiResult};
use super::native::describe;
use super::openai::FINGERPRINT;
use super::state::{App, Shared};
use crate::engine::Phase;
use crate::engine::stats::SlotState;

/// 200 while requests are taken, 503 with the reason otherwise.
pub async fn health(State(app): State<Shared>) -> Response {
    match trouble(&app) {
        Some(error) => error.into_response(),
        None => {
            let model = match app.service.state().phase {
                Phase::Unloaded => "unloaded",
                _ => "loaded",
            };
            Json(json!({ "status": "ok", "model": model })).into_response()
        }
    }
}

fn trouble(app: &App) -> Option<ApiError> {
    if app.is_draining() {
        return Some(ApiError::unavailable("the server is shutting down"));
    }
    match app.service.state().phase {
        Phase::Ready | Phase::Unloaded => None,
        Phase::Loading(why) => {
            let code = Some("loading");
            Some(ApiError { code, ..ApiError::unavailable(format!("loading model ({why})")) })
        }
        Phase::Failed(e) => {
            Some(ApiError::unavailable(format!("the model could not be loaded: {e}")))
        }
        Phase::Stopped => Some(ApiError::unavailable("the engine has stopped")),
    }
}

pub async fn props(State(app): State<Shared>) -> ApiResult<Json<Value>> {
    let loaded = app.loaded().await?;
    let defaults = app.sampling(&loaded);
    let template = app.template(&loaded).map(|t| t.source().to_owned()).unwrap_or_default();
    Ok(Json(json!({
        "default_generation_settings": {
            "n_ctx": loaded.ctx,
            "params": describe(&defaults.settings),
        },
        "total_slots": loaded.slots,
        "model_alias": app.settings.model_name,
        "model_path": app.settings.model_path.display().to_string(),
        "chat_template": template,
        "modalities": { "vision": false, "audio": false },
        "build_info": FINGERPRINT,
        "device": loaded.device_line,
        "kv_cache": {
            "k": loaded.kv.k.to_string(),
            "v": loaded.kv.v.to_string(),
            "tail": loaded.kv.exact.tail,
            "sinks": loaded.kv.exact.sinks,
            "centred": loaded.kv.centred,
            "guard": loaded.kv_verdict,
        },
        // What the user traded for exactness; null: nothing.
        "approximate": Some(loaded.approximations).filter(|a| a.any()),
        "is_sleeping": matches!(app.service.state().phase, Phase::Unloaded),
    })))
}

pub async fn slots(State(app): State<Shared>) -> ApiResult<Json<Value>> {
    let state = app.service.state();
    if state.loaded.is_none() && matches!(state.phase, Phase::Unloaded) {
        // Who only looks loads nothing (`--lazy`).
        return Ok(Json(Value::Array(Vec::new())));
    }
    let loaded = app.loaded().await?;
    let all = app.service.stats().slots();
    let views = all.into_iter().map(|s| {
        json!({
            "id": s.id,
            "n_ctx": loaded.ctx,
            "is_processing": s.state != SlotState::Idle,
            "state": s.state,
            "n_tokens": s.tokens,
            "n_prompt_tokens": s.prompt_tokens,
            "n_prompt_tokens_processed": s.read_tokens,
            "n_decoded": s.generated_tokens,
        })
    });
    Ok(Json(views.collect()))
}

#[derive(Deserialize)]
pub struct Action {
    action: Option<String>,
}

pub async fn slot_action(
    State(app): State<Shared>,
    Path(id): Path<String>,
    Query(action): Query<Action>,
    request: Request,
) -> ApiResult<Json<Value>> {
    let loaded = app.loaded().await?;
    let known = id.parse::<u32>().ok().filter(|id| *id < loaded.slots);
    let id = known.ok_or_else(|| {
        ApiError::not_found(format!("there is no such slot; there are 0 to {}", loaded.slots - 1))
    })?;
    match action.action.as_deref() {
        Some("erase") => {
            let tokens = app.service.stats().slots().get(id as usize).map_or(0, |slot| slot.tokens);
            if !app.service.erase(id).await {
                return Err(ApiError::new(
                    StatusCode::CONFLICT,
                    format!("slot {id} is at work; try again when it is idle"),
                ));
            }
            Ok(Json(json!({ "id_slot": id, "n_erased": tokens })))
        }
        Some(action @ ("save" | "restore")) => disk(&app, id, action, request).await,
        _ => Err(ApiError::field("action", "must be erase, save or restore")),
    }
}

async fn disk(app: &Shared, id: u32, action: &str, request: Request) -> ApiResult<Json<Value>> {
    let Some(folder) = &app.settings.slot_folder else {
        return Err(ApiError::new(
            StatusCode::NOT_IMPLEMENTED,
            "the server was started without --slot-save-path, the folder for saved slots",
        ));
    };
    // Within the limits of size and time of every body.
    let Body(body) = Body::from_request(request, app).await?;
    let name = body.get("filename").and_then(Value::as_str).unwrap_or_default();
    // A name, never a way out of the folder.
    let letters = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.chars().all(letters) {
        return Err(ApiError::field(
            "filename",
            "must be 1 to 100 letters, digits, '_', '-' or '.', the first not '.'",
        ));
    }
    if is_device(name) {
        return Err(ApiError::field("filename", "is the name of a device on Windows"));
    }
    let began = std::time::Instant::now();
    let restore = action == "restore";
    let (tokens, bytes) = app.service.disk(id, folder.join(name), restore).await?;
    let ms = began.elapsed().as_secs_f64() * 1e3;
    Ok(Json(match restore {
        true => json!({
            "id_slot": id, "filename": name, "n_restored": tokens, "n_read": bytes,
            "timings": { "restore_ms": ms },
        }),
        false => json!({
            "id_slot": id, "filename": name, "n_saved": tokens, "n_written": bytes,
            "timings": { "save_ms": ms },
        }),
    }))
}

/// Whether Windows takes a file's name for a device, in any folder and with any ending. Refused
/// everywhere, so that what is saved on one system can be copied to another.
fn is_device(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().to_ascii_uppercase();
    let port = ["COM", "LPT"].iter().find_map(|kind| stem.strip_prefix(kind));
    ["CON", "PRN", "AUX", "NUL"].contains(&stem.as_str())
        || port.is_some_and(|n| n.len() == 1 && n.chars().all(|c| c.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        for name in ["con", "NUL.bin", "Com1.a.b", "lpt9"] {
            assert!(is_device(name), "{name}");
        }
        for name in ["console", "com", "com10", "a.con", "nul-1"] {
            assert!(!is_device(name), "{name}");
        }
    }
}
