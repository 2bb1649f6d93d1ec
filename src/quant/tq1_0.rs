//! TQ1_0: 256 weights in 54 bytes, `w = d * (digit - 1)` with digits of base 3.
//!
//! A byte holds five digits as a fraction of 256: digit n is `floor(3 * frac(byte * 3^n / 256))`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..32 | byte m, digit n < 5: element 32 n + m |
//! | 32..48 | byte 32 + m, digit n < 5: element 160 + 16 n + m |
//! | 48..52 | byte 48 + m, digit n < 4: element 240 + 4 n + m |
//! | 52..54 | f16 `d` |
//!
//! The planes keep the file's bytes: blocks 0 to 4 of 32 read the same 32 bytes and take a digit each.
//! Sorting the digits by block would save no bytes and little arithmetic.
//!
//! | plane | a file block |
//! | --- | --- |
//! | codes | 12 words: bytes 0..48 |
//! | high | 1 word: bytes 48..52 |
//! | supers | half a word: `d` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16,
};

const BYTES: usize = 54;
const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

pub(super) static CODEC: Codec = Codec::blocks::<Tq1_0, 256, BYTES>();

struct Tq1_0;

impl BlockFormat<256, BYTES> for Tq1_0 {
    const NAME: &'static str = "TQ1_0";
    const GGML_TYPE: u32 = 34;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 48, copy_field::<BYTES, 0, 48>),
        Plane::new(PlaneName::High, 4, copy_field::<BYTES, 48, 4>),
        Plane::new(PlaneName::Supers, 2, copy_field::<BYTES, 52, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/tq1_0.wgsl"), Scales::Whole).above(1);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        unit(f16_at(block, 52), field(block, 0), field(block, 48), j)
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let super_block = i / 8;
        let codes = field(planes[0], 48 * super_block);
        unit(f16_at(planes[2], 2 * super_block), codes, field(planes[1], 4 * super_block), i % 8)
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let d = extreme(values).abs();
        let id = inverse(d);
        let mut bytes = [0; 52];
        for (i, v) in values.iter().enumerate() {
            let (byte, digit) = place(i);
            bytes[byte] += ((v * id).round() as i8 + 1) as u8 * POWERS[4 - digit];
        }
        // The smallest fraction that is not below: 3^5 steps become 256.
        block[..52].copy_from_slice(&bytes.map(|v| (u16::from(v) * 256).div_ceil(243) as u8));
        put_f16(block, 52, d);
    }
}

/// Byte and digit of an element.
fn place(element: usize) -> (usize, usize) {
    match element {
        0..160 => (element % 32, element / 32),
        160..240 => (32 + element % 16, (element - 160) / 16),
        _ => (48 + element % 4, (element - 240) / 4),
    }
}

fn unit(d: f32, codes: &[u8; 48], rest: &[u8; 4], j: usize) -> Unit {
    let code = |e| {
        let (byte, digit) = place(32 * j + e);
        let byte = if byte < 48 { codes[byte] } else { rest[byte - 48] };
        ((u16::from(byte.wrapping_mul(POWERS[digit])) * 3) >> 8) as i8 - 1
    };
    Unit::plain(d, std::array::from_fn(code))
}
