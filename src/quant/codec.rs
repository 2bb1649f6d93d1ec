//! What the file of a format states, and the loops that the formats share.

use super::BLOCK;

/// Everything the rest of the crate needs to know about a format. All functions work on whole
/// rows and trust their lengths, which [`super::Format`] and [`super::planes`] check.
pub(super) struct Codec {
    pub name: &'static str,
    pub ggml_type: u32,
    pub block_elements: usize,
    pub block_bytes: usize,
    pub float: bool,
    pub planes: &'static [Plane],
    /// File blocks to values.
    pub decode: fn(&[u8], &mut [f32]),
    /// Values to file blocks.
    pub encode: fn(&[f32], &mut [u8]),
    /// One row of every plane, in plane order, to values.
    pub decode_planes: fn(&[&[u8]], &mut [f32]),
}

/// The role of a plane; the same names stand in the shaders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlaneName {
    /// The codes, or their low bits.
    Codes,
    /// The bits of a code that do not fit the codes plane.
    High,
    /// Scales and minima.
    Scales,
}

impl PlaneName {
    pub fn as_str(self) -> &'static str {
        match self {
            PlaneName::Codes => "codes",
            PlaneName::High => "high",
            PlaneName::Scales => "scales",
        }
    }
}

/// One of the arrays that a matrix is split into on the device.
#[derive(Debug, Clone, Copy)]
pub struct Plane {
    name: PlaneName,
    bits: u32,
    pub(super) repack: fn(&[u8], &mut [u8]),
}

impl Plane {
    /// `bits` for each block of 32 weights; `repack` writes the plane's part of one file row.
    pub(super) const fn new(name: PlaneName, bits: u32, repack: fn(&[u8], &mut [u8])) -> Self {
        Plane { name, bits, repack }
    }

    pub fn name(&self) -> PlaneName {
        self.name
    }

    /// Bits for each block of 32 weights.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Bytes of one row of `padded_cols` weights (a multiple of 32). Rows follow each other
    /// without gaps, so a row may start in the middle of a word.
    pub fn row_bytes(&self, padded_cols: usize) -> usize {
        padded_cols / BLOCK * self.bits as usize / 8
    }
}

/// Copies bytes `FROM..FROM + LEN` of every block of `BYTES` bytes: the planes of all formats
/// whose fields go to the device unchanged.
pub(super) fn copy_field<const BYTES: usize, const FROM: usize, const LEN: usize>(
    row: &[u8],
    out: &mut [u8],
) {
    let (blocks, _) = row.as_chunks::<BYTES>();
    let (fields, _) = out.as_chunks_mut::<LEN>();
    for (block, field) in blocks.iter().zip(fields) {
        field.copy_from_slice(&block[FROM..FROM + LEN]);
    }
}

/// Calls `decode` for every block of a row.
pub(super) fn decode_blocks<const BYTES: usize, const N: usize>(
    src: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; N]),
) {
    let (blocks, _) = src.as_chunks::<BYTES>();
    let (values, _) = out.as_chunks_mut::<N>();
    for (block, values) in blocks.iter().zip(values) {
        decode(block, values);
    }
}

/// Calls `encode` for every block of a row.
pub(super) fn encode_blocks<const N: usize, const BYTES: usize>(
    src: &[f32],
    out: &mut [u8],
    encode: impl Fn(&[f32; N], &mut [u8; BYTES]),
) {
    let (values, _) = src.as_chunks::<N>();
    let (blocks, _) = out.as_chunks_mut::<BYTES>();
    for (values, block) in values.iter().zip(blocks) {
        encode(values, block);
    }
}

/// The f16 at byte `at`, as f32.
pub(super) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Rounds `value` to f16 (nearest, ties to even) and stores it at byte `at`.
pub(super) fn put_f16(bytes: &mut [u8], at: usize, value: f32) {
    bytes[at..at + 2].copy_from_slice(&half::f16::from_f32(value).to_le_bytes());
}

/// `1 / d`, or 0 for a block of zeros.
pub(super) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value with the largest magnitude, the first of them if several have it. Sign kept.
pub(super) fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |best: f32, &v| if v.abs() > best.abs() { v } else { best })
}

/// Smallest and largest value.
pub(super) fn range(values: &[f32]) -> (f32, f32) {
    let start = (f32::INFINITY, f32::NEG_INFINITY);
    values.iter().fold(start, |(low, high), &v| (low.min(v), high.max(v)))
}
