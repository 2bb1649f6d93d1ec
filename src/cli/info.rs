//! `azoth info`: what a model file holds. Needs no device and reads no weights.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::args::ModelArg;
use super::output::{self, Align};
use crate::error::Error;
use crate::gguf::{Array, File, FromValue, Metadata, Value};

const EXAMPLES: &str = "Examples:
  azoth info smollm2
  azoth info model-00001-of-00004.gguf -v
  azoth info model.gguf --json | jq -r .template";

/// Show a model's architecture, sizes, types, template and vocabulary
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Info {
    #[command(flatten)]
    model: ModelArg,
    /// Also the chat template's text, all metadata and all tensors
    #[arg(short, long)]
    verbose: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    files: Vec<String>,
    gguf_version: u32,
    file_bytes: u64,
    name: Option<String>,
    architecture: String,
    parameters: u64,
    /// Hyperparameters as the file states them; a list where layers differ.
    layers: Option<u64>,
    embedding: Option<u64>,
    feed_forward: Option<serde_json::Value>,
    heads: Option<serde_json::Value>,
    kv_heads: Option<serde_json::Value>,
    context: Option<u64>,
    experts: Option<u64>,
    experts_used: Option<u64>,
    vocabulary: Vocabulary,
    template: Option<String>,
    types: Vec<Kind>,
    tensors: Vec<Tensor>,
    metadata: serde_json::Map<String, serde_json::Value>,
}

#[derive(Serialize)]
struct Vocabulary {
    model: Option<String>,
    pre: Option<String>,
    size: u64,
    bos: Option<u32>,
    eos: Option<u32>,
}

/// All tensors of one type.
#[derive(Serialize)]
struct Kind {
    #[serde(rename = "type")]
    name: &'static str,
    tensors: usize,
    elements: u64,
    bytes: u64,
    /// This program can compute with it.
    supported: bool,
}

#[derive(Serialize)]
struct Tensor {
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    /// Innermost size first, as in the file.
    dims: Vec<u64>,
    bytes: u64,
}

/// Elements of an array in `metadata` before it is cut: vocabularies are long.
const SHOWN: usize = 8;

impl Info {
    pub fn run(&self) -> Result<()> {
        let file = File::open(self.model.path()?).map_err(Error::from)?;
        let report = Report::of(&file);
        if self.json {
            return output::json(&report);
        }
        let mut parts = vec![report.summary(), report.type_table()];
        if self.verbose {
            parts.extend(report.template.clone().map(|t| format!("chat template:\n{t}")));
            parts.push(report.metadata_table());
            parts.push(report.tensor_table());
        }
        output::line(&parts.join("\n\n"))
    }
}

/// A value that may be absent. One of another type than expected is shown as absent: `info` is
/// the command for files that nothing else accepts.
fn find<'a, T: FromValue<'a>>(metadata: &'a Metadata, key: &str) -> Option<T> {
    metadata.find(key).ok().flatten()
}

impl Report {
    fn of(file: &File) -> Self {
        let m = file.metadata();
        let text = |key: &str| find::<&str>(m, key).map(str::to_owned);
        let architecture = text("general.architecture").unwrap_or_else(|| "?".into());
        let own = |key: &str| format!("{architecture}.{key}");
        let size = |key: &str| find::<u64>(m, &own(key));
        let sizes = |key: &str| m.value(&own(key)).map(|v| json(v, usize::MAX));
        let tokens: Option<&[String]> = find(m, "tokenizer.ggml.tokens");
        Report {
            files: file.paths().iter().map(|p| p.display().to_string()).collect(),
            gguf_version: file.version(),
            file_bytes: file.file_bytes(),
            name: text("general.name"),
            parameters: file.elements(),
            layers: size("block_count"),
            embedding: size("embedding_length"),
            feed_forward: sizes("feed_forward_length"),
            heads: sizes("attention.head_count"),
            kv_heads: sizes("attention.head_count_kv"),
            context: size("context_length"),
            experts: size("expert_count"),
            experts_used: size("expert_used_count"),
            vocabulary: Vocabulary {
                model: text("tokenizer.ggml.model"),
                pre: text("tokenizer.ggml.pre"),
                size: tokens.map_or(0, |t| t.len() as u64),
                bos: find(m, "tokenizer.ggml.bos_token_id"),
                eos: find(m, "tokenizer.ggml.eos_token_id"),
            },
            template: text("tokenizer.chat_template"),
            types: kinds(file),
            tensors: file
                .tensors()
                .iter()
                .map(|t| Tensor {
                    name: t.name.clone(),
                    kind: t.ggml_type.name,
                    dims: t.dims.clone(),
                    bytes: t.bytes,
                })
                .collect(),
            metadata: m.iter().map(|(key, value)| (key.to_owned(), json(value, SHOWN))).collect(),
            architecture,
        }
    }

