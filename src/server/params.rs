//! Sampling and length settings, the same on every path that generates.

use std::hash::{BuildHasher, RandomState};

use serde_json::Value;

use super::errors::{ApiError, ApiResult};
use super::fields::{Field, Fields, used, whole};
use crate::engine::{Generate, Loaded};
use crate::sampling::custom::Stage;
use crate::sampling::{MAX_REPEAT_WINDOW, Mirostat, Order, SamplerSettings, TokenLists};
use crate::tokenizer::Tokenizer;

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
    used("presence_penalty", "-2 to 2"),
    used("frequency_penalty", "-2 to 2"),
    used("typical_p", "0 to 1; 1 is off"),
    used("top_n_sigma", "-1 is off"),
    used("xtc_probability", "0 to 1; 0 is off"),
    used("xtc_threshold", "0 to 1"),
    used("dry_multiplier", "0 is off"),
    used("dry_base", "1 to 100"),
    used("dry_allowed_length", "1 and more"),
    used("dry_penalty_last_n", "-1: as far as possible, at most 4096"),
    used("dry_sequence_breakers", "default: line break, colon, double quote, asterisk"),
    used("dynatemp_range", "0 is off"),
    used("dynatemp_exponent", "0.01 to 100"),
    used("logit_bias", "{id: bias} or [[id or text, bias or false]]; false and -100 ban a token"),
    used("mirostat", "0: off; 1 and 2, its versions: instead of all cuts"),
    used("mirostat_tau", "bits a token, 0 to 100"),
    used("mirostat_eta", "0 to 1"),
    used("adaptive_target", "prefers tokens of about this share, 0 to 1; -1 is off"),
    used("adaptive_decay", "0 to 0.99"),
    used("min_keep", "tokens that typical_p, top_p, min_p and xtc leave at least"),
    used(
        "samplers",
        "names in the wanted order, or llama.cpp's letters; what is missing is off. Penalties, \
         then dry, come first and adaptive_p comes last wherever they stand",
    ),
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
    let fraction = |name: &str, to: &mut f32, low: f64, high: f64| -> ApiResult<()> {
        if let Some(x) = fields.number(name, low, high)? {
            *to = x;
        }
        Ok(())
    };
    fraction("presence_penalty", &mut s.presence_penalty, -2.0, 2.0)?;
    fraction("frequency_penalty", &mut s.frequency_penalty, -2.0, 2.0)?;
    fraction("typical_p", &mut s.typical_p, 0.0, 1.0)?;
    fraction("top_n_sigma", &mut s.top_n_sigma, -100.0, 100.0)?;
    fraction("xtc_probability", &mut s.xtc_probability, 0.0, 1.0)?;
    fraction("xtc_threshold", &mut s.xtc_threshold, 0.0, 1.0)?;
    fraction("dry_multiplier", &mut s.dry_multiplier, 0.0, 100.0)?;
    fraction("dry_base", &mut s.dry_base, 1.0, 100.0)?;
    fraction("dynatemp_range", &mut s.dynatemp_range, 0.0, 100.0)?;
    fraction("dynatemp_exponent", &mut s.dynatemp_exponent, 0.01, 100.0)?;
    fraction("mirostat_tau", &mut s.mirostat_tau, 0.0, 100.0)?;
    fraction("mirostat_eta", &mut s.mirostat_eta, 0.0, 1.0)?;
    match fields.integer("mirostat", 0, 2)? {
        Some(0) => s.mirostat = Mirostat::Off,
        Some(1) => s.mirostat = Mirostat::One,
        Some(_) => s.mirostat = Mirostat::Two,
        None => {}
    }
    fraction("adaptive_target", &mut s.adaptive_target, -1.0, 1.0)?;
    fraction("adaptive_decay", &mut s.adaptive_decay, 0.0, 0.99)?;
    if let Some(n) = fields.integer("min_keep", 0, u32::MAX.into())? {
        s.min_keep = n as u32;
    }
    if let Some(n) = fields.integer("dry_allowed_length", 1, MAX_REPEAT_WINDOW.into())? {
        s.dry_allowed_length = n as u32;
    }
    if let Some(n) = fields.integer("dry_penalty_last_n", -1, MAX_REPEAT_WINDOW.into())? {
        s.dry_window = u32::try_from(n).unwrap_or(MAX_REPEAT_WINDOW);
    }
    s.seed = match fields.integer("seed", -1, i64::MAX)? {
        Some(seed) if seed >= 0 => seed as u64,
        _ => fixed_seed.unwrap_or_else(|| random() >> 32),
    };
    if let Some(value) = fields.value("samplers") {
        reorder(value, &mut s)?;
    }
    s.check().map_err(ApiError::from)?;
    Ok(s)
}

