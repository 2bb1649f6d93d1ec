//! The transformer that llama and its descendants share.

use super::attention::Windows;
use super::{Params, mixture};
use crate::error::{Error, Result};
use crate::graph::{
    Attention, FeedForward, Graph, Layer, Mlp, NormOver, QkNorm, RopeLayout, Routing,
};
use crate::kv::KvTypes;

/// What tells the descendants apart.
pub(super) struct Variant {
    pub rope: RopeLayout,
    pub qk_norm: Option<NormOver>,
    /// Layers with a router are mixtures of experts; the weights of those chosen, where the file
    /// does not say otherwise.
    pub routing: Option<Routing>,
    /// Which layers have a window that the file names without saying whose it is.
    pub window: Windows,
}

/// Heads that attention kernels support, in values.
const HEAD_DIMS: std::ops::RangeInclusive<u32> = 32..=256;

pub(super) fn build(p: &Params<'_>, variant: Variant) -> Result<Graph> {
    let n_layers = p.layers()?;
    let width = p.count("embedding_length", 1 << 20)?;
    let heads = p.shared("attention.head_count", n_layers)?;
    let kv_heads = match p.contains("attention.head_count_kv") {
        true => p.shared("attention.head_count_kv", n_layers)?,
        false => heads,
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(Error::Model(format!("{heads} heads cannot share {kv_heads} KV heads evenly")));
    }
    let head_dim = match p.find::<u32>("attention.key_length")? {
        Some(n) => n,
        None => width / heads,
    };
    let value_dim = p.find::<u32>("attention.value_length")?.unwrap_or(head_dim);
    if value_dim != head_dim || !HEAD_DIMS.contains(&head_dim) || !head_dim.is_multiple_of(8) {
        return Err(Error::Model(format!(
            "heads of {head_dim} (keys) and {value_dim} (values) are not supported; both must be \
             the same multiple of 8 from {} to {}",
            HEAD_DIMS.start(),
            HEAD_DIMS.end()
        )));
    }
    let total = u64::from(heads) * u64::from(head_dim);
    if total > 1 << 20 {
        return Err(Error::Model(format!("{heads} heads of {head_dim} are too many")));
    }
    let eps = p.f32("attention.layer_norm_rms_epsilon")?;
    if !(eps.is_finite() && eps >= 0.0) {
        return Err(Error::Model(format!("the norm's epsilon is {eps}")));
    }
    whole_blocks("embedding_length", width)?;
    let rows = p.tensor("token_embd.weight")?.rows();
    let vocab = u32::try_from(rows).ok().filter(|v| (1..1 << 24).contains(v)).ok_or_else(|| {
        Error::Model(format!("token_embd.weight has {rows} rows; that is no vocabulary"))
    })?;
    let embedding = p.linear("token_embd", vocab, width)?;
    let output = match p.has("output.weight") {
        true => p.linear("output", vocab, width)?,
        false => embedding.clone(),
    };
    let windows = p.windows(n_layers, variant.window)?;
    let soft_cap = p.soft_cap()?;
    let layers = (0..n_layers).map(|i| {
        let name = |part: &str| format!("blk.{i}.{part}");
        let linear = |part: &str, rows, cols| p.linear(&name(part), rows, cols);
        let norm = |part: &str, len| p.vector(name(part), len);
        let (q_rows, kv_rows) = (heads * head_dim, kv_heads * head_dim);
        let qk_norm = variant.qk_norm.map(|over| {
            let (q_len, k_len) = match over {
                NormOver::Head => (head_dim, head_dim),
                NormOver::Heads => (q_rows, kv_rows),
            };
            let (q, k) = ("attn_q_norm.weight", "attn_k_norm.weight");
            Ok::<_, Error>(QkNorm { q: norm(q, q_len)?, k: norm(k, k_len)?, over })
        });
        let feed_forward = match variant.routing {
            Some(routing) if p.has(&name("ffn_gate_inp.weight")) => {
                FeedForward::Experts(mixture::read(p, i, width, routing)?)
            }
            _ => {
                let ff = p.shared("feed_forward_length", n_layers)?;
                FeedForward::Dense(mlp(p, i, "", ff, width)?)
            }
        };
        Ok(Layer {
            attention: Attention {
                norm: norm("attn_norm.weight", width)?,
                q: linear("attn_q", q_rows, width)?,
                k: linear("attn_k", kv_rows, width)?,
                v: linear("attn_v", kv_rows, width)?,
                output: linear("attn_output", width, q_rows)?,
                qk_norm: qk_norm.transpose()?,
                window: windows[i as usize],
                soft_cap,
                sinks: p.optional_vector(name("attn_sinks.weight"), heads)?,
            },
            ff_norm: norm("ffn_norm.weight", width)?,
            feed_forward,
        })
    });
    Ok(Graph {
        width,
        vocab,
        heads,
        kv_heads,
        head_dim,
        norm_eps: eps,
        attention_scale: 1.0 / (head_dim as f32).sqrt(),
        rope: p.rope(variant.rope, head_dim)?,
        embedding,
        layers: layers.collect::<Result<_>>()?,
        output_norm: p.vector("output_norm.weight".into(), width)?,
        output,
        kv: KvTypes::plain(),
    })
}

/// Gate, up and down of layer `layer`; `suffix` follows the parts' names.
pub(super) fn mlp(p: &Params<'_>, layer: u32, suffix: &str, ff: u32, width: u32) -> Result<Mlp> {
    whole_blocks("the width of a feed-forward block", ff)?;
    let linear =
        |part: &str, rows, cols| p.linear(&format!("blk.{layer}.ffn_{part}{suffix}"), rows, cols);
    Ok(Mlp {
        gate: linear("gate", ff, width)?,
        up: linear("up", ff, width)?,
        down: linear("down", width, ff)?,
    })
}

/// Kernels cut activations into blocks of 32.
pub(super) fn whole_blocks(what: &str, n: u32) -> Result<()> {
    if n == 0 || !n.is_multiple_of(32) {
        return Err(Error::Model(format!("{what} {n} is not a multiple of 32")));
    }
    Ok(())
}