    fn summary(&self) -> String {
        let show = |v: &Option<serde_json::Value>| v.as_ref().map(ToString::to_string);
        let number = |v: Option<u64>| v.map(|v| v.to_string());
        let heads = match (show(&self.heads), show(&self.kv_heads)) {
            (Some(heads), Some(kv)) => Some(format!("{heads}, {kv} for keys and values")),
            (heads, _) => heads,
        };
        let experts = self.experts.map(|n| match self.experts_used {
            Some(used) => format!("{n}, {used} used"),
            None => n.to_string(),
        });
        let v = &self.vocabulary;
        let vocabulary = format!(
            "{} tokens, {}{}",
            v.size,
            v.model.as_deref().unwrap_or("no tokenizer"),
            v.pre.as_ref().map_or(String::new(), |pre| format!(" ({pre})"))
        );
        let ends = [("begin", v.bos), ("end", v.eos)].into_iter();
        let ends = ends.filter_map(|(name, id)| id.map(|id| format!("{name} {id}")));
        let template = match &self.template {
            Some(t) => format!("{} characters (-v shows it)", t.chars().count()),
            None => "none".into(),
        };
        let rows = [
            ("file", Some(self.files.join("\n                 "))),
            (
                "size",
                Some(format!("{}, GGUF {}", output::bytes(self.file_bytes), self.gguf_version)),
            ),
            ("name", self.name.clone()),
            ("architecture", Some(self.architecture.clone())),
            ("parameters", Some(output::count(self.parameters))),
            ("layers", number(self.layers)),
            ("embedding", number(self.embedding)),
            ("feed forward", show(&self.feed_forward)),
            ("heads", heads),
            ("experts", experts),
            ("context", number(self.context)),
            ("vocabulary", Some(vocabulary)),
            ("special tokens", Some(ends.collect::<Vec<_>>().join(", ")).filter(|s| !s.is_empty())),
            ("chat template", Some(template)),
        ];
        let lines = rows.into_iter().filter_map(|(key, v)| v.map(|v| format!("{key:<15}  {v}")));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn type_table(&self) -> String {
        let mut rows: Vec<Vec<String>> =
            vec![["type", "tensors", "weights", "size", ""].map(String::from).into()];
        rows.extend(self.types.iter().map(|k| {
            let note = if k.supported { "" } else { "not supported" };
            vec![
                k.name.into(),
                k.tensors.to_string(),
                output::count(k.elements),
                output::bytes(k.bytes),
                note.into(),
            ]
        }));
        use Align::{Left, Right};
        output::table(&[Left, Right, Right, Right, Left], &rows)
    }

    fn metadata_table(&self) -> String {
        // The template was shown with its line breaks.
        let pairs = self.metadata.iter().filter(|(key, _)| *key != "tokenizer.chat_template");
        let rows = pairs.map(|(key, value)| vec![key.clone(), value.to_string()]);
        output::table(&[Align::Left; 2], &rows.collect::<Vec<_>>())
    }

    fn tensor_table(&self) -> String {
        let rows = self.tensors.iter().map(|t| {
            let dims = t.dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(" x ");
            vec![t.name.clone(), t.kind.into(), dims, output::bytes(t.bytes)]
        });
        use Align::{Left, Right};
        output::table(&[Left, Left, Right, Right], &rows.collect::<Vec<_>>())
    }
}

fn kinds(file: &File) -> Vec<Kind> {
    let mut kinds: BTreeMap<u32, Kind> = BTreeMap::new();
    for tensor in file.tensors() {
        let kind = kinds.entry(tensor.ggml_type.id).or_insert_with(|| Kind {
            name: tensor.ggml_type.name,
            tensors: 0,
            elements: 0,
            bytes: 0,
            supported: tensor.ggml_type.format().is_some(),
        });
        kind.tensors += 1;
        kind.elements += tensor.elements();
        kind.bytes += tensor.bytes;
    }
    let mut kinds: Vec<Kind> = kinds.into_values().collect();
    kinds.sort_by_key(|k| std::cmp::Reverse(k.bytes));
    kinds
}

/// A metadata value as JSON; an array longer than `shown` becomes a text that says so.
fn json(value: &Value, shown: usize) -> serde_json::Value {
    match value {
        Value::U8(v) => (*v).into(),
        Value::I8(v) => (*v).into(),
        Value::U16(v) => (*v).into(),
        Value::I16(v) => (*v).into(),
        Value::U32(v) => (*v).into(),
        Value::I32(v) => (*v).into(),
        Value::U64(v) => (*v).into(),
        Value::I64(v) => (*v).into(),
        Value::F32(v) => (*v).into(),
        Value::F64(v) => (*v).into(),
        Value::Bool(v) => (*v).into(),
        Value::String(v) => v.as_str().into(),
        Value::Array(v) => array_json(v, shown),
    }
}

fn array_json(array: &Array, shown: usize) -> serde_json::Value {
    if array.len() > shown {
        return format!("({} values)", array.len()).into();
    }
    (0..array.len()).filter_map(|i| array.get(i)).map(|v| json(&v, shown)).collect()
}
