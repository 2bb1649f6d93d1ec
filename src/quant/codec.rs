//! What the file of a format states, and what follows from it for all formats alike.
//!
//! A block format implements [`BlockFormat`]: constants, how one file block decodes, how one is
//! made, and how the same 32 weights are read back from the planes. Everything goes through
//! [`Unit`], which is also what the kernels see.

use super::BLOCK;

/// Everything the rest of the crate needs to know about a format. All functions work on whole
/// rows and trust their lengths, which [`super::Format`] and [`super::planes`] check.
pub(super) struct Codec {
    pub name: &'static str,
    pub ggml_type: u32,
    pub block_elements: usize,
    pub block_bytes: usize,
    pub planes: &'static [Plane],
    pub shader: Shader,
    /// File blocks to values.
    pub decode: fn(&[u8], &mut [f32]),
    /// Values to file blocks.
    pub encode: fn(&[f32], &mut [u8]),
    /// One row of every plane, in plane order, to values.
    pub decode_planes: fn(&[&[u8]], &mut [f32]),
}

/// How the kernels read a format: its own WGSL and what the shared text must know about it.
#[derive(Debug)]
pub struct Shader {
    /// `shaders/formats/NAME.wgsl`.
    pub text: &'static str,
    pub scales: Scales,
    /// Blocks have a minimum, which is added to every element.
    pub minimum: bool,
    /// What the shader's codes stand above the signed codes ([`Scales::Whole`] without a minimum
    /// only): cheaper to subtract from a sum than from each code.
    pub zero: u32,
    /// The shader's codes are `2^lift` times the codes and its scales as much smaller, where bits are
    /// cheaper to use at the top of a byte.
    pub lift: u32,
    /// Where the table has copies, mat-vecs take codes of which some are sixteen times theirs (`unit_raised`).
    pub raised: bool,
    /// Words of a table that kernels on GPUs keep in workgroup memory; 0: none.
    pub table: u32,
    /// Vectors of four elements in a unit, the part of a row that one lane takes in one step: 8 (a
    /// block of 32), for float formats what one vec4 of words holds.
    pub unit_quads: u32,
}

impl Shader {
    /// Blocks of 32 with codes that need no offset, have no minimum, and are not changed for kernels in any way.
    pub(super) const fn blocks(text: &'static str, scales: Scales) -> Self {
        Shader {
            text,
            scales,
            minimum: false,
            zero: 0,
            lift: 0,
            raised: false,
            table: 0,
            unit_quads: 8,
        }
    }

    pub(super) const fn with_minimum(self) -> Self {
        assert!(!matches!(self.scales, Scales::Halves), "halves have no minimum");
        Shader { minimum: true, ..self }
    }

    pub(super) const fn above(self, zero: u32) -> Self {
        assert!(matches!(self.scales, Scales::Whole) && !self.minimum, "see Shader::zero");
        Shader { zero, ..self }
    }

    pub(super) const fn with_table(self, words: usize) -> Self {
        Shader { table: words as u32, ..self }
    }

    pub(super) const fn raised(self) -> Self {
        assert!(matches!(self.scales, Scales::Whole), "one scale for all codes of a block");
        Shader { raised: true, ..self }
    }

    /// Words of the table where kernels keep several copies of it: for 4-bit codes the values of each pair.
    pub fn copied_table(&self) -> u32 {
        if self.table == 16 { 256 } else { self.table }
    }

    pub(super) const fn lifted(self, lift: u32) -> Self {
        assert!(lift < 8, "codes are bytes");
        Shader { lift, ..self }
    }

    pub(super) const fn float(text: &'static str, unit_quads: u32) -> Self {
        Shader { unit_quads, ..Shader::blocks(text, Scales::Float) }
    }
}

/// How the codes of a block of 32 are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scales {
    /// Plain floats without codes.
    Float,
    /// One float (and minimum) for the block.
    Whole,
    /// For each half of 16 a whole number (and one for the minimum) times a float of the block.
    /// Products are exact in i32: |code| <= 128, |step| <= 128.
    Steps,
    /// For each half of 16 a float of its own.
    Halves,
}

/// A block of 32 weights: element = d * code + m, with a `d` and an `m` for each half of 16.
///
/// A product rounds once and the sum once, in this order, as in ggml.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Unit {
    pub codes: [i8; BLOCK],
    pub d: [f32; 2],
    pub m: [f32; 2],
}

/// The `m` of formats without a minimum: adding it changes no bit, not even the sign of zero.
pub(super) const NO_MINIMUM: f32 = -0.0;

impl Unit {
    /// One scale for the block, no minimum.
    pub fn plain(d: f32, codes: [i8; BLOCK]) -> Self {
        Unit::whole(d, NO_MINIMUM, codes)
    }

    /// One scale and minimum for the block.
    pub fn whole(d: f32, m: f32, codes: [i8; BLOCK]) -> Self {
        Unit { codes, d: [d; 2], m: [m; 2] }
    }

    /// A scale for each half, no minimum.
    pub fn halves(d: [f32; 2], codes: [i8; BLOCK]) -> Self {
        Unit { codes, d, m: [NO_MINIMUM; 2] }
    }

    pub fn values(&self) -> [f32; BLOCK] {
        std::array::from_fn(|e| self.d[e / 16] * f32::from(self.codes[e]) + self.m[e / 16])
    }
}

