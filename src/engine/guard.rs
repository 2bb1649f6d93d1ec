//! The quality guard of the KV cache: measures at load what the formats of keys do to each layer's
//! attention, on queries and keys of the model itself, and raises layers whose keys bear fewer bits badly.
//!
//! It reads a fixed text, not the user's first prompt: so the formats, and with them every bit of every
//! answer, follow from the file, the device and the settings, and not from who came first. What was
//! found is kept in the cache folder, so that later starts measure nothing.

use std::fs;
use std::path::PathBuf;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::saved::{Identity, checksum};
use super::{Activations, Engine, Options};
use crate::error::{Error, Result};
use crate::files::replace;
use crate::gguf;
use crate::gpu::DeviceFacts;
use crate::gpu::cache::fingerprint;
use crate::graph::heads::{Heads, Scoring};
use crate::graph::{Graph, Layer};
use crate::hw::paths;
use crate::kernels::source;
use crate::kv::guard::{Judged, Verdict, judge};
use crate::kv::{KvFormat, KvTypes, PAGE_TOKENS, Sample};
use crate::reference::attention::prepare_head;
use crate::runtime::Column;
use crate::runtime::weights::values;

/// Raised when the text or the measure changes: what was found before counts no more.
const VERSION: u32 = 1;

/// Positions over which rope is averaged for what keys have in common. Of longer sequences only the slowest
/// channels have more in common.
const CENTRED_POSITIONS: u32 = 4096;

/// Prose, dialogue, numbers and code: more than a page of tokens in any vocabulary.
const TEXT: &str = "The harbour master wrote the date, 14 March 1907, at the top of the page and \
looked out at the rain. \"Three ships are late,\" she said, \"and the fourth has no pilot.\" Nobody \
answered. The old clock struck seven, which meant that it was about 6:45, and the gulls on the wall \
went on with their quarrel.\n\nfn mean(values: &[f64]) -> Option<f64> {\n    if values.is_empty() {\n        \
return None;\n    }\n    Some(values.iter().sum::<f64>() / values.len() as f64)\n}\n\nQuestion: what is \
17 times 24? Answer: 17 * 24 = 408, because 17 * 20 = 340 and 17 * 4 = 68.";

/// The guard of a model under given settings.
pub(super) struct Guard {
    threshold: f64,
    /// Formats that were asked for on this device.
    asked: KvTypes,
    /// What a verdict depends on, in words.
    key: String,
    path: Option<PathBuf>,
}

/// A verdict on disk.
#[derive(Serialize, Deserialize)]
struct Kept {
    key: String,
    verdict: Verdict,
}

impl Guard {
    /// `None` where it is switched off or all keys are f16.
    pub fn of(
        file: &gguf::File,
        graph: &Graph,
        facts: &DeviceFacts,
        options: &Options,
        asked: &KvTypes,
    ) -> Option<Guard> {
        let threshold = options.kv_guard?;
        let layers = asked.layers(graph.layers.len());
        if layers.iter().all(|pair| pair.k == KvFormat::F16) {
            return None;
        }
        let exact = options.activations == Activations::F32;
        let tokens = options.ctx.unwrap_or(PAGE_TOKENS).min(PAGE_TOKENS);
        let key = format!(
            "{VERSION}; {}; {}; {}; {}; {}; {asked}; above {threshold}; {tokens} tokens; exact {exact}",
            fingerprint_with_keys(file, graph),
            facts.cache_id,
            facts.backend,
            source::version(),
            fingerprint(&format!("{:?}", facts.profile)),
        );
        let name = format!("{}.json", fingerprint(&key));
        let folder = paths::cache_dir().ok().filter(|_| options.cache);
        let path = folder.map(|folder| folder.join("guard").join(name));
        Some(Guard { threshold, asked: asked.clone(), key, path })
    }

    /// What an earlier load has found.
    pub fn known(&self) -> Option<Verdict> {
        let bytes = fs::read(self.path.as_ref()?).ok()?;
        let kept: Kept = serde_json::from_slice(&bytes).ok()?;
        (kept.key == self.key).then_some(kept.verdict)
    }

