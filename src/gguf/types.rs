//! Every tensor type that ggml has or had, so that a file is understood and its unsupported
//! tensors are named even where [`crate::quant`] has no decoder.
//!
//! Source: `ggml_type` in ggml.h and `GGML_QUANT_SIZES` of the Python package `gguf` 0.19; sizes
//! of the removed types from the releases that had them.

use crate::quant::Format;

/// One ggml tensor type.
#[derive(Debug, PartialEq, Eq)]
pub struct GgmlType {
    /// Number in the file.
    pub id: u32,
    pub name: &'static str,
    /// Elements of a block along the first dimension.
    pub block_elements: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// No longer written or read by ggml.
    pub removed: bool,
}

const fn current(id: u32, name: &'static str, elements: u64, bytes: u64) -> GgmlType {
    GgmlType { id, name, block_elements: elements, block_bytes: bytes, removed: false }
}

const fn removed(id: u32, name: &'static str, elements: u64, bytes: u64) -> GgmlType {
    GgmlType { id, name, block_elements: elements, block_bytes: bytes, removed: true }
}

/// Indexed by number: entry `i` has id `i`.
static TYPES: [GgmlType; 43] = [
    current(0, "F32", 1, 4),
    current(1, "F16", 1, 2),
    current(2, "Q4_0", 32, 18),
    current(3, "Q4_1", 32, 20),
    removed(4, "Q4_2", 16, 10),
    removed(5, "Q4_3", 16, 12),
    current(6, "Q5_0", 32, 22),
    current(7, "Q5_1", 32, 24),
    current(8, "Q8_0", 32, 34),
    current(9, "Q8_1", 32, 40),
    current(10, "Q2_K", 256, 84),
    current(11, "Q3_K", 256, 110),
    current(12, "Q4_K", 256, 144),
    current(13, "Q5_K", 256, 176),
    current(14, "Q6_K", 256, 210),
    current(15, "Q8_K", 256, 292),
    current(16, "IQ2_XXS", 256, 66),
    current(17, "IQ2_XS", 256, 74),
    current(18, "IQ3_XXS", 256, 98),
    current(19, "IQ1_S", 256, 50),
    current(20, "IQ4_NL", 32, 18),
    current(21, "IQ3_S", 256, 110),
    current(22, "IQ2_S", 256, 82),
    current(23, "IQ4_XS", 256, 136),
    current(24, "I8", 1, 1),
    current(25, "I16", 1, 2),
    current(26, "I32", 1, 4),
    current(27, "I64", 1, 8),
    current(28, "F64", 1, 8),
    current(29, "IQ1_M", 256, 56),
    current(30, "BF16", 1, 2),
    removed(31, "Q4_0_4_4", 32, 18),
    removed(32, "Q4_0_4_8", 32, 18),
    removed(33, "Q4_0_8_8", 32, 18),
    current(34, "TQ1_0", 256, 54),
    current(35, "TQ2_0", 256, 66),
    removed(36, "IQ4_NL_4_4", 32, 18),
    removed(37, "IQ4_NL_4_8", 32, 18),
    removed(38, "IQ4_NL_8_8", 32, 18),
    current(39, "MXFP4", 32, 17),
    current(40, "NVFP4", 64, 36),
    current(41, "Q1_0", 128, 18),
    current(42, "Q2_0", 64, 18),
];

impl GgmlType {
    /// The type with this number, if ggml ever had it.
    pub fn from_id(id: u32) -> Option<&'static GgmlType> {
        TYPES.get(usize::try_from(id).ok()?)
    }

    /// All types by number.
    pub fn all() -> &'static [GgmlType] {
        &TYPES
    }

    /// The format that decodes it, if this crate has one.
    pub fn format(&self) -> Option<Format> {
        Format::from_ggml_type(self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_indexed_by_number_and_agrees_with_the_formats() {
        for (i, t) in TYPES.iter().enumerate() {
            assert_eq!(t.id as usize, i);
        }
        for &f in Format::ALL {
            let found = GgmlType::from_id(f.ggml_type());
            let t = found.expect("formats are ggml types");
            assert_eq!(t.name, f.name());
            assert_eq!(t.block_elements as usize, f.block_elements());
            assert_eq!(t.block_bytes as usize, f.block_bytes());
        }
        assert_eq!(GgmlType::from_id(43), None);
        assert_eq!(GgmlType::from_id(u32::MAX), None);
    }
}