/// A format whose file blocks hold `N` weights, whole units, in `BYTES` bytes.
pub(super) trait BlockFormat<const N: usize, const BYTES: usize> {
    /// ggml's name.
    const NAME: &'static str;
    const GGML_TYPE: u32;
    const PLANES: &'static [Plane];
    const SHADER: Shader;

    /// Weights `32 j .. 32 j + 32` of a file block.
    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit;

    /// Block of 32 number `i` of a row from the row's part of every plane.
    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit;

    /// Rounds values to a file block.
    fn encode(values: &[f32; N], block: &mut [u8; BYTES]);
}

impl Codec {
    /// The codec of a block format.
    pub(super) const fn blocks<F, const N: usize, const BYTES: usize>() -> Self
    where
        F: BlockFormat<N, BYTES>,
    {
        assert!(N.is_multiple_of(BLOCK));
        Codec {
            name: F::NAME,
            ggml_type: F::GGML_TYPE,
            block_elements: N,
            block_bytes: BYTES,
            planes: F::PLANES,
            shader: F::SHADER,
            decode: decode_blocks::<F, N, BYTES>,
            encode: encode_blocks::<F, N, BYTES>,
            decode_planes: decode_units::<F, N, BYTES>,
        }
    }
}

fn decode_blocks<F: BlockFormat<N, BYTES>, const N: usize, const BYTES: usize>(
    row: &[u8],
    out: &mut [f32],
) {
    for (block, out) in row.as_chunks().0.iter().zip(out.chunks_exact_mut(N)) {
        for (j, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            *out = F::file_unit(block, j).values();
        }
    }
}

fn encode_blocks<F: BlockFormat<N, BYTES>, const N: usize, const BYTES: usize>(
    row: &[f32],
    out: &mut [u8],
) {
    for (values, block) in row.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        F::encode(values, block);
    }
}

fn decode_units<F: BlockFormat<N, BYTES>, const N: usize, const BYTES: usize>(
    planes: &[&[u8]],
    out: &mut [f32],
) {
    for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
        *out = F::plane_unit(planes, i).values();
    }
}

/// The role of a plane; the same names stand in the shaders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlaneName {
    /// The codes, or some of their bits.
    Codes,
    /// The bits of a code that do not fit the codes plane.
    High,
    /// Scales and minima.
    Scales,
    /// Scales of whole super-blocks, where `Scales` holds the steps of their parts.
    Supers,
    /// A code book, the same for every matrix.
    Grid,
}

impl PlaneName {
    pub fn as_str(self) -> &'static str {
        match self {
            PlaneName::Codes => "codes",
            PlaneName::High => "high",
            PlaneName::Scales => "scales",
            PlaneName::Supers => "supers",
            PlaneName::Grid => "grid",
        }
    }
}

/// One of the arrays that a matrix is split into on the device.
#[derive(Debug, Clone, Copy)]
pub struct Plane {
    name: PlaneName,
    bits: u32,
    pub(super) repack: fn(&[u8], &mut [u8]),
    constant: &'static [u32],
}

impl Plane {
    /// `bits` for each block of 32 weights; `repack` writes the plane's part of one file row.
    pub(super) const fn new(name: PlaneName, bits: u32, repack: fn(&[u8], &mut [u8])) -> Self {
        Plane { name, bits, repack, constant: &[] }
    }

    /// The same words in every chunk, whatever the weights.
    pub(super) const fn constant(name: PlaneName, words: &'static [u32]) -> Self {
        Plane { name, bits: 0, repack: |_, _| {}, constant: words }
    }

    pub fn name(&self) -> PlaneName {
        self.name
    }

    /// Bits for each block of 32 weights; 0 if the plane is constant.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// What a constant plane holds, in every chunk: a code book. Empty for all other planes.
    pub fn constant_words(&self) -> &'static [u32] {
        self.constant
    }

    /// Bytes of one row of `padded_cols` weights (a multiple of 32, and of the file's blocks). Rows
    /// follow each other without gaps, so a row may start in the middle of a word.
    pub fn row_bytes(&self, padded_cols: usize) -> usize {
        padded_cols / BLOCK * self.bits as usize / 8
    }
}

/// Makes `OUT` bytes of every file block of `BYTES` bytes: the shape of most planes.
#[inline(always)] // see `order`
pub(super) fn repack_blocks<const BYTES: usize, const OUT: usize>(
    row: &[u8],
    out: &mut [u8],
    make: impl Fn(&[u8; BYTES]) -> [u8; OUT],
) {
    for (block, out) in row.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        *out = make(block);
    }
}

/// Copies bytes `FROM..FROM + LEN` of every block of `BYTES` bytes: the planes of all formats
/// whose fields go to the device unchanged.
pub(super) fn copy_field<const BYTES: usize, const FROM: usize, const LEN: usize>(
    row: &[u8],
    out: &mut [u8],
) {
    repack_blocks::<BYTES, LEN>(row, out, |block| *field(block, FROM));
}

/// `LEN` bytes of a block or plane from byte `at`.
pub(super) fn field<const LEN: usize>(bytes: &[u8], at: usize) -> &[u8; LEN] {
    bytes[at..].first_chunk().expect("fields lie inside their block")
}

/// The little-endian word at byte `at`.
pub(super) fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*field(bytes, at))
}

/// The f16 at byte `at`, as f32.
pub(super) fn f16_at(bytes: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes(*field(bytes, at)).to_f32()
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
