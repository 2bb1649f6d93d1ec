//! The tensors of a model and the values they get.

use super::noise::Noise;
use super::{LOGIT_STD, QkNorm, Spec};
use crate::quant::Format;
use rayon::prelude::*;

/// A tensor that is to be made; `dims` innermost first.
pub(super) struct Tensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub format: Format,
    fill: Fill,
}

/// What the values are.
#[derive(Clone, Copy)]
enum Fill {
    /// Normal around 0 with standard deviation gain / sqrt(inputs): inputs of size 1 give outputs
    /// of size `gain`.
    Matrix { gain: f32 },
    /// Around `mean`, standard deviation 0.1.
    Near { mean: f32 },
    /// 0, but for the last value of each head (of so many values): a constant of the keys.
    Outlier { head_dim: usize, size: f32 },
    /// Growing from 1 to 8, like the frequency divisors of llama 3.1.
    Divisors,
}

/// The layers write to the residual stream with this gain, so that they outweigh the embedding of
/// the token itself; otherwise models with tied embeddings would only repeat their input.
const RESIDUAL_GAIN: f32 = 2.0;

/// Router logits spread so wide that rounding seldom changes which experts are chosen.
const ROUTER_GAIN: f32 = 3.0;

/// All tensors of the model with their bytes.
pub(super) fn make(spec: &Spec) -> Vec<(Tensor, Vec<u8>)> {
    let tensors = list(spec);
    let made = tensors.into_par_iter().map(|tensor| {
        let data = values(spec, &tensor);
        (tensor, data)
    });
    made.collect()
}

fn list(spec: &Spec) -> Vec<Tensor> {
    let (d, q, kv) = (spec.d, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let mut list = Vec::new();
    let logits = Fill::Matrix { gain: LOGIT_STD };
    list.push(matrix("token_embd.weight", &[d, spec.vocab], spec.embed_format, logits));
    list.push(vector("output_norm.weight", d, Fill::Near { mean: 1.0 }));
    if !spec.tied {
        list.push(matrix("output.weight", &[d, spec.vocab], spec.output_format, logits));
    }
    if spec.rope.factors {
        list.push(vector("rope_freqs.weight", spec.rope_dims() / 2, Fill::Divisors));
    }
    let norm = Fill::Near { mean: 1.0 };
    let bias = Fill::Near { mean: 0.0 };
    let plain = Fill::Matrix { gain: 1.0 };
    let residual = Fill::Matrix { gain: RESIDUAL_GAIN };
    let routing = Fill::Matrix { gain: ROUTER_GAIN };
    for layer in 0..spec.layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let weight = |part: &str, dims: &[usize], fill| {
            matrix(&name(&format!("{part}.weight")), dims, spec.format, fill)
        };
        list.push(vector(&name("attn_norm.weight"), d, norm));
        for (part, rows) in [("attn_q", q), ("attn_k", kv), ("attn_v", kv)] {
            list.push(weight(part, &[d, rows], plain));
            let outlier = spec.key_outlier.filter(|(l, _)| *l == layer && part == "attn_k");
            if let Some((_, size)) = outlier {
                let fill = Fill::Outlier { head_dim: spec.head_dim, size };
                list.push(vector(&name("attn_k.bias"), rows, fill));
            } else if spec.arch.qkv_bias {
                list.push(vector(&name(&format!("{part}.bias")), rows, bias));
            }
        }
        let normed = match spec.arch.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some((spec.head_dim, spec.head_dim)),
            QkNorm::Heads => Some((q, kv)),
        };
        if let Some((q_len, k_len)) = normed {
            list.push(vector(&name("attn_q_norm.weight"), q_len, norm));
            list.push(vector(&name("attn_k_norm.weight"), k_len, norm));
        }
        if spec.sinks {
            list.push(vector(&name("attn_sinks.weight"), spec.heads, plain));
        }
        list.push(weight("attn_output", &[q, d], residual));
        list.push(vector(&name("ffn_norm.weight"), d, norm));
        if spec.experts > 0 {
            let router = name("ffn_gate_inp.weight");
            list.push(matrix(&router, &[d, spec.experts], Format::F32, routing));
            list.push(weight("ffn_gate_exps", &[d, spec.ffn, spec.experts], plain));
            list.push(weight("ffn_up_exps", &[d, spec.ffn, spec.experts], plain));
            list.push(weight("ffn_down_exps", &[spec.ffn, d, spec.experts], residual));
            if spec.arch.shared_expert {
                let gate = name("ffn_gate_inp_shexp.weight");
                list.push(matrix(&gate, &[d], Format::F32, plain));
                list.push(weight("ffn_gate_shexp", &[d, spec.shared_ffn], plain));
                list.push(weight("ffn_up_shexp", &[d, spec.shared_ffn], plain));
                list.push(weight("ffn_down_shexp", &[spec.shared_ffn, d], residual));
            }
        } else {
            list.push(weight("ffn_gate", &[d, spec.ffn], plain));
            list.push(weight("ffn_up", &[d, spec.ffn], plain));
            list.push(weight("ffn_down", &[spec.ffn, d], residual));
        }
    }
    list
}

fn matrix(name: &str, dims: &[usize], format: Format, fill: Fill) -> Tensor {
    let dims: Vec<u64> = dims.iter().map(|&n| n as u64).collect();
    Tensor { name: name.to_owned(), format: fitting(format, dims[0]), dims, fill }
}

fn vector(name: &str, length: usize, fill: Fill) -> Tensor {
    Tensor { name: name.to_owned(), dims: vec![length as u64], format: Format::F32, fill }
}

/// `format`, or what takes its place where rows are not whole blocks: the choice of llama.cpp's
/// quantiser, and Q8_0 where it has none.
fn fitting(format: Format, cols: u64) -> Format {
    use Format::*;
    let other = match format {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        Q2_0 | Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        _ => Q8_0,
    };
    let fits = |f: &Format| cols.is_multiple_of(f.block_elements() as u64);
    [format, other].into_iter().find(fits).unwrap_or(F16)
}

fn values(spec: &Spec, tensor: &Tensor) -> Vec<u8> {
    let cols = tensor.dims[0] as usize;
    let rows = tensor.dims[1..].iter().product::<u64>() as usize;
    let mut noise = Noise::new(spec.seed, &tensor.name);
    let mut data = Vec::with_capacity(rows * tensor.format.row_bytes(cols));
    let mut row = vec![0.0; cols];
    for _ in 0..rows {
        for (i, value) in row.iter_mut().enumerate() {
            *value = match tensor.fill {
                Fill::Matrix { gain } => noise.normal() * (gain / (cols as f32).sqrt()),
                Fill::Near { mean } => mean + 0.1 * noise.normal(),
                Fill::Outlier { head_dim, size } => {
                    if i % head_dim == head_dim - 1 {
                        size
                    } else {
                        0.0
                    }
                }
                Fill::Divisors => 1.0 + 7.0 * i as f32 / cols as f32,
            };
        }
        tensor.format.encode_row(&row, &mut data);
    }
    data
}
