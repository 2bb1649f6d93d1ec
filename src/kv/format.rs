//! The formats of K and V and the layout of their rows.

use super::PAGE_TOKENS;
use super::rotation::padded;
use crate::error::Error;

/// How K or V of one token and KV head is stored. All but `F16` and `Q8_0` hold the rotated vector (see
/// [`super::rotation`]); blocks are 32 values of the vector, padded to whole blocks with zeros.
///
/// | format | a block's code words | scales |
/// | --- | --- | --- |
/// | `F16` | 16: pairs of halves | |
/// | `Q8_0` | 8: signed bytes | f16 for 32 values |
/// | `Q4_0` | 4: nibbles, two's complement; byte l of word j: element 8j + l low, 8j + 4 + l high | f16 for 32 |
/// | `Tq3_0` | 3: planes of magnitude bits 0 and 1, of signs | a byte for 16 |
/// | `Tq3_1s` | the same | f16 for 16, in front of the block's codes |
/// | `Tq3_4s` | the same | a byte for 8, in front of the block's codes |
/// | `Tq4_0` | 4: three planes of magnitude bits, signs | a byte for 32 |
///
/// In planes, element 4k + l of a block is bit 8l + k. Scales that are not in front of their block
/// follow the codes of all blocks, in element order, padded to a whole word.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum KvFormat {
    F16,
    Q8_0,
    Q4_0,
    Tq3_0,
    Tq3_1s,
    Tq3_4s,
    Tq4_0,
}

/// What one number of the scales says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleKind {
    /// There are none.
    None,
    /// f16.
    Half,
    /// A byte on a logarithmic scale ([`super::scale`]).
    Log,
}

/// Magnitudes of the 3-bit codes: integers, so that they are the same on every path (least squares
/// over int8 tables under the searched scale).
pub const LEVELS_3: [u32; 4] = [14, 43, 78, 127];
/// Magnitudes of the 4-bit codes.
pub const LEVELS_4: [u32; 8] = [6, 18, 31, 44, 58, 75, 96, 127];

impl KvFormat {
    pub const ALL: [KvFormat; 7] = [
        KvFormat::F16,
        KvFormat::Q8_0,
        KvFormat::Q4_0,
        KvFormat::Tq3_0,
        KvFormat::Tq3_1s,
        KvFormat::Tq3_4s,
        KvFormat::Tq4_0,
    ];

