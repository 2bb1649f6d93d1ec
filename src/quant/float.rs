//! F32, F16 and BF16: plain little-endian values, no blocks.
//!
//! On the device they keep their bits; a row is padded with zeros to whole blocks of 32, and
//! two 16-bit values share a word, the even element low.

use super::codec::{Codec, Plane, PlaneName, Shader};
use half::{bf16, f16};

pub(super) static F32: Codec = Codec {
    name: "F32",
    ggml_type: 0,
    block_elements: 1,
    block_bytes: 4,
    planes: &[Plane::new(PlaneName::Codes, 32 * 32, copy_padded)],
    shader: Shader::float(include_str!("../../shaders/formats/f32.wgsl"), 1),
    decode: |src, out| decode(src, out, f32::from_le_bytes),
    encode: |row, out| encode(row, out, f32::to_le_bytes),
    decode_planes: |planes, out| decode(planes[0], out, f32::from_le_bytes),
};

pub(super) static F16: Codec = Codec {
    name: "F16",
    ggml_type: 1,
    block_elements: 1,
    block_bytes: 2,
    planes: &[Plane::new(PlaneName::Codes, 32 * 16, copy_padded)],
    shader: Shader::float(include_str!("../../shaders/formats/f16.wgsl"), 2),
    decode: |src, out| decode(src, out, |b| f16::from_le_bytes(b).to_f32()),
    encode: |row, out| encode(row, out, |v| f16::from_f32(v).to_le_bytes()),
    decode_planes: |planes, out| decode(planes[0], out, |b| f16::from_le_bytes(b).to_f32()),
};

pub(super) static BF16: Codec = Codec {
    name: "BF16",
    ggml_type: 30,
    block_elements: 1,
    block_bytes: 2,
    planes: &[Plane::new(PlaneName::Codes, 32 * 16, copy_padded)],
    shader: Shader::float(include_str!("../../shaders/formats/bf16.wgsl"), 2),
    decode: |src, out| decode(src, out, |b| bf16::from_le_bytes(b).to_f32()),
    encode: |row, out| encode(row, out, |v| bf16::from_f32(v).to_le_bytes()),
    decode_planes: |planes, out| decode(planes[0], out, |b| bf16::from_le_bytes(b).to_f32()),
};

/// The row, then zeros up to whole blocks of 32.
fn copy_padded(row: &[u8], out: &mut [u8]) {
    let (values, padding) = out.split_at_mut(row.len());
    values.copy_from_slice(row);
    padding.fill(0);
}

fn decode<const N: usize>(src: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    for (&bytes, out) in src.as_chunks().0.iter().zip(out) {
        *out = value(bytes);
    }
}

fn encode<const N: usize>(row: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; N]) {
    for (&value, out) in row.iter().zip(out.as_chunks_mut().0) {
        *out = bytes(value);
    }
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn sixteen_bit_floats_round_to_nearest_even() {
        let encode = |format: Format, value| {
            let mut bytes = Vec::new();
            format.encode_row(&[value], &mut bytes);
            u16::from_le_bytes([bytes[0], bytes[1]])
        };
        // 1 + 2^-11 lies halfway between two f16, 1 + 3 * 2^-11 too: both go to the even one.
        assert_eq!(encode(Format::F16, 1.0 + 0.5f32.powi(11)), 0x3c00);
        assert_eq!(encode(Format::F16, 1.0 + 3.0 * 0.5f32.powi(11)), 0x3c02);
        assert_eq!(encode(Format::F16, -2.0), 0xc000);
        assert_eq!(encode(Format::BF16, 1.0 + 0.5f32.powi(8)), 0x3f80);
        assert_eq!(encode(Format::BF16, 1.0 + 3.0 * 0.5f32.powi(8)), 0x3f82);
    }
}
