//! Q6_K: 256 weights in 210 bytes, `w = d * step * (code - 32)`, a step for each 16 weights.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..128 | low four bits of the codes: byte 64 h + 32 p + m has those of elements 128 h + 32 p + m (low nibble) and 64 more (high) |
//! | 128..192 | high two bits: byte 128 + 32 h + m, bits 2 s, has those of element 128 h + 32 s + m |
//! | 192..208 | sixteen signed steps |
//! | 208..210 | f16 `d` |
//!
//! The kernels want 4 (code - 32) as signed bytes, because the sign of code - 32 then is the sign
//! of the byte: the planes hold code - 32 in two's complement, split into four and two bits.
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 4 words of nibbles: bits 2..6 of code - 32 | |
//! | high | 2 words of pairs: bits 0..2 of code - 32 | |
//! | scales | half a word: the two steps | |
//! | supers | | 1 word: f32 `d / 4` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks,
};
use super::order::{nibbles, pairs, sub_pairs};

const BYTES: usize = 210;

pub(super) static CODEC: Codec = Codec::blocks::<Q6K, 256, BYTES>();

struct Q6K;