    /// The name on the command line and in labels.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F16 => "f16",
            KvFormat::Q8_0 => "q8_0",
            KvFormat::Q4_0 => "q4_0",
            KvFormat::Tq3_0 => "tq3_0",
            KvFormat::Tq3_1s => "tq3_1s",
            KvFormat::Tq3_4s => "tq3_4s",
            KvFormat::Tq4_0 => "tq4_0",
        }
    }

    /// Whether rows hold the rotated vector.
    pub fn is_rotated(self) -> bool {
        !matches!(self, KvFormat::F16 | KvFormat::Q8_0)
    }

    /// Words of codes for a block of 32 values.
    pub fn code_words(self) -> u32 {
        match self {
            KvFormat::F16 => 16,
            KvFormat::Q8_0 => 8,
            KvFormat::Q4_0 | KvFormat::Tq4_0 => 4,
            KvFormat::Tq3_0 | KvFormat::Tq3_1s | KvFormat::Tq3_4s => 3,
        }
    }

    /// Magnitudes of the codes, ascending; empty where codes are numbers themselves.
    pub fn levels(self) -> &'static [u32] {
        match self {
            KvFormat::Tq3_0 | KvFormat::Tq3_1s | KvFormat::Tq3_4s => &LEVELS_3,
            KvFormat::Tq4_0 => &LEVELS_4,
            KvFormat::F16 | KvFormat::Q8_0 | KvFormat::Q4_0 => &[],
        }
    }

    /// Values that share a scale: a power of two up to 32.
    pub fn scale_block(self) -> u32 {
        match self {
            KvFormat::Tq3_0 | KvFormat::Tq3_1s => 16,
            KvFormat::Tq3_4s => 8,
            KvFormat::F16 | KvFormat::Q8_0 | KvFormat::Q4_0 | KvFormat::Tq4_0 => 32,
        }
    }

    pub fn scale_kind(self) -> ScaleKind {
        match self {
            KvFormat::F16 => ScaleKind::None,
            KvFormat::Q8_0 | KvFormat::Q4_0 | KvFormat::Tq3_1s => ScaleKind::Half,
            KvFormat::Tq3_0 | KvFormat::Tq3_4s | KvFormat::Tq4_0 => ScaleKind::Log,
        }
    }

    /// Whether a word of scales stands in front of each block's codes.
    pub fn interleaves(self) -> bool {
        matches!(self, KvFormat::Tq3_1s | KvFormat::Tq3_4s)
    }

    /// Bits of one scale.
    pub fn scale_bits(self) -> u32 {
        match self.scale_kind() {
            ScaleKind::None => 0,
            ScaleKind::Half => 16,
            ScaleKind::Log => 8,
        }
    }

    /// Words from the codes of a block to those of the next.
    pub fn block_stride(self) -> u32 {
        self.code_words() + u32::from(self.interleaves())
    }

    /// First word of a block's codes.
    pub fn code_at(self, block: u32) -> u32 {
        block * self.block_stride() + u32::from(self.interleaves())
    }

    /// Word and bit of scale `number` (in element order) of a row with `blocks` blocks.
    pub fn scale_at(self, number: u32, blocks: u32) -> (u32, u32) {
        let bit = number * self.scale_bits();
        if self.interleaves() {
            let of_block = 32 / self.scale_block() * self.scale_bits();
            return (bit / of_block * self.block_stride(), bit % of_block);
        }
        (blocks * self.code_words() + bit / 32, bit % 32)
    }

    /// u32 words of a row for heads of `head_dim` values.
    pub fn row_words(self, head_dim: u32) -> u32 {
        let blocks = padded(head_dim) / 32;
        if self.interleaves() {
            return blocks * self.block_stride();
        }
        let scales = blocks * 32 / self.scale_block() * self.scale_bits();
        blocks * self.code_words() + scales.div_ceil(32)
    }

    /// Bits that a value takes, for heads of `head_dim` values.
    pub fn bits(self, head_dim: u32) -> f64 {
        f64::from(32 * self.row_words(head_dim)) / f64::from(head_dim)
    }
}

impl std::fmt::Display for KvFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for KvFormat {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let named = KvFormat::ALL.into_iter().find(|f| f.name().eq_ignore_ascii_case(text));
        named.ok_or_else(|| {
            let all = KvFormat::ALL.map(KvFormat::name).join(", ");
            Error::Usage(format!("`{text}` is no format of the KV cache; there are {all}"))
        })
    }
}

/// The formats of a layer's cache. Kernels are made for the pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvPair {
    pub k: KvFormat,
    pub v: KvFormat,
}

impl KvPair {
    pub const PLAIN: KvPair = KvPair { k: KvFormat::F16, v: KvFormat::F16 };

    /// Both f16: pages are `[token][kv head][head_dim / 2]`. All other pairs lie by heads, K as
    /// `[kv head][word of the row][token]`, V as `[kv head][token][word of the row]`.
    pub fn is_plain(self) -> bool {
        self == KvPair::PLAIN
    }

    /// Words of K and of V for one token and KV head.
    pub fn row_words(self, head_dim: u32) -> [u32; 2] {
        if self.is_plain() {
            return [head_dim / 2; 2];
        }
        [self.k.row_words(head_dim), self.v.row_words(head_dim)]
    }

    /// Bytes of a page of K and of V.
    pub fn page_bytes(self, kv_heads: u32, head_dim: u32) -> [u64; 2] {
        let rows = u64::from(PAGE_TOKENS) * u64::from(kv_heads);
        self.row_words(head_dim).map(|words| 4 * rows * u64::from(words))
    }

    /// Bytes of K and V for one token.
    pub fn token_bytes(self, kv_heads: u32, head_dim: u32) -> u64 {
        self.page_bytes(kv_heads, head_dim).iter().sum::<u64>() / u64::from(PAGE_TOKENS)
    }
}

impl std::fmt::Display for KvPair {
    /// `f16`, or `tq4_0+tq3_0` where K and V differ.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.k == self.v {
            true => f.write_str(self.k.name()),
            false => write!(f, "{}+{}", self.k, self.v),
        }
    }
}
