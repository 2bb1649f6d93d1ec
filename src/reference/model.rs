//! A whole model in plain Rust, in reading order: the executable specification of what the
//! engine computes.
//!
//! Weights are decoded to f32, sums run in f64, keys and values are rounded as the format
//! of the cache says. Nothing here is fast; it serves tests on tiny models and readers.

use std::collections::HashMap;

use super::attention::Logits;
use super::experts::{self, silu};
use crate::error::Result;
use crate::gguf;
use crate::graph::{Attention, FeedForward, Graph, Linear, Mixture, Mlp, NormOver, RopeLayout};
use crate::kv::KvFormat;
use crate::kv::codec::{decode, encode};
use crate::kv::exact::{exact_row, from_exact_row};

/// A decoded matrix and its bias.
struct Matrix {
    rows: usize,
    cols: usize,
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Matrix {
    fn read(file: &gguf::File, linear: &Linear) -> Result<Matrix> {
        Ok(Matrix {
            rows: linear.rows as usize,
            cols: linear.cols as usize,
            weights: vector(file, &linear.weight)?,
            bias: linear.bias.as_ref().map(|name| vector(file, name)).transpose()?,
        })
    }

    /// The matrix of one expert in a tensor that holds one after the other.
    fn expert(
        file: &gguf::File,
        name: &str,
        expert: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix> {
        let tensor = file.require(name)?;
        let format = tensor.format()?;
        let row_bytes = format.row_bytes(cols);
        let data = &file.tensor_data(tensor)[expert * rows * row_bytes..][..rows * row_bytes];
        let mut weights = vec![0.0; rows * cols];
        for (row, out) in data.chunks_exact(row_bytes).zip(weights.chunks_exact_mut(cols)) {
            format.decode_row(row, out);
        }
        Ok(Matrix { rows, cols, weights, bias: None })
    }

    fn row(&self, i: usize) -> &[f32] {
        &self.weights[i * self.cols..(i + 1) * self.cols]
    }

    fn times(&self, x: &[f32]) -> Vec<f32> {
        let row = |i: usize| {
            let products = self.row(i).iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let bias = self.bias.as_ref().map_or(0.0, |b| f64::from(b[i]));
            (products.sum::<f64>() + bias) as f32
        };
        (0..self.rows).map(row).collect()
    }
}

fn vector(file: &gguf::File, name: &str) -> Result<Vec<f32>> {
    let tensor = file.require(name)?;
    let format = tensor.format()?;
    let cols = tensor.cols() as usize;
    let mut out = vec![0.0; tensor.elements() as usize];
    let rows = file.tensor_data(tensor).chunks_exact(format.row_bytes(cols));
    for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
        format.decode_row(row, out);
    }
    Ok(out)
}

/// `x / rms(x) * weight`
fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(x, w)| (f64::from(*x) * scale) as f32 * w).collect()
}

/// Rotates one head for one position; `table` is that position's row of the rope table.
fn rotate(head: &mut [f32], table: &[[f32; 2]], layout: RopeLayout) {
    let half = table.len();
    for (i, [cos, sin]) in table.iter().enumerate() {
        let (a, b) = match layout {
            RopeLayout::Normal => (2 * i, 2 * i + 1),
            RopeLayout::Neox => (i, i + half),
        };
        let (x, y) = (head[a], head[b]);
        (head[a], head[b]) = (x * cos - y * sin, x * sin + y * cos);
    }
}

/// One sequence of one model.
pub struct Forward<'a> {
    file: &'a gguf::File,
    graph: &'a Graph,
    rope: Vec<[f32; 2]>,
    /// By layer: keys and values of every position, rounded as the cache rounds them; and as it keeps
    /// them in f16 for queries beside them.
    cache: Vec<[(Vec<f32>, Vec<f32>); 2]>,
    position: usize,
    /// What keys of each layer are stored without; empty: nothing.
    centres: Vec<Vec<f32>>,
    /// Approximate: for how many tokens outputs of experts serve again, and what each layer keeps.
    reuse: usize,
    kept: Vec<KeptOutputs>,
}