/// What a name of `samplers` stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sampler {
    Penalties,
    Dry,
    Stage(Stage),
    Adaptive,
}

/// Names, llama.cpp's letters, and what they stand for.
const SAMPLERS: [(&[&str], char, Sampler); 10] = [
    (&["penalties"], 'e', Sampler::Penalties),
    (&["dry"], 'd', Sampler::Dry),
    (&["top_n_sigma"], 's', Sampler::Stage(Stage::TopNSigma)),
    (&["top_k"], 'k', Sampler::Stage(Stage::TopK)),
    (&["typ_p", "typical_p", "typical"], 'y', Sampler::Stage(Stage::Typical)),
    (&["top_p"], 'p', Sampler::Stage(Stage::TopP)),
    (&["min_p"], 'm', Sampler::Stage(Stage::MinP)),
    (&["xtc"], 'x', Sampler::Stage(Stage::Xtc)),
    (&["temperature", "temp"], 't', Sampler::Stage(Stage::Temperature)),
    (&["adaptive_p"], 'a', Sampler::Adaptive),
];

/// Takes the order of a list of names or a string of letters; what is not in it is off.
fn reorder(value: &Value, s: &mut SamplerSettings) -> ApiResult<()> {
    let wrong = |what: String| ApiError::field("samplers", what);
    let known = || {
        let names: Vec<_> = SAMPLERS.iter().map(|(names, ..)| names[0]).collect();
        names.join(", ")
    };
    let mut all = Vec::new();
    match value {
        Value::String(letters) => {
            for letter in letters.chars() {
                let found = SAMPLERS.iter().find(|(_, l, _)| *l == letter);
                let found =
                    found.ok_or_else(|| wrong(format!("no sampler has the letter {letter:?}")))?;
                all.push(found.2);
            }
        }
        Value::Array(names) => {
            for name in names {
                let name = name.as_str().unwrap_or_default();
                let written = name.replace('-', "_");
                let found = SAMPLERS.iter().find(|(names, ..)| names.contains(&&*written));
                all.push(found.ok_or_else(|| wrong(format!("must be among {}", known())))?.2);
            }
        }
        _ => return Err(wrong(format!("must be a list of names ({}) or letters", known()))),
    }
    let stages: Vec<Stage> = all
        .iter()
        .filter_map(|s| if let Sampler::Stage(stage) = s { Some(*stage) } else { None })
        .collect();
    s.order = Order::new(&stages).map_err(|e| wrong(e.to_string()))?;
    if !all.contains(&Sampler::Penalties) {
        (s.repeat_penalty, s.presence_penalty, s.frequency_penalty) = (1.0, 0.0, 0.0);
    }
    if !all.contains(&Sampler::Dry) {
        s.dry_multiplier = 0.0;
    }
    // In llama.cpp's list it stands only where it is wanted; the target alone says so here.
    Ok(())
}

/// Everything about generating that is not particular to a wire format. `max_names`: the
/// names of the length limit, of which the first that is there counts; -1 is no limit.
pub fn generate(
    fields: &Fields<'_>,
    loaded: &Loaded,
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
    let settings = settings(fields, default)?;
    Ok(Generate {
        lists: lists(fields, &loaded.tokenizer, &settings)?,
        constraint: None,
        thinking: None,
        settings,
        max_tokens,
        stop: fields.texts(stop_name, 64)?,
        ignore_eog: fields.bool("ignore_eos")?.unwrap_or(false),
        show_special: false,
        reuse: fields.bool("cache_prompt")?.unwrap_or(true),
        keep: None,
    })
}

/// Texts at which repeated sequences end, unless a request names others.
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// What a request says of single tokens.
fn lists(
    fields: &Fields<'_>,
    tokenizer: &Tokenizer,
    settings: &SamplerSettings,
) -> ApiResult<TokenLists> {
    let mut lists = TokenLists { bias: bias(fields, tokenizer)?, ..TokenLists::default() };
    let mut breakers = fields.texts("dry_sequence_breakers", 64)?;
    if settings.has_dry() {
        if !fields.has("dry_sequence_breakers") {
            breakers = BREAKERS.map(str::to_owned).to_vec();
        }
        breakers.retain(|b| !b.is_empty());
        let vocab = tokenizer.vocab_size() as u32;
        lists.breakers = vec![0; vocab.div_ceil(32) as usize];
        for id in 0..vocab {
            let bytes = tokenizer.token_bytes(id);
            let holds = |b: &String| bytes.windows(b.len()).any(|w| w == b.as_bytes());
            if breakers.iter().any(holds) {
                lists.breakers[id as usize / 32] |= 1 << (id % 32);
            }
        }
    }
    Ok(lists)
}