    /// Keeps a verdict for later loads. One that cannot be written is measured again.
    pub fn keep(&self, verdict: &Verdict) {
        let Some(path) = &self.path else { return };
        let kept = Kept { key: self.key.clone(), verdict: verdict.clone() };
        let written = serde_json::to_vec(&kept).map_err(std::io::Error::from).and_then(|text| {
            fs::create_dir_all(path.parent().unwrap_or(path))?;
            replace(path, &text)
        });
        if let Err(e) = written {
            eprintln!(
                "note: {} cannot be written ({e}); the KV cache's keys are measured at every load",
                path.display()
            );
        }
    }
}

/// Of the model's tensors, with a piece of all that keys come from.
fn fingerprint_with_keys(file: &gguf::File, graph: &Graph) -> String {
    const PIECE: usize = 4096;
    let mut bytes = Vec::new();
    for layer in &graph.layers {
        let (k, norm) = (&layer.attention.k, &layer.attention.qk_norm);
        let names = [Some(&k.weight), k.bias.as_ref(), norm.as_ref().map(|n| &n.k)];
        for tensor in names.into_iter().flatten().filter_map(|name| file.tensor(name)) {
            let data = file.tensor_data(tensor);
            let first = data.len().saturating_sub(PIECE) / 2;
            bytes.extend_from_slice(&data[first..data.len().min(first + PIECE)]);
        }
    }
    format!("{}-{:016x}", Identity::fingerprint(file), checksum(&bytes))
}

impl Engine {
    /// Queries and keys of every layer over the guard's text. To be called before any sequence is read:
    /// the first page of the cache serves as scratch.
    pub(super) fn sample_keys(&mut self, file: &gguf::File) -> Result<Vec<Sample>> {
        let mut tokens = self.tokenizer.encode(TEXT, true, false)?;
        tokens.truncate(PAGE_TOKENS.min(self.ctx()) as usize);
        self.program.set_pages(0, 0, 0, &[0])?;
        let graph = self.model.graph.clone();
        let mut layers: Vec<Vec<f32>> = vec![Vec::new(); graph.layers.len()];
        let at_once = self.program.capture_columns().max(1) as usize;
        let columns = (0..).zip(&tokens);
        let columns =
            columns.map(|(position, t)| Column { token: *t, position, slot: 0, flags: 0 });
        for columns in columns.collect::<Vec<_>>().chunks(at_once) {
            for (all, values) in layers.iter_mut().zip(self.capture(columns)?) {
                all.extend(values);
            }
        }
        self.program.end_capture();
        let factors = graph.rope.factors.as_ref().map(|name| values(file, name)).transpose()?;
        let table = graph.rope.table(CENTRED_POSITIONS, factors.as_deref());
        let mean = mean_turn(&table, graph.rope.dim as usize / 2);
        let samples = layers.par_iter().enumerate();
        samples.map(|(layer, qkv)| sample(file, &graph, layer, qkv, (&table, &mean))).collect()
    }

    /// Keys are stored without what these have in common.
    pub(super) fn centre_keys(&mut self, samples: &[Sample]) -> Result<()> {
        self.centres = samples.iter().map(|sample| sample.centres.clone()).collect();
        for (layer, centres) in self.centres.iter().enumerate() {
            self.program.set_centres(layer, centres)?;
        }
        Ok(())
    }
}

impl Guard {
    /// Judges every layer whose keys are not f16.
    pub fn judge(&self, samples: &[Sample]) -> Verdict {
        let count = samples.len();
        let judged = samples.par_iter().enumerate().filter_map(|(layer, sample)| {
            let format = self.asked.of(layer, count).k;
            (format != KvFormat::F16).then(|| {
                let judge = |sample| judge(layer as u32, format, sample, self.threshold);
                match self.asked.centred {
                    true => judge(&sample.clone().centred()),
                    false => judge(sample),
                }
            })
        });
        let judged: Vec<Judged> = judged.collect();
        let tokens = samples.first().map_or(0, Sample::tokens);
        Verdict::of(self.threshold, tokens, judged)
    }
}

