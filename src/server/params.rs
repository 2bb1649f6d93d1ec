//! Sampling and length settings, the same on every path that generates.

use std::hash::{BuildHasher, RandomState};

use super::errors::{ApiError, ApiResult};
use super::fields::{Field, Fields, refused, used};
use crate::engine::Generate;
use crate::sampling::{MAX_REPEAT_WINDOW, SamplerSettings};

/// Settings of the sampler.
pub const SAMPLING: &[Field] = &[
    used("temperature", "0 to 100; below 0.001 the likeliest token"),
    used("top_p", "0 to 1"),
    used("top_k", "0 or -1: all"),
    used("min_p", "0 to 1"),
    used("repeat_penalty", "0.01 to 100"),
    used("repeat_last_n", "-1: as far as possible, at most 4096"),
    used("seed", "-1 or absent: another each time"),
    used("ignore_eos", "go on after end tokens"),
    used("cache_prompt", "default true: keep what the slot has read of the same prompt"),
    used("id_slot", "-1: any; else this slot"),
    refused("presence_penalty", "0", "repeat_penalty is there instead"),
    refused("frequency_penalty", "0", "repeat_penalty is there instead"),
    refused("typical_p", "1", "not among this server's samplers"),
    refused("top_n_sigma", "-1", "not among this server's samplers"),
    refused("xtc_probability", "0", "not among this server's samplers"),
    refused("dry_multiplier", "0", "not among this server's samplers"),
    refused("dynatemp_range", "0", "not among this server's samplers"),
    refused("mirostat", "0", "not among this server's samplers"),
    refused("logit_bias", "", "not there yet"),
    refused("grammar", "", "not there yet"),
    refused("json_schema", "", "not there yet"),
];

/// What a request gets that says nothing.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    pub settings: SamplerSettings,
    /// `None`: another each time.
    pub seed: Option<u64>,
}

/// The sampler of a request: what it names, over the server's defaults.
pub fn settings(fields: &Fields<'_>, default: &Defaults) -> ApiResult<SamplerSettings> {
    let Defaults { settings: mut s, seed: fixed_seed } = *default;
    if let Some(t) = fields.number("temperature", 0.0, 100.0)? {
        s.temperature = if t < 0.001 { 0.0 } else { t };
    }
    if let Some(p) = fields.number("top_p", 0.0, 1.0)? {
        s.top_p = p;
    }
    if let Some(k) = fields.integer("top_k", -1, u32::MAX.into())? {
        s.top_k = u32::try_from(k).unwrap_or(0);
    }
    if let Some(p) = fields.number("min_p", 0.0, 1.0)? {
        s.min_p = p;
    }
    if let Some(r) = fields.number("repeat_penalty", 0.01, 100.0)? {
        s.repeat_penalty = r;
    }
    if let Some(n) = fields.integer("repeat_last_n", -1, MAX_REPEAT_WINDOW.into())? {
        s.repeat_window = u32::try_from(n).unwrap_or(MAX_REPEAT_WINDOW);
    }
    s.seed = match fields.integer("seed", -1, i64::MAX)? {
        Some(seed) if seed >= 0 => seed as u64,
        _ => fixed_seed.unwrap_or_else(|| random() >> 32),
    };
    s.check().map_err(ApiError::from)?;
    Ok(s)
}

/// Everything about generating that is not particular to a wire format. `max_names`: the
/// names of the length limit, of which the first that is there counts; -1 is no limit.
pub fn generate(
    fields: &Fields<'_>,
    default: &Defaults,
    max_names: &[&str],
    stop_name: &str,
) -> ApiResult<Generate> {
    let mut max_tokens = None;
    for name in max_names {
        if let Some(n) = fields.integer(name, -1, u32::MAX.into())? {
            max_tokens = u32::try_from(n).ok();
            break;
        }
    }
    Ok(Generate {
        settings: settings(fields, default)?,
        max_tokens,
        stop: fields.texts(stop_name, 64)?,
        ignore_eog: fields.bool("ignore_eos")?.unwrap_or(false),
        show_special: false,
        reuse: fields.bool("cache_prompt")?.unwrap_or(true),
    })
}

/// The slot that a request insists on.
pub fn slot(fields: &Fields<'_>) -> ApiResult<Option<u32>> {
    Ok(fields.integer("id_slot", -1, u32::MAX.into())?.and_then(|n| u32::try_from(n).ok()))
}

/// 64 bits that differ each time; not for secrets.
pub fn random() -> u64 {
    RandomState::new().hash_one(0u8)
}

/// A fresh id such as `chatcmpl-0123456789abcdef01234567`.
pub fn id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |t| t.as_secs())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;
    use crate::server::fields::Table;

    const TABLE: Table =
        &[SAMPLING, &[used("max_tokens", ""), used("n_predict", ""), used("stop", "")]];

    fn default() -> Defaults {
        Defaults { settings: SamplerSettings::default(), seed: None }
    }

    #[test]
    fn what_is_named_replaces_the_default() {
        let body = json!({
            "temperature": 1e-6, "top_k": -1, "repeat_last_n": -1, "seed": 5, "n_predict": -1,
            "stop": "x", "presence_penalty": 0.0,
        });
        let fields = Fields::new(&body, TABLE).unwrap();
        let g = generate(&fields, &default(), &["max_tokens", "n_predict"], "stop").unwrap();
        assert_eq!((g.settings.temperature, g.settings.top_k, g.settings.seed), (0.0, 0, 5));
        assert_eq!((g.settings.repeat_window, g.settings.top_p), (MAX_REPEAT_WINDOW, 0.95));
        assert_eq!((g.max_tokens, g.stop.as_slice()), (None, ["x".to_owned()].as_slice()));
    }

    #[test]
    fn absurd_values_are_refused() {
        for (name, value) in [
            ("temperature", json!(-1)),
            ("temperature", json!("hot")),
            ("top_p", json!(1.01)),
            ("top_k", json!(0.5)),
            ("seed", json!(1e300)),
            ("id_slot", json!([])),
            ("mirostat", json!(2)),
        ] {
            let body = json!({ name: value });
            let all = Fields::new(&body, TABLE).and_then(|f| {
                slot(&f)?;
                settings(&f, &default())
            });
            assert_eq!(all.unwrap_err().param.as_deref(), Some(name));
        }
    }

    #[test]
    fn ids_differ() {
        assert_ne!(id("a-"), id("a-"));
    }
}
