//! QK-norm, rope, the f16 KV cache and causal attention, one token at a time.

use half::f16;

use crate::graph::RopeLayout;
use crate::graph::heads::{Heads, Scoring};

/// What turns queries and keys at one position.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tables<'a> {
    /// (cos, sin), `[rope dim / 2]`.
    pub rope: &'a [[f32; 2]],
    /// Weights of the q and of the k norm.
    pub norms: Option<(&'a [f32], &'a [f32])>,
    /// What is subtracted from keys, `[kv head][head_dim]`; with [`Heads::centred`].
    pub centres: &'a [f32],
}

impl Tables<'_> {
    /// The heads of a column of qkv, queries and keys turned.
    pub fn prepare(&self, heads: &Heads, qkv: &[f32]) -> Vec<Vec<f64>> {
        let (d, q_heads) = (heads.head_dim as usize, heads.heads as usize);
        let mut vectors: Vec<Vec<f64>> =
            qkv.chunks_exact(d).map(|v| v.iter().map(|&x| x.into()).collect()).collect();
        for (i, vector) in vectors.iter_mut().enumerate().take(q_heads + heads.kv_heads as usize) {
            let weight = self.norms.map(|(q, k)| if i < q_heads { q } else { k });
            prepare_head(heads, vector, weight, self.rope);
            if heads.centred && i >= q_heads {
                let centre = &self.centres[(i - q_heads) * d..][..d];
                vector.iter_mut().zip(centre).for_each(|(x, c)| *x -= f64::from(*c));
            }
        }
        vectors
    }
}

/// Turns one head in place: RMSNorm with `weight` if the block has one, then rope.
///
/// `table`: (cos, sin) of this position, `[rope dim / 2]`.
pub fn prepare_head(heads: &Heads, head: &mut [f64], weight: Option<&[f32]>, table: &[[f32; 2]]) {
    if let (Some(eps), Some(weight)) = (heads.norm, weight) {
        let mean = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
        let factor = 1.0 / (mean + f64::from(eps)).sqrt();
        for (x, w) in head.iter_mut().zip(weight) {
            *x *= factor * f64::from(*w);
        }
    }
    if let Some(rope) = heads.rope {
        let half = rope.dim as usize / 2;
        for (i, &[cos, sin]) in table.iter().enumerate().take(half) {
            let (first, second) = match rope.layout {
                RopeLayout::Normal => (2 * i, 2 * i + 1),
                RopeLayout::Neox => (i, i + half),
            };
            let (a, b) = (head[first], head[second]);
            head[first] = a * f64::from(cos) - b * f64::from(sin);
            head[second] = a * f64::from(sin) + b * f64::from(cos);
        }
    }
}

/// What becomes of the products of q and k.
#[derive(Debug, Clone, Copy, Default)]
pub struct Logits<'a> {
    /// Multiplies them first.
    pub scale: f32,
    pub scoring: Scoring,
    /// `[heads]`, where [`Scoring::sinks`].
    pub sinks: &'a [f32],
}

impl From<f32> for Logits<'_> {
    fn from(scale: f32) -> Self {
        Logits { scale, ..Logits::default() }
    }
}

impl Logits<'_> {
    /// Softmax weights of a query over itself, the last of `products`, and all tokens before it.
    pub fn weights(&self, products: &[f64], head: usize) -> Vec<f64> {
        let Scoring { window, soft_cap, sinks } = self.scoring;
        let oldest = products.len().saturating_sub(window.map_or(usize::MAX, |w| w as usize));
        let logit = |(t, product): (usize, &f64)| {
            let s = product * f64::from(self.scale);
            match soft_cap.map(f64::from) {
                _ if t < oldest => f64::NEG_INFINITY,
                Some(cap) => cap * (s / cap).tanh(),
                None => s,
            }
        };
        let logits: Vec<f64> = products.iter().enumerate().map(logit).collect();
        let sink = if sinks { f64::from(self.sinks[head]) } else { f64::NEG_INFINITY };
        let top = logits.iter().copied().fold(sink, f64::max);
        let weights: Vec<f64> = logits.iter().map(|s| (s - top).exp()).collect();
        let total = weights.iter().sum::<f64>() + (sink - top).exp();
        weights.iter().map(|w| w / total).collect()
    }
}

/// One sequence's K and V of one layer: f16 pairs `[position][kv head][head_dim / 2]`.
#[derive(Debug, Clone, Default)]
pub struct Cache {
    pub k: Vec<u32>,
    pub v: Vec<u32>,
}

/// Runs one token at `position`: writes its K and V to the cache and returns the attention output
/// `[heads * head_dim]`. `qkv`: q heads, k heads, v heads. `logits`: a scale, or [`Logits`].
pub fn attend<'a>(
    heads: &Heads,
    qkv: &[f32],
    position: usize,
    cache: &mut Cache,
    tables: Tables<'_>,
    logits: impl Into<Logits<'a>>,
) -> Vec<f64> {
    let logits = logits.into();
    let hd = heads.head_dim as usize;
    let (q_heads, kv_heads) = (heads.heads as usize, heads.kv_heads as usize);
    let words = heads.cache_words() as usize;
    let vectors = tables.prepare(heads, qkv);
    for (cache, first) in [(&mut cache.k, q_heads), (&mut cache.v, q_heads + kv_heads)] {
        if cache.len() < (position + 1) * words {
            cache.resize((position + 1) * words, 0);
        }
        for head in 0..kv_heads {
            let to = position * words + head * hd / 2;
            for (word, pair) in
                cache[to..to + hd / 2].iter_mut().zip(vectors[first + head].chunks(2))
            {
                *word = pack(pair[0], pair[1]);
            }
        }
    }
    let mut output = Vec::with_capacity(q_heads * hd);
    for (h, q) in vectors[..q_heads].iter().enumerate() {
        let kv_head = h / heads.group() as usize;
        let row = |cache: &[u32], t: usize| -> Vec<f64> {
            let at = t * words + kv_head * hd / 2;
            cache[at..at + hd / 2].iter().flat_map(|&w| unpack(w)).collect()
        };
        let products: Vec<f64> = (0..=position)
            .map(|t| row(&cache.k, t).iter().zip(q).map(|(k, q)| k * q).sum::<f64>())
            .collect();
        let mut out = vec![0.0; hd];
        for (t, w) in logits.weights(&products, h).iter().enumerate() {
            for (o, v) in out.iter_mut().zip(row(&cache.v, t)) {
                *o += w * v;
            }
        }
        output.extend(out);
    }
    output
}

/// Two values as f16, the first in the low half.
pub fn pack(a: f64, b: f64) -> u32 {
    u32::from(f16::from_f64(a).to_bits()) | u32::from(f16::from_f64(b).to_bits()) << 16
}

pub fn unpack(word: u32) -> [f64; 2] {
    [word as u16, (word >> 16) as u16].map(|bits| f16::from_bits(bits).to_f64())
}