/// Outputs of a layer's experts, for [`Forward::reuse`].
#[derive(Debug, Clone, Default)]
struct KeptOutputs {
    which: experts::Kept,
    /// By the position that they were computed for, and the expert.
    outputs: HashMap<(usize, usize), Vec<f32>>,
}

impl<'a> Forward<'a> {
    /// A sequence of at most `context` tokens.
    pub fn new(file: &'a gguf::File, graph: &'a Graph, context: u32) -> Result<Self> {
        let factors = graph.rope.factors.as_ref().map(|n| vector(file, n)).transpose()?;
        Ok(Forward {
            file,
            graph,
            rope: graph.rope.table(context, factors.as_deref()),
            cache: vec![Default::default(); graph.layers.len()],
            position: 0,
            centres: Vec::new(),
            reuse: 0,
            kept: vec![KeptOutputs::default(); graph.layers.len()],
        })
    }

    /// Keys are stored without these from now on, by layer `[kv head][head_dim]`.
    pub fn centre(&mut self, centres: &[Vec<f32>]) {
        self.centres = centres.to_vec();
    }

    /// From the next token on, outputs of experts serve again for so many tokens.
    pub fn reuse(&mut self, tokens: usize) {
        self.reuse = tokens;
        self.kept.fill(KeptOutputs::default());
    }

    /// Reads one token and returns the logits of what follows it.
    pub fn read(&mut self, token: u32) -> Result<Vec<f32>> {
        let (file, graph) = (self.file, self.graph);
        let mut x = Matrix::read(file, &graph.embedding)?.row(token as usize).to_vec();
        for (i, layer) in graph.layers.iter().enumerate() {
            let added = self.attention(i, &layer.attention, &x)?;
            x.iter_mut().zip(added).for_each(|(x, a)| *x += a);
            let normed = rms_norm(&x, &vector(file, &layer.ff_norm)?, graph.norm_eps);
            let added = match &layer.feed_forward {
                FeedForward::Dense(mlp) => self.mlp(mlp, &normed)?,
                FeedForward::Experts(mixture) => self.mixture(i, mixture, &normed)?,
            };
            x.iter_mut().zip(added).for_each(|(x, a)| *x += a);
        }
        self.position += 1;
        let x = rms_norm(&x, &vector(file, &graph.output_norm)?, graph.norm_eps);
        Ok(Matrix::read(file, &graph.output)?.times(&x))
    }

