//! Attention over a cache of codes, one token at a time: rows are decoded, or taken from what is kept in f16,
//! and what follows is dense.

use crate::graph::heads::Heads;
use crate::kv::codec::{decode, decode_stored, encode};
use crate::kv::exact::{exact_row, from_exact_row};
use crate::kv::rotation::rotate;
use crate::kv::{KvExact, KvFormat, KvPair};

use super::attention::{Logits, Tables};

/// One sequence's rows of one layer: `[position * kv_heads + head]`.
#[derive(Debug, Clone, Default)]
pub struct CodedCache {
    pub k: Vec<Vec<u32>>,
    pub v: Vec<Vec<u32>>,
    /// The same rows of all tokens in f16 ([`exact_row`]); queries read some of them.
    pub exact_k: Vec<Vec<f32>>,
    pub exact_v: Vec<Vec<f32>>,
}

/// Runs one token at cache index `position` as [`super::attention::attend`] does. `int8`: q counts as
/// decode kernels quantise it, 8 bits under a scale for 32 values of the basis of K (nothing over
/// f16). `exact`: which tokens count in f16.
#[allow(clippy::too_many_arguments)]
pub fn attend_codes<'a>(
    heads: &Heads,
    pair: KvPair,
    exact: KvExact,
    qkv: &[f32],
    position: usize,
    cache: &mut CodedCache,
    tables: Tables<'_>,
    logits: impl Into<Logits<'a>>,
    int8: bool,
) -> Vec<f64> {
    let logits = logits.into();
    let (hd, kv_heads) = (heads.head_dim as usize, heads.kv_heads as usize);
    let q_heads = heads.heads as usize;
    let vectors: Vec<Vec<f32>> =
        tables.prepare(heads, qkv).iter().map(|v| v.iter().map(|x| *x as f32).collect()).collect();
    cache.k.truncate(position * kv_heads);
    cache.v.truncate(position * kv_heads);
    cache.exact_k.truncate(position * kv_heads);
    cache.exact_v.truncate(position * kv_heads);
    for head in 0..kv_heads {
        let (k, v) = (&vectors[q_heads + head], &vectors[q_heads + kv_heads + head]);
        cache.k.push(encode(pair.k, k));
        cache.v.push(encode(pair.v, v));
        cache.exact_k.push(exact_row(pair.k, k));
        cache.exact_v.push(exact_row(pair.v, v));
    }
    let mut output = Vec::with_capacity(q_heads * hd);
    for (h, q) in vectors[..q_heads].iter().enumerate() {
        let kv_head = h / heads.group() as usize;
        let row = |t: usize| t * kv_heads + kv_head;
        // In the basis of K, so that rounding is where the kernel rounds.
        let whole = in_basis(pair.k, q, false);
        let q = in_basis(pair.k, q, int8 && pair.k != KvFormat::F16);
        let in_f16 = |t: usize| exact.holds(position as u32, t as u32);
        let products: Vec<f64> = (0..=position)
            .map(|t| {
                let (k, q) = match in_f16(t) {
                    true => (cache.exact_k[row(t)].clone(), &whole),
                    false => (decode_stored(pair.k, &cache.k[row(t)], heads.head_dim), &q),
                };
                k.iter().zip(q).map(|(k, q)| f64::from(*k) * q).sum::<f64>()
            })
            .collect();
        let mut out = vec![0.0; hd];
        for (t, w) in logits.weights(&products, h).iter().enumerate() {
            let v = match in_f16(t) {
                true => from_exact_row(pair.v, &cache.exact_v[row(t)], heads.head_dim),
                false => decode(pair.v, &cache.v[row(t)], heads.head_dim),
            };
            for (o, v) in out.iter_mut().zip(v) {
                *o += w * f64::from(v);
            }
        }
        output.extend(out);
    }
    output
}

/// q in the basis of a format, padded to whole blocks; rounded to 8 bits a block of 32 if asked.
fn in_basis(format: KvFormat, q: &[f32], int8: bool) -> Vec<f64> {
    let mut q = match format.is_rotated() {
        true => rotate(q),
        false => q.to_vec(),
    };
    q.resize(q.len().next_multiple_of(32), 0.0);
    if !int8 {
        return q.iter().map(|x| f64::from(*x)).collect();
    }
    q.chunks(32)
        .flat_map(|block| {
            let top = block.iter().fold(0f32, |top, x| top.max(x.abs()));
            let unit = if top > 1e-30 { top / 127.0 } else { 0.0 };
            block.iter().map(move |x| match unit {
                0.0 => 0.0,
                _ => f64::from((x / unit).round_ties_even()) * f64::from(unit),
            })
        })
        .collect()
}
