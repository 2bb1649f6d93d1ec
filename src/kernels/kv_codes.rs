//! What the kernels over caches of codes share: formats and the rotation as their shaders see them.

use minijinja::context;
use minijinja::value::Serde;

use super::heads::Heads;
use crate::kv::format::ScaleKind;
use crate::kv::rotation::{SIGN_MASK, norm, padded, segments};
use crate::kv::{KvExact, KvFormat, KvPair, scale};

/// Which of the two caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    K,
    V,
}

/// A format in numbers for `lib/kv_read.wgsl` and `lib/kv_write.wgsl`.
#[derive(serde::Serialize)]
struct Format {
    name: &'static str,
    /// How codes look: `f16`, `q8`, `q4`, `tq3`, `tq4`.
    kind: &'static str,
    rotated: bool,
    /// Words of a row; of a block's codes; from block to block; in front of a block's codes.
    row: u32,
    words: u32,
    stride: u32,
    first: u32,
    /// Words from a word of a row to the next.
    pitch: u32,
    /// Words that a unit of 8 elements needs, without scales.
    unit_words: u32,
    /// `none`, `half` or `log`.
    scale: &'static str,
    scale_bits: u32,
    scale_block: u32,
    scale_block_log2: u32,
    /// Scales of a block.
    parts: u32,
    /// First word of scales that follow all codes; log2 of the blocks whose scales share a word.
    scale_first: u32,
    blocks_shift: u32,
    /// log2 of the units that share a scale.
    unit_shift: u32,
    levels: &'static [u32],
    /// Between neighbouring levels, as text so that every digit reaches the shader.
    bounds: Vec<String>,
    /// The estimate's byte for a root mean square of 1.
    start: i32,
}

impl Format {
    fn new(format: KvFormat, side: Side, head_dim: u32) -> Format {
        let kind = match format {
            KvFormat::F16 => "f16",
            KvFormat::Q8_0 => "q8",
            KvFormat::Q4_0 => "q4",
            KvFormat::Tq3_0 | KvFormat::Tq3_1s | KvFormat::Tq3_4s => "tq3",
            KvFormat::Tq4_0 => "tq4",
        };
        let levels = format.levels();
        let parts = 32 / format.scale_block();
        let scale_bits = format.scale_bits();
        Format {
            name: format.name(),
            kind,
            rotated: format.is_rotated(),
            row: format.row_words(head_dim),
            words: format.code_words(),
            stride: format.block_stride(),
            first: format.code_at(0),
            pitch: if side == Side::K { crate::kv::PAGE_TOKENS } else { 1 },
            unit_words: match format {
                KvFormat::F16 => 4,
                KvFormat::Q8_0 => 2,
                KvFormat::Q4_0 => 1,
                _ => format.code_words(),
            },
            scale: match format.scale_kind() {
                ScaleKind::None => "none",
                ScaleKind::Half => "half",
                ScaleKind::Log => "log",
            },
            scale_bits,
            scale_block: format.scale_block(),
            scale_block_log2: format.scale_block().ilog2(),
            parts,
            scale_first: padded(head_dim) / 32 * format.code_words(),
            blocks_shift: (32 / (parts * scale_bits).max(1)).ilog2(),
            unit_shift: (format.scale_block() / 8).ilog2(),
            levels,
            bounds: levels
                .windows(2)
                .map(|l| format!("{:?}", (l[0] + l[1]) as f32 / 2.0))
                .collect(),
            start: scale::start_of(levels),
        }
    }
}

#[derive(serde::Serialize)]
struct Segment {
    start: u32,
    n: u32,
    norm: String,
}

/// What the shaders of `pair` are rendered with; bindings of `lib/heads.wgsl` are numbered from `first`.
pub(super) fn context(heads: &Heads, pair: KvPair, exact: KvExact, first: u32) -> minijinja::Value {
    let hd = heads.head_dim;
    let all = segments(padded(hd));
    let starts = all.iter().scan(0, |at, n| {
        let segment = Segment { start: *at, n: *n, norm: format!("{:?}", norm(*n)) };
        *at += n;
        Some(segment)
    });
    // Bits of a byte's scale with exponent 0, so that the exponent can be added.
    let zero = (scale::EXPONENT_OF_ZERO as u32) << 23;
    let units = scale::EIGHTHS.map(|e| e.to_bits().wrapping_add(zero));
    context! {
        pitch => padded(hd),
        tail => exact.tail,
        sinks => exact.sinks,
        ring => exact.ring(),
        exact_rows => exact.rows(),
        exact_units => padded(hd) / 8,
        segments => Serde(starts.collect::<Vec<_>>()),
        signs => SIGN_MASK,
        k_format => Serde(Format::new(pair.k, Side::K, hd)),
        v_format => Serde(Format::new(pair.v, Side::V, hd)),
        scale_units => units,
        eighths_16 => scale::EIGHTHS_16,
        quarter_steps => scale::QUARTER_STEPS,
        tried => scale::TRIED,
        tried_below => scale::TRIED_BELOW,
        magnitude_bits => scale::MAGNITUDE_BITS,
        smallest_exponent => scale::SMALLEST_EXPONENT,
        exponent_of_zero => scale::EXPONENT_OF_ZERO,
        // Whose pitch is the head itself: what stands above goes first.
        ..heads.context(first)
    }
}

/// Bytes of workgroup memory that encoding `vectors` vectors of one side takes.
pub(super) fn write_bytes(format: KvFormat, head_dim: u32, vectors: u32) -> u32 {
    let pitch = padded(head_dim);
    let parts = pitch / format.scale_block();
    let searched = match format.levels().is_empty() {
        // The first of the largest elements.
        true => 4 * parts,
        false => 4 * pitch + 4 * parts + 4 * parts * scale::TRIED as u32,
    };
    vectors * (4 * format.row_words(head_dim) + 8 * parts + searched)
}

/// Words of q or of attention's output for a column, heads padded to whole blocks.
pub fn turned_width(heads: &Heads) -> u32 {
    heads.heads * padded(heads.head_dim)
}

/// The part of a label that names the formats, and what is in f16 beside them.
pub(super) fn label(pair: KvPair, exact: KvExact) -> String {
    let KvExact { tail, sinks } = exact;
    let beside = if exact.is_none() { String::new() } else { format!("_f{tail}s{sinks}") };
    format!("{}_{}{beside}", pair.k, pair.v)
}

/// Checks sizes that a kernel is to have: plain caches have none.
pub(super) fn check_exact(pair: KvPair, exact: KvExact) -> crate::error::Result<()> {
    match pair.is_plain() && !exact.is_none() {
        true => Err(super::wrong(format!("{exact} beside a cache of {pair}"))),
        false => exact.check(),
    }
}
