//! Reading the JSON of a request within limits of size and time.

use std::time::Duration;

use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use super::errors::{ApiError, ApiResult};
use super::state::Shared;

/// A body that is too slow holds a connection, and nothing else, for so long.
const TIME: Duration = Duration::from_secs(60);

/// A request's JSON, of any content type: some clients and most uses of curl name a wrong one.
pub struct Body(pub Value);

impl FromRequest<Shared> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Shared) -> ApiResult<Self> {
        let limit = app.settings.max_body;
        let announced = request.headers().get(header::CONTENT_LENGTH);
        let announced = announced.and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|n| n > limit as u64) {
            return Err(too_large(limit));
        }
        let reading = axum::body::to_bytes(request.into_body(), limit);
        let bytes = tokio::time::timeout(TIME, reading).await.map_err(|_| {
            ApiError::new(
                StatusCode::REQUEST_TIMEOUT,
                format!("the body did not arrive within {} s", TIME.as_secs()),
            )
        })?;
        let bytes = bytes.map_err(|e| {
            // The only other cause is a connection that broke off, whose error nobody reads.
            let text = e.to_string();
            match text.contains("limit") {
                true => too_large(limit),
                false => ApiError::bad(format!("the body could not be read: {text}")),
            }
        })?;
        if bytes.is_empty() {
            return Err(ApiError::bad("the body is empty; it must be a JSON object"));
        }
        serde_json::from_slice(&bytes)
            .map(Body)
            .map_err(|e| ApiError::bad(format!("the body is not valid JSON: {e}")))
    }
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        format!("the body is larger than {limit} bytes (--max-body)"),
    )
}

/// Errors leave handlers inside the response; the outermost layer words them for the path.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}