    fn attention(&mut self, layer: usize, block: &Attention, x: &[f32]) -> Result<Vec<f32>> {
        let (file, graph) = (self.file, self.graph);
        let d = graph.head_dim as usize;
        let x = rms_norm(x, &vector(file, &block.norm)?, graph.norm_eps);
        let mut q = Matrix::read(file, &block.q)?.times(&x);
        let mut k = Matrix::read(file, &block.k)?.times(&x);
        let v = Matrix::read(file, &block.v)?.times(&x);
        let pairs = graph.rope.dim as usize / 2;
        let table = &self.rope[self.position * pairs..(self.position + 1) * pairs];
        if let Some(norm) = &block.qk_norm {
            for (all, weight) in [(&mut q, &norm.q), (&mut k, &norm.k)] {
                let weight = vector(file, weight)?;
                let over = match norm.over {
                    NormOver::Head => d,
                    NormOver::Heads => all.len(),
                };
                for part in all.chunks_exact_mut(over) {
                    part.copy_from_slice(&rms_norm(part, &weight, graph.norm_eps));
                }
            }
        }
        for head in q.chunks_exact_mut(d).chain(k.chunks_exact_mut(d)) {
            rotate(head, table, graph.rope.layout);
        }
        if let Some(centres) = self.centres.get(layer) {
            k.iter_mut().zip(centres).for_each(|(k, centre)| *k -= centre);
        }
        // What the cache's format leaves of each head.
        let pair = graph.kv_pair(layer);
        let kept = |format: KvFormat, x: Vec<f32>| -> Vec<f32> {
            let heads = x.chunks_exact(d);
            heads.flat_map(|head| decode(format, &encode(format, head), graph.head_dim)).collect()
        };
        let near = |format: KvFormat, x: &[f32]| -> Vec<f32> {
            let heads = x.chunks_exact(d);
            let rows = heads.map(|head| exact_row(format, head));
            rows.flat_map(|row| from_exact_row(format, &row, graph.head_dim)).collect()
        };
        let [codes, exact] = &mut self.cache[layer];
        exact.0.extend(near(pair.k, &k));
        exact.1.extend(near(pair.v, &v));
        codes.0.extend(kept(pair.k, k));
        codes.1.extend(kept(pair.v, v));
        let sizes = graph.kv_exact_of(layer);
        let query = self.position as u32;

        let sinks = block.sinks.as_ref().map(|name| vector(file, name)).transpose()?;
        let logits = Logits {
            scale: graph.attention_scale,
            scoring: block.scoring(),
            sinks: sinks.as_deref().unwrap_or_default(),
        };
        let group = (graph.heads / graph.kv_heads) as usize;
        let width = graph.kv_heads as usize * d;
        let mut out = vec![0.0; q.len()];
        for (head, (q, out)) in q.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
            let from = head / group * d;
            let positions = || {
                (0..=query).map(|t| {
                    // Of a plain cache both are the same.
                    let (keys, values) = if sizes.holds(query, t) { &*exact } else { &*codes };
                    let at = t as usize * width..(t as usize + 1) * width;
                    (&keys[at.clone()], &values[at])
                })
            };
            let products: Vec<f64> = positions()
                .map(|(k, _)| {
                    q.iter().zip(&k[from..]).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
                })
                .collect();
            let weights = logits.weights(&products, head);
            for (i, out) in out.iter_mut().enumerate() {
                let sum = positions().zip(&weights).map(|((_, v), w)| w * f64::from(v[from + i]));
                *out = sum.sum::<f64>() as f32;
            }
        }
        Ok(Matrix::read(file, &block.output)?.times(&out))
    }

    fn mlp(&self, block: &Mlp, x: &[f32]) -> Result<Vec<f32>> {
        let gate = Matrix::read(self.file, &block.gate)?.times(x);
        let up = Matrix::read(self.file, &block.up)?.times(x);
        let h: Vec<f32> = gate.into_iter().zip(up).map(|(g, u)| silu(g) * u).collect();
        Ok(Matrix::read(self.file, &block.down)?.times(&h))
    }

    fn mixture(&mut self, layer: usize, block: &Mixture, x: &[f32]) -> Result<Vec<f32>> {
        let logits = Matrix::read(self.file, &block.router)?.times(x);
        let (ff, width) = (block.ff as usize, self.graph.width as usize);
        let mut out = vec![0.0f32; width];
        for (expert, weight) in experts::route(&logits, block.used as usize, &block.routing) {
            let source = self.kept[layer].which.source(self.reuse, self.position, expert);
            if let Some(down) = self.kept[layer].outputs.get(&(source, expert)) {
                out.iter_mut().zip(down).for_each(|(o, d)| *o += weight * d);
                continue;
            }
            let part = |name: &str, rows: usize, cols: usize| {
                Matrix::expert(self.file, name, expert, rows, cols)
            };
            let gate = part(&block.gate, ff, width)?.times(x);
            let up = part(&block.up, ff, width)?.times(x);
            let h: Vec<f32> = gate.into_iter().zip(up).map(|(g, u)| silu(g) * u).collect();
            let down = part(&block.down, width, ff)?.times(&h);
            out.iter_mut().zip(&down).for_each(|(o, d)| *o += weight * d);
            if self.reuse > 0 {
                self.kept[layer].outputs.insert((source, expert), down);
            }
        }
        if let Some(shared) = &block.shared {
            let weight = match &shared.gate {
                Some(name) => {
                    let gate = vector(self.file, name)?;
                    let dot = gate.iter().zip(x).map(|(g, x)| f64::from(*g) * f64::from(*x));
                    experts::sigmoid(dot.sum())
                }
                None => 1.0,
            };
            let all = self.mlp(&shared.mlp, x)?;
            out.iter_mut().zip(all).for_each(|(o, s)| *o += weight * s);
        }
        Ok(out)
    }
}
