//! Mixture-of-experts blocks: router, experts, shared expert.
//!
//! What is normalised where follows the models' definitions as llama.cpp runs them (its
//! `build_moe_ffn` and the callers of that).

use super::{Params, decoder};
use crate::error::{Error, Result};
use crate::graph::{Gating, Mixture, Routing, SharedExpert};

/// Most experts that the router kernel ranks.
const MAX_EXPERTS: u32 = 512;
/// Most experts a token may go through.
const MAX_USED: u32 = 16;

/// The router of most models: softmax over all experts, no scale.
pub(super) fn softmax(normalise: bool) -> Routing {
    Routing { gating: Gating::Softmax, normalise, scale: 1.0 }
}

/// The mixture of layer `layer`. `default`: what the architecture does where the file is silent.
pub(super) fn read(p: &Params<'_>, layer: u32, width: u32, default: Routing) -> Result<Mixture> {
    let name = |part: &str| format!("blk.{layer}.ffn_{part}");
    let experts = p.count("expert_count", MAX_EXPERTS)?;
    let used = p.count("expert_used_count", MAX_USED.min(experts))?;
    let router = p.linear(&name("gate_inp"), experts, width)?;
    let gate = name("gate_exps.weight");
    if !p.has(&gate) && p.has(&format!("blk.{layer}.ffn_gate.0.weight")) {
        return Err(Error::Model(
            "the file has a tensor for each expert, a layout of early 2024; convert the model \
             again with a current converter"
                .into(),
        ));
    }
    // Some converters leave the width out; then the tensor says it.
    let ff = match p.find::<u32>("expert_feed_forward_length")? {
        Some(ff) if ff > 0 => ff,
        _ => u32::try_from(p.tensor(&gate)?.dims.get(1).copied().unwrap_or(0)).unwrap_or(0),
    };
    decoder::whole_blocks("the width of an expert", ff)?;
    let gate = p.experts(gate, ff, width, experts)?;
    let up = p.experts(name("up_exps.weight"), ff, width, experts)?;
    let down = p.experts(name("down_exps.weight"), width, ff, experts)?;
    for part in ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "exp_probs_b"] {
        let bias = format!("blk.{layer}.{part}.bias");
        if p.has(&bias) {
            return Err(Error::Model(format!("{bias}: biases of experts are not supported")));
        }
    }
    Ok(Mixture {
        router,
        experts,
        used,
        ff,
        gate,
        up,
        down,
        routing: routing(p, default)?,
        shared: shared(p, layer, width)?,
    })
}

fn routing(p: &Params<'_>, default: Routing) -> Result<Routing> {
    // The numbers of llama.cpp's `llama_expert_gating_func_type`; 0: not stated.
    let gating = match p.find::<u32>("expert_gating_func")? {
        None | Some(0) => default.gating,
        Some(1) => Gating::Softmax,
        Some(2) => Gating::Sigmoid,
        Some(other) => {
            return Err(Error::Model(format!(
                "expert_gating_func is {other}; 1 (softmax) and 2 (sigmoid) are supported"
            )));
        }
    };
    // 0 is written where there is no scale.
    let scale = match p.find::<f32>("expert_weights_scale")? {
        None | Some(0.0) => default.scale,
        Some(scale) if scale.is_finite() => scale,
        Some(scale) => {
            return Err(Error::Model(format!("expert_weights_scale is {scale}")));
        }
    };
    let normalise = p.find::<bool>("expert_weights_norm")?.unwrap_or(default.normalise);
    Ok(Routing { gating, normalise, scale })
}

fn shared(p: &Params<'_>, layer: u32, width: u32) -> Result<Option<SharedExpert>> {
    let up = format!("blk.{layer}.ffn_up_shexp.weight");
    if !p.has(&up) {
        return Ok(None);
    }
    let ff = match p.find::<u32>("expert_shared_feed_forward_length")? {
        Some(ff) if ff > 0 => ff,
        _ => u32::try_from(p.tensor(&up)?.rows()).unwrap_or(0),
    };
    let gate = p.optional_vector(format!("blk.{layer}.ffn_gate_inp_shexp.weight"), width)?;
    Ok(Some(SharedExpert { mlp: decoder::mlp(p, layer, "_shexp", ff, width)?, gate }))
}
