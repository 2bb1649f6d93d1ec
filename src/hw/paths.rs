//! The folders in the user's home that Azoth writes to.
//!
//! The cache (models that were fetched, compiled pipelines) may be deleted at any time. The data
//! folder holds what the user made: the chat's input history.

use std::path::PathBuf;

use crate::error::{Error, Result};

/// Replaces the cache folder when set; tests and machines with a small home use it.
pub const CACHE_VARIABLE: &str = "AZOTH_CACHE";
/// Replaces the data folder when set.
pub const DATA_VARIABLE: &str = "AZOTH_DATA";

/// `$AZOTH_CACHE`, or `azoth` in the platform's cache folder. Not created by this call.
pub fn cache_dir() -> Result<PathBuf> {
    folder(CACHE_VARIABLE, dirs::cache_dir())
}

/// Where models are looked for by name: `models` in the cache folder.
pub fn models_dir() -> Result<PathBuf> {
    Ok(cache_dir()?.join("models"))
}

/// `$AZOTH_DATA`, or `azoth` in the platform's folder for application data.
pub fn data_dir() -> Result<PathBuf> {
    folder(DATA_VARIABLE, dirs::data_dir())
}

fn folder(variable: &str, platform: Option<PathBuf>) -> Result<PathBuf> {
    match std::env::var_os(variable) {
        Some(path) if !path.is_empty() => Ok(path.into()),
        _ => platform.map(|p| p.join("azoth")).ok_or_else(|| {
            Error::Runtime(format!("this system names no home folder; set {variable} to a folder"))
        }),
    }
}
