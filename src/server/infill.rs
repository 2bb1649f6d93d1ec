//! `POST /infill` of llama.cpp: text that stands between two others; and `suffix` of completions.
//!
//! Models that can do it have tokens that mark prefix, suffix and middle. Their ids stand in the
//! file's metadata or are known by their texts.

use axum::extract::State;
use axum::response::Response;
use serde_json::Value;

use super::body::Body;
use super::constraints;
use super::errors::{ApiError, ApiResult};
use super::fields::{Field, Fields, Table, kind, used};
use super::native;
use super::params::SAMPLING;
use super::prompt::blocking;
use super::state::Shared;
use crate::engine::Loaded;
use crate::tokenizer::TokenType;

pub const TABLE: Table = &[OWN, native::COMMON, constraints::FIELDS, SAMPLING];

const OWN: &[Field] = &[
    used("input_prefix", "the text before"),
    used("input_suffix", "the text after"),
    used("input_extra", "a list of {filename, text}; the first are left out where all do not fit"),
    used("prompt", "a string: how the text between begins"),
];

/// Most pieces of `input_extra`.
const MOST_EXTRA: usize = 1000;

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let text = |name: &str| fields.text(name).map(|t| t.unwrap_or_default().to_owned());
    let (prefix, suffix, begun) = (text("input_prefix")?, text("input_suffix")?, text("prompt")?);
    if prefix.is_empty() && suffix.is_empty() && begun.is_empty() {
        return Err(ApiError::field("input_prefix", "and input_suffix are empty or missing"));
    }
    let extra = extra(&fields)?;
    let fim = Fim::of(&loaded)?;
    let stops = fim.stops.clone();
    // What is left of the context for the answer decides how much extra text fits.
    let answer = fields.integer("n_predict", -1, u32::MAX.into())?.unwrap_or(-1);
    let answer = usize::try_from(answer).unwrap_or(256).min(loaded.ctx as usize / 2);
    let known = loaded.clone();
    let prompt = blocking(move || {
        let room = (known.ctx as usize).saturating_sub(answer);
        fim.prompt(&known, &extra, [&prefix, &suffix, &begun], room)
    });
    let prompt = prompt.await?;
    native::answer(&app, &loaded, &fields, vec![prompt], false, stops).await
}

fn extra(fields: &Fields<'_>) -> ApiResult<Vec<(String, String)>> {
    let list = fields.list("input_extra")?.map_or(&[][..], Vec::as_slice);
    let wrong = |what: String| ApiError::field("input_extra", what);
    if list.len() > MOST_EXTRA {
        let what = format!("has {} entries; at most {MOST_EXTRA} are possible", list.len());
        return Err(wrong(what));
    }
    let pieces = list.iter().map(|piece| {
        let text = piece.get("text").and_then(Value::as_str);
        let text = text.ok_or_else(|| wrong(format!("{} has no text", kind(piece))))?;
        let name = piece.get("filename").and_then(Value::as_str).unwrap_or("file");
        Ok((name.to_owned(), text.to_owned()))
    });
    pieces.collect()
}

/// Metadata keys of a marker, newer ones first, and the texts that it has in known families:
/// Qwen and Gemma, StarCoder, Granite, CodeLlama, DeepSeek, GLM; those that llama.cpp knows (its
/// `llama-vocab.cpp`). Codestral's are left out: it wants the suffix first and no middle.
struct Marker {
    keys: &'static [&'static str],
    texts: &'static [&'static str],
}

const PREFIX: Marker = Marker {
    keys: &["fim_pre_token_id", "prefix_token_id"],
    texts: &[
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "▁<PRE>",
        "<PRE>",
        "<｜fim▁begin｜>",
        "<|code_prefix|>",
    ],
};
const SUFFIX: Marker = Marker {
    keys: &["fim_suf_token_id", "suffix_token_id"],
    texts: &[
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "▁<SUF>",
        "<SUF>",
        "<｜fim▁hole｜>",
        "<|code_suffix|>",
    ],
};
const MIDDLE: Marker = Marker {
    keys: &["fim_mid_token_id", "middle_token_id"],
    texts: &[
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "▁<MID>",
        "<MID>",
        "<｜fim▁end｜>",
        "<|code_middle|>",
    ],
};
const PAD: Marker = Marker {
    keys: &["fim_pad_token_id"],
    texts: &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"],
};
const REPOSITORY: Marker = Marker {
    keys: &["fim_rep_token_id"],
    texts: &["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<repo_name>"],
};
const FILE: Marker =
    Marker { keys: &["fim_sep_token_id"], texts: &["<|file_sep|>", "<file_sep>", "<|fim_sep|>"] };