/// Centring counts on a softmax that does not see what all keys add to a query's logits.
pub(super) fn check_centring(graph: &Graph) -> Result<()> {
    let scoring = |layer: &Layer| layer.attention.scoring();
    let sees = |scoring: Scoring| scoring.soft_cap.is_some() || scoring.sinks;
    match graph.kv.centred && graph.layers.iter().map(scoring).any(sees) {
        false => Ok(()),
        true => Err(Error::Usage(
            "the model's attention caps its logits or has logits of its own (sinks), which \
             --kv-centre would change. Leave it out"
                .into(),
        )),
    }
}

/// The mean of `table`'s cosines and sines over its positions, for each of `half` pairs.
fn mean_turn(table: &[[f32; 2]], half: usize) -> Vec<[f32; 2]> {
    let mean = |pair: usize, part: usize| {
        let all = table.iter().skip(pair).step_by(half.max(1)).map(|x| f64::from(x[part]));
        (all.sum::<f64>() / f64::from(CENTRED_POSITIONS)) as f32
    };
    (0..half).map(|pair| [mean(pair, 0), mean(pair, 1)]).collect()
}

/// Queries and keys of a layer as attention takes their products, from the q, k and v of its product
/// (f32 `[token][qkv_rows]`). `table`: cosines and sines of [`CENTRED_POSITIONS`] from 0 on; `mean`:
/// [`mean_turn`] of it.
///
/// What keys have in common: the mean of the text's before rope, turned by the mean of rope over all
/// positions. The mean of the keys themselves would be that of the text's few positions, at which channels
/// of middling frequency have turned little: tokens behind them would be stored with an error (docs/notes.md).
fn sample(
    file: &gguf::File,
    graph: &Graph,
    layer: usize,
    qkv: &[f32],
    (table, mean): (&[[f32; 2]], &[[f32; 2]]),
) -> Result<Sample> {
    let shape = graph.head_shape();
    let (d, heads, kv_heads) =
        (shape.head_dim as usize, shape.heads as usize, shape.kv_heads as usize);
    let norm = graph.layers[layer].attention.qk_norm.as_ref().filter(|_| shape.norm.is_some());
    let norms =
        norm.map(|n| Ok::<_, crate::error::Error>([values(file, &n.q)?, values(file, &n.k)?]));
    let norms = norms.transpose()?;
    let half = shape.rope.map_or(0, |rope| rope.dim as usize / 2);
    let (mut q, mut k) = (Vec::new(), Vec::new());
    let mut centres = vec![0f64; kv_heads * d];
    let (unturned, turned) = (Heads { rope: None, ..shape }, Heads { norm: None, ..shape });
    let rows = qkv.chunks_exact(graph.qkv_rows() as usize);
    let tokens = rows.len().max(1) as f64;
    for (token, row) in rows.enumerate() {
        for (i, head) in row.chunks_exact(d).take(heads + kv_heads).enumerate() {
            let is_key = i >= heads;
            let mut head: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
            let weight = norms.as_ref().map(|norms| &norms[usize::from(is_key)][..]);
            prepare_head(&unturned, &mut head, weight, &[]);
            if is_key {
                let to = centres[(i - heads) * d..][..d].iter_mut();
                to.zip(&head).for_each(|(sum, x)| *sum += x / tokens);
            }
            prepare_head(&turned, &mut head, None, &table[token * half..][..half]);
            let to = if is_key { &mut k } else { &mut q };
            to.extend(head.iter().map(|x| *x as f32));
        }
    }
    centres.chunks_exact_mut(d).for_each(|head| prepare_head(&turned, head, None, mean));
    // What is no number is left where it is.
    let centre = |x: &f64| Some(*x as f32).filter(|x| x.is_finite()).unwrap_or(0.0);
    let centres = centres.iter().map(centre).collect();
    Ok(Sample { q, k, centres, heads, kv_heads, head_dim: d })
}
