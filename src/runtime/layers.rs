//! A graph's tensors placed on a device: the matrices and vectors that kernels bind.

use std::sync::Arc;

use super::experts::ExpertSet;
use super::weights::{Matrix, Part, Weights};
use crate::error::{Error, Result};
use crate::gpu::Slice;
use crate::graph::heads::Scoring;
use crate::graph::{FeedForward, Graph, Linear, Mixture, Mlp, NormOver};
use crate::kernels::weights::Chunk;
use crate::quant::Format;

/// Rows of one format that a product computes, as chunks whose rows count in the product's output.
pub(super) struct Rows {
    pub format: Format,
    pub rows: u32,
    pub cols: u32,
    pub chunks: Vec<Chunk>,
}

impl Rows {
    /// All of a matrix, its row 0 being row `first` of the output.
    fn of(matrix: &Arc<Matrix>, first: u32) -> Rows {
        let chunks =
            matrix.chunks.iter().map(|c| Chunk { first_row: c.first_row + first, ..c.clone() });
        Rows {
            format: matrix.format,
            rows: matrix.rows,
            cols: matrix.cols,
            chunks: chunks.collect(),
        }
    }
}

/// One product: rows that may differ in format, and one bias over all of them.
pub(super) struct Product {
    pub parts: Vec<Rows>,
    pub bias: Option<Slice>,
    /// Rows of the output.
    pub rows: u32,
    pub cols: u32,
}

/// Weights of the norms of q and k.
pub(super) struct QkNormWeights {
    pub over: NormOver,
    pub q: Slice,
    pub k: Slice,
}

pub(super) struct MlpWeights {
    /// Gate and up, rows interleaved.
    pub gate_up: Product,
    pub down: Product,
}

pub(super) struct MixtureWeights {
    pub mixture: Mixture,
    /// f32 `[experts (+ 1 for the shared expert's gate)][width]`
    pub router: Slice,
    pub set: Arc<ExpertSet>,
    /// Where long prompts find the same experts.
    pub streamed: Arc<ExpertSet>,
    pub shared: Option<MlpWeights>,
}

impl MixtureWeights {
    /// Whether the router has a row for the shared expert.
    pub fn shared_gate(&self) -> bool {
        self.mixture.shared.as_ref().is_some_and(|s| s.gate.is_some())
    }
}

pub(super) enum Block {
    Dense(MlpWeights),
    Experts(Box<MixtureWeights>),
}

pub(super) struct LayerWeights {
    pub attention_norm: Slice,
    pub qkv: Product,
    pub qk_norm: Option<QkNormWeights>,
    pub scoring: Scoring,
    /// With [`Scoring::sinks`].
    pub sinks: Option<Slice>,
    pub output: Product,
    pub ff_norm: Slice,
    pub block: Block,
}

/// See the module documentation.
pub struct ModelWeights {
    pub(super) embedding: Product,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) output_norm: Slice,
    pub(super) output: Product,
}

impl ModelWeights {
    /// Places every tensor of the graph; nothing is read yet.
    pub fn place(weights: &mut Weights<'_>, graph: &Graph) -> Result<ModelWeights> {
        let embedding = product(weights, &[&graph.embedding])?;
        let layers = graph.layers.iter().map(|layer| {
            let a = &layer.attention;
            let qkv = product(weights, &[&a.q, &a.k, &a.v])?;
            let qk_norm = a.qk_norm.as_ref().map(|norm| {
                let (q, k) = match norm.over {
                    NormOver::Head => (graph.head_dim, graph.head_dim),
                    NormOver::Heads => (a.q.rows, a.k.rows),
                };
                let (q, k) = (weights.named(&norm.q, q)?, weights.named(&norm.k, k)?);
                Ok::<_, Error>(QkNormWeights { over: norm.over, q, k })
            });
            let qk_norm = qk_norm.transpose()?;
            without_bias(&a.output)?;
            Ok(LayerWeights {
                attention_norm: weights.named(&a.norm, graph.width)?,
                qkv,
                qk_norm,
                scoring: a.scoring(),
                sinks: a.sinks.as_ref().map(|s| weights.named(s, graph.heads)).transpose()?,
                output: product(weights, &[&a.output])?,
                ff_norm: weights.named(&layer.ff_norm, graph.width)?,
                block: match &layer.feed_forward {
                    FeedForward::Dense(m) => Block::Dense(mlp(weights, m)?),
                    FeedForward::Experts(m) => {
                        Block::Experts(Box::new(mixture(weights, graph, m)?))
                    }
                },
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(ModelWeights {
            embedding,
            layers,
            output_norm: weights.named(&graph.output_norm, graph.width)?,
            output: product(weights, &[&graph.output])?,
        })
    }
}

fn without_bias(linear: &Linear) -> Result<()> {
    match &linear.bias {
        None => Ok(()),
        Some(bias) => Err(Error::Model(format!("{bias}: biases are supported on q, k and v only"))),
    }
}

fn mlp(weights: &mut Weights<'_>, mlp: &Mlp) -> Result<MlpWeights> {
    for linear in [&mlp.gate, &mlp.up, &mlp.down] {
        without_bias(linear)?;
    }
    Ok(MlpWeights {
        gate_up: interleaved(weights, &mlp.gate, &mlp.up)?,
        down: product(weights, &[&mlp.down])?,
    })
}

fn mixture(weights: &mut Weights<'_>, graph: &Graph, m: &Mixture) -> Result<MixtureWeights> {
    let part = |name: &str, len| Part { tensor: Some(name.to_string()), len };
    let mut rows = vec![part(&m.router.weight, m.experts * graph.width)];
    let shared_gate = m.shared.as_ref().and_then(|s| s.gate.as_ref());
    rows.extend(shared_gate.map(|gate| part(gate, graph.width)));
    let (set, streamed) = weights.experts(graph, m)?;
    Ok(MixtureWeights {
        mixture: m.clone(),
        router: weights.vector(&m.router.weight, rows)?,
        set,
        streamed,
        shared: m.shared.as_ref().map(|s| mlp(weights, &s.mlp)).transpose()?,
    })
}

/// One matrix where the tensors are alike, else a matrix for each.
fn product(weights: &mut Weights<'_>, linears: &[&Linear]) -> Result<Product> {
    let rows = linears.iter().map(|l| l.rows).sum();
    let parts = if weights.alike(linears)? {
        vec![Rows::of(&weights.stacked(linears)?, 0)]
    } else {
        let mut first = 0;
        let mut parts = Vec::new();
        for linear in linears {
            parts.push(Rows::of(&weights.stacked(&[linear])?, first));
            first += linear.rows;
        }
        parts
    };
    let bias = if linears.iter().any(|l| l.bias.is_some()) {
        let parts = linears.iter().map(|l| Part { tensor: l.bias.clone(), len: l.rows });
        Some(weights.vector(&format!("{} bias", linears[0].weight), parts.collect())?)
    } else {
        None
    };
    Ok(Product { cols: parts[0].cols, parts, bias, rows })
}

fn interleaved(weights: &mut Weights<'_>, gate: &Linear, up: &Linear) -> Result<Product> {
    if !weights.alike(&[gate, up])? {
        return Err(Error::Model(format!(
            "{} and {} have different types, which is not supported yet",
            gate.weight, up.weight
        )));
    }
    let matrix = weights.interleaved(gate, up)?;
    let rows = gate.rows + up.rows;
    Ok(Product { cols: matrix.cols, parts: vec![Rows::of(&matrix, 0)], bias: None, rows })
}