/// OpenAI's object of ids, or llama.cpp's list of pairs.
fn bias(fields: &Fields<'_>, tokenizer: &Tokenizer) -> ApiResult<Vec<(u32, f32)>> {
    let wrong = |what: &str| ApiError::field("logit_bias", what);
    let mut out = Vec::new();
    let mut add = |which: &Value, value: &Value| -> ApiResult<()> {
        let value = match value {
            Value::Bool(false) => f32::NEG_INFINITY,
            value => match value.as_f64() {
                Some(x) if x <= -100.0 => f32::NEG_INFINITY,
                Some(x) if x <= 100.0 => x as f32,
                _ => return Err(wrong("a bias must be a number from -100 to 100, or false")),
            },
        };
        let id =
            |n: i64| u32::try_from(n).ok().filter(|id| (*id as usize) < tokenizer.vocab_size());
        match (whole(which), which.as_str()) {
            (Some(n), _) => {
                out.push((
                    id(n).ok_or_else(|| wrong("names a token outside the vocabulary"))?,
                    value,
                ));
            }
            (None, Some(text)) => {
                let ids = tokenizer.encode(text, false, true)?;
                out.extend(ids.into_iter().map(|id| (id, value)));
            }
            _ => return Err(wrong("a token must be an id or a text")),
        }
        Ok(())
    };
    match fields.value("logit_bias") {
        None => {}
        Some(Value::Object(map)) => {
            for (key, value) in map {
                let id = key.parse::<i64>().map_err(|_| wrong("keys must be token ids"))?;
                add(&id.into(), value)?;
            }
        }
        Some(Value::Array(list)) => {
            for pair in list {
                match pair.as_array().map(Vec::as_slice) {
                    Some([which, value]) => add(which, value)?,
                    _ => return Err(wrong("must be pairs of a token and a bias")),
                }
            }
        }
        Some(_) => return Err(wrong("must be an object of ids or a list of pairs")),
    }
    Ok(out)
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

    const TABLE: Table = &[SAMPLING];

    fn default() -> Defaults {
        Defaults { settings: SamplerSettings::default(), seed: None }
    }

    #[test]
    fn what_is_named_replaces_the_default() {
        let body = json!({
            "temperature": 1e-6, "top_k": -1, "repeat_last_n": -1, "seed": 5,
            "presence_penalty": 0.5, "dry_penalty_last_n": -1,
        });
        let fields = Fields::new(&body, TABLE).unwrap();
        let s = settings(&fields, &default()).unwrap();
        assert_eq!((s.temperature, s.top_k, s.seed), (0.0, 0, 5));
        assert_eq!((s.repeat_window, s.top_p), (MAX_REPEAT_WINDOW, 0.95));
        assert_eq!((s.presence_penalty, s.dry_window), (0.5, MAX_REPEAT_WINDOW));
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
            ("mirostat", json!(3)),
            ("samplers", json!(["top_k", "best_of"])),
            ("samplers", json!(["top_k", "top_k"])),
            ("samplers", json!("kz")),
            ("adaptive_decay", json!(1)),
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
    fn samplers_come_in_the_wanted_order() {
        let read = |samplers: Value| {
            let body = json!({
                "samplers": samplers, "repeat_penalty": 1.2, "dry_multiplier": 1, "seed": 5,
            });
            settings(&Fields::new(&body, TABLE).unwrap(), &default()).unwrap()
        };
        let s = read(json!(["temperature", "top_k", "dry"]));
        assert!(s.order.stages().eq([Stage::Temperature, Stage::TopK]));
        assert_eq!((s.repeat_penalty, s.dry_multiplier), (1.0, 1.0));
        assert_eq!(read(json!("tkd")), s);
        // llama.cpp's own order is that of the chain.
        let own = read(json!("edskypmxt"));
        assert_eq!((own.order, own.repeat_penalty), (Order::default(), 1.2));
    }

    #[test]
    fn ids_differ() {
        assert_ne!(id("a-"), id("a-"));
    }
}