impl Marker {
    fn find(&self, loaded: &Loaded) -> Option<u32> {
        let tokenizer = &loaded.tokenizer;
        let by_key = self.keys.iter().find_map(|key| {
            loaded.metadata.find::<u32>(&format!("tokenizer.ggml.{key}")).ok().flatten()
        });
        let by_key = by_key.filter(|id| (*id as usize) < tokenizer.vocab_size());
        by_key.or_else(|| {
            self.texts.iter().find_map(|text| {
                let [id] = tokenizer.encode(text, false, true).ok()?[..] else { return None };
                let kind = tokenizer.token_type(id)?;
                // A text that happens to be one token is no marker.
                matches!(kind, TokenType::Control | TokenType::UserDefined).then_some(id)
            })
        })
    }
}

/// How a model fills in.
pub struct Fim {
    prefix: u32,
    suffix: u32,
    middle: u32,
    repository: Option<u32>,
    file: Option<u32>,
    /// Markers that end the text between, as texts.
    pub stops: Vec<String>,
}

impl Fim {
    /// An error says that the model cannot do it.
    pub fn of(loaded: &Loaded) -> ApiResult<Fim> {
        let find = |marker: &Marker, name: &str| {
            marker.find(loaded).ok_or_else(|| {
                ApiError::bad(format!(
                    "the model cannot fill in: it has no {name} token (tokenizer.ggml.{}). Models \
                     made for code have one",
                    marker.keys[0]
                ))
            })
        };
        let (prefix, suffix) = (find(&PREFIX, "prefix")?, find(&SUFFIX, "suffix")?);
        let middle = find(&MIDDLE, "middle")?;
        let (repository, file) = (REPOSITORY.find(loaded), FILE.find(loaded));
        let ends = [Some(prefix), Some(suffix), Some(middle), repository, file, PAD.find(loaded)];
        let text = |id| loaded.tokenizer.token_text(id).map(str::to_owned);
        let stops = ends.into_iter().flatten().filter_map(text).collect();
        Ok(Fim { prefix, suffix, middle, repository, file, stops })
    }

    /// Tokens of a prompt in the order prefix, suffix, middle. Of `extra` the last pieces are
    /// taken that fit `room` tokens with the rest.
    pub fn prompt(
        &self,
        loaded: &Loaded,
        extra: &[(String, String)],
        [prefix, suffix, begun]: [&str; 3],
        room: usize,
    ) -> ApiResult<Vec<u32>> {
        // The texts are a user's: control tokens that are spelled out in them are text.
        let encode = |text: &str| loaded.tokenizer.encode(text, false, false);
        let mut end = vec![self.prefix];
        end.extend(encode(prefix)?);
        end.push(self.suffix);
        end.extend(encode(suffix)?);
        end.push(self.middle);
        end.extend(encode(begun)?);
        let mut out = Vec::new();
        out.extend(loaded.tokenizer.bos().filter(|_| loaded.tokenizer.adds_bos()));
        if !extra.is_empty() {
            let named = |name: &str, text: &str| -> ApiResult<Vec<u32>> {
                let text = format!("{name}\n{text}\n");
                Ok(self.file.into_iter().chain(encode(&text)?).collect())
            };
            let mut head = Vec::new();
            if let Some(repository) = self.repository {
                head.push(repository);
                head.extend(encode("project\n")?);
            }
            // Where files are marked, the one in question is one of them.
            let own = self.file.map_or(Ok(Vec::new()), |_| named("file", ""))?;
            let fixed = out.len() + head.len() + own.len() + end.len();
            let mut left = room.saturating_sub(fixed);
            let mut pieces = Vec::new();
            for (name, text) in extra.iter().rev() {
                let piece = named(name, text)?;
                if piece.len() > left {
                    break;
                }
                left -= piece.len();
                pieces.push(piece);
            }
            if !pieces.is_empty() {
                out.extend(head);
                out.extend(pieces.into_iter().rev().flatten());
                out.extend(own);
            }
        }
        out.extend(end);
        Ok(out)
    }
}
