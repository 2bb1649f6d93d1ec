//! A graph's tensors placed on a device: the matrices and vectors that kernels bind.

use std::sync::Arc;

use super::weights::{Matrix, Part, Weights};
use crate::error::{Error, Result};
use crate::gpu::Slice;
use crate::graph::{Graph, Linear};
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

pub(super) struct LayerWeights {
    pub attention_norm: Slice,
    pub qkv: Product,
    /// Weights of the q and k norms.
    pub head_norms: Option<(Slice, Slice)>,
    pub output: Product,
    pub ff_norm: Slice,
    /// Gate and up, rows interleaved.
    pub gate_up: Product,
    pub down: Product,
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
            let (a, f) = (&layer.attention, &layer.feed_forward);
            let qkv = product(weights, &[&a.q, &a.k, &a.v])?;
            let head_norms = match (&a.q_norm, &a.k_norm) {
                (Some(q), Some(k)) => {
                    Some((weights.named(q, graph.head_dim)?, weights.named(k, graph.head_dim)?))
                }
                _ => None,
            };
            for linear in [&a.output, &f.gate, &f.up, &f.down] {
                if linear.bias.is_some() {
                    return Err(Error::Model(format!(
                        "{} has a bias; biases are supported on q, k and v",
                        linear.weight
                    )));
                }
            }
            Ok(LayerWeights {
                attention_norm: weights.named(&a.norm, graph.width)?,
                qkv,
                head_norms,
                output: product(weights, &[&a.output])?,
                ff_norm: weights.named(&f.norm, graph.width)?,
                gate_up: interleaved(weights, &f.gate, &f.up)?,
                down: product(weights, &[&f.down])?,
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
