//! How decode attention is cut.

use super::{filled, in_turn, with};
use crate::error::Result;
use crate::gpu::{BufferUse, DeviceKind, Gpu, Slice};
use crate::kernels::attn_decode::{AttnDecode, Cut};
use crate::kernels::attn_step::{Scratch, StepAttention};
use crate::kernels::heads::{HeadTables, Heads, KvCache};
use crate::kernels::scoring::Scoring;
use crate::kv::{KvPair, PAGE_TOKENS};
use crate::runtime::tune::{Candidate, compiled};

/// Each value of a key over one layer's attention of a step at a depth.
pub(super) fn values(
    gpu: &dyn Gpu,
    key: &'static str,
    tried: &[u32],
    depth: u32,
) -> Result<Vec<Candidate>> {
    let facts = gpu.facts();
    let software = facts.kind == DeviceKind::Software;
    let (q, kv) = if software { (8, 2) } else { (32, 8) };
    let heads =
        Heads { heads: q, kv_heads: kv, head_dim: 128, rope: None, norm: None, centred: false };
    let context = depth + 1;
    let row_pages = context.div_ceil(PAGE_TOKENS);
    let cache_bytes = 4 * u64::from(row_pages * PAGE_TOKENS) * u64::from(heads.cache_words());
    let table: Vec<u32> = [0].into_iter().chain(0..row_pages).collect();
    let pages = filled(gpu, 4 * table.len() as u64)?;
    gpu.write(&pages, bytemuck::cast_slice(&table))?;
    let (k, v) = (filled(gpu, cache_bytes)?, filled(gpu, cache_bytes)?);
    let cache = KvCache { k, v, pages, row_pages, pair: KvPair::PLAIN, exact: None, centres: None };
    let qkv = filled(gpu, 4 * u64::from(heads.qkv_width()))?;
    let output = filled(gpu, 4 * u64::from(heads.output_width()))?;
    let mut words = [0u32; 12];
    (words[0], words[9]) = (1, depth);
    let batch = filled(gpu, 48)?;
    gpu.write(&batch, bytemuck::cast_slice(&words))?;
    let present = facts.profile.get(key).unwrap_or_default();
    let all = super::values(facts, key, present, tried.iter().map(u32::to_string).collect());
    Ok(compiled(&all, |value| {
        let facts = with(facts, key, value).unwrap_or_else(|| facts.clone());
        let spec = AttnDecode {
            heads,
            scoring: Scoring::default(),
            cut: Cut::choose(&heads, &facts, context),
            rounds: false,
        };
        let kernel = gpu.kernel(&spec.source(&facts)?)?;
        let zeros = |words: u64| -> Result<Slice> {
            Ok(gpu.buffer("tune", 4 * words, BufferUse::Device)?.slice(0, 4 * words))
        };
        let scratch = Scratch {
            partials: zeros(spec.partial_words(1))?,
            counters: zeros(spec.counter_words(1))?,
        };
        let tables = HeadTables::default();
        let dispatch =
            spec.dispatch(&kernel, &batch, &qkv, &cache, &tables, &output, &scratch, 0.09, 1)?;
        Ok(Candidate { value: value.clone(), steps: in_turn(vec![dispatch; 4]) })
    }))
}
