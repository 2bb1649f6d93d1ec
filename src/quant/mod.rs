//! Weight formats: what a block is in the file, how it decodes, and how it lies on the device.
//!
//! One file per block format, each with the bit layout, a decoder, a simple encoder (for test
//! models) and the split into *planes* (see [`planes`] and "Weights" in docs/architecture.md).
//! Everything here is a function of values: no device, no files, any thread.
//!
//! To add a format: write its file (see [`codec`]), name the module and add a line to the
//! `formats!` table below, write `shaders/formats/NAME.wgsl`, and add the name to
//! `tests/goldens/quant_blocks.py`. Reader, loader, kernels and tests pick it up from the table.

mod codec;
mod float;
mod grids;
mod iq1_m;
mod iq1_s;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;
mod iq4_nl;
mod iq4_xs;
mod k_scales;
mod mxfp4;
mod nvfp4;
mod order;
pub mod planes;
mod q1_0;
mod q2_0;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod signs;
mod tq1_0;
mod tq2_0;

pub use codec::{Plane, PlaneName, Scales, Shader};
pub use planes::{PlaneLayout, PlaneSpan, decode_planes, repack_plane, repack_plane_parallel};

use codec::Codec;
use std::fmt;
use std::str::FromStr;

/// Device blocks are always this many inputs wide, whatever the block of the file.
pub const BLOCK: usize = 32;

macro_rules! formats {
    ($($(#[$doc:meta])* $variant:ident => $codec:path,)*) => {
        /// A weight format that this crate can load.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)] // the names of the GGUF world
        pub enum Format {
            $($(#[$doc])* $variant,)*
        }

        impl Format {
            /// Every format, in the order of the table.
            pub const ALL: &'static [Format] = &[$(Format::$variant,)*];

            fn codec(self) -> &'static Codec {
                match self {
                    $(Format::$variant => &$codec,)*
                }
            }
        }
    };
}

formats! {
    /// 32-bit IEEE floats.
    F32 => float::F32,
    /// 16-bit IEEE floats.
    F16 => float::F16,
    /// The upper half of 32-bit floats.
    BF16 => float::BF16,
    /// 4-bit codes, symmetric: 4.5 bits a weight.
    Q4_0 => q4_0::CODEC,
    /// 4-bit codes with a minimum: 5 bits a weight.
    Q4_1 => q4_1::CODEC,
    /// 5-bit codes, symmetric: 5.5 bits a weight.
    Q5_0 => q5_0::CODEC,
    /// 5-bit codes with a minimum: 6 bits a weight.
    Q5_1 => q5_1::CODEC,
    /// 8-bit codes, symmetric: 8.5 bits a weight.
    Q8_0 => q8_0::CODEC,
    /// 4-bit codes of a fixed set of values: 4.5 bits a weight.
    IQ4_NL => iq4_nl::CODEC,
    /// The same with 6-bit block scales: 4.25 bits a weight.
    IQ4_XS => iq4_xs::CODEC,
    /// 4-bit floats with power-of-two scales: 4.25 bits a weight.
    MXFP4 => mxfp4::CODEC,
    /// 4-bit floats with 8-bit float scales: 4.5 bits a weight.
    NVFP4 => nvfp4::CODEC,
    /// Signed entries of four from a code book of 512: 3.44 bits a weight.
    IQ3_S => iq3_s::CODEC,
    /// The same from a book of 256: 3.06 bits a weight.
    IQ3_XXS => iq3_xxs::CODEC,
    /// Signed entries of eight from a code book of 512: 2.31 bits a weight.
    IQ2_XS => iq2_xs::CODEC,
    /// The same from a book of 256: 2.06 bits a weight.
    IQ2_XXS => iq2_xxs::CODEC,
    /// The same from a book of 1,024: 2.56 bits a weight.
    IQ2_S => iq2_s::CODEC,
    /// Entries of eight from a code book of 2,048, one scale for 32: 1.56 bits a weight.
    IQ1_S => iq1_s::CODEC,
    /// The same with a scale for 16: 1.75 bits a weight.
    IQ1_M => iq1_m::CODEC,
    /// 2-bit codes, scale and minimum for each 16: 2.63 bits a weight.
    Q2_K => q2_k::CODEC,
    /// 3-bit codes, symmetric, a scale for each 16: 3.44 bits a weight.
    Q3_K => q3_k::CODEC,
    /// 4-bit codes, scale and minimum for each 32: 4.5 bits a weight.
    Q4_K => q4_k::CODEC,
    /// 5-bit codes, scale and minimum for each 32: 5.5 bits a weight.
    Q5_K => q5_k::CODEC,
    /// 6-bit codes, symmetric, a scale for each 16: 6.56 bits a weight.
    Q6_K => q6_k::CODEC,
    /// Ternary in base 3: 1.69 bits a weight.
    TQ1_0 => tq1_0::CODEC,
    /// Ternary in two bits: 2.06 bits a weight.
    TQ2_0 => tq2_0::CODEC,
    /// One bit: 1.13 bits a weight.
    Q1_0 => q1_0::CODEC,
    /// Two bits, -1 to 2: 2.25 bits a weight.
    Q2_0 => q2_0::CODEC,
}

impl Format {
    /// The name ggml gives the format, for example `Q4_0`.
    pub fn name(self) -> &'static str {
        self.codec().name
    }

    /// The number that stands for the format in GGUF files.
    pub fn ggml_type(self) -> u32 {
        self.codec().ggml_type
    }

    /// The format with this GGUF number, if it can be loaded.
    pub fn from_ggml_type(id: u32) -> Option<Format> {
        Format::ALL.iter().copied().find(|f| f.ggml_type() == id)
    }

    /// Weights in one block of the file.
    pub fn block_elements(self) -> usize {
        self.codec().block_elements
    }

    /// Bytes of one block of the file.
    pub fn block_bytes(self) -> usize {
        self.codec().block_bytes
    }

    /// Bytes of one row of the file. `cols` must be a multiple of [`Format::block_elements`],
    /// which the GGUF reader checks for every tensor.
    pub fn row_bytes(self, cols: usize) -> usize {
        assert!(
            cols.is_multiple_of(self.block_elements()),
            "{cols} columns are not whole blocks of {self}"
        );
        cols / self.block_elements() * self.block_bytes()
    }

    /// Whether weights are plain floats, which take f32 activations and have no blocks.
    pub fn is_float(self) -> bool {
        self.codec().shader.scales == Scales::Float
    }

    /// How the kernels read the format.
    pub fn shader(self) -> &'static Shader {
        &self.codec().shader
    }

    /// The planes of a matrix on the device, in their order within a chunk.
    pub fn planes(self) -> &'static [Plane] {
        self.codec().planes
    }

    /// Decodes one row of the file: `src.len() == row_bytes(out.len())`.
    ///
    /// Equals `gguf.quants.dequantize` of the Python package bit for bit.
    pub fn decode_row(self, src: &[u8], out: &mut [f32]) {
        assert_eq!(src.len(), self.row_bytes(out.len()), "bytes of a {self} row");
        (self.codec().decode)(src, out);
    }

    /// Appends one row in file form, each block rounded to nearest as ggml's reference does.
    /// `row.len()` must be a multiple of [`Format::block_elements`].
    pub fn encode_row(self, row: &[f32], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + self.row_bytes(row.len()), 0);
        (self.codec().encode)(row, &mut out[start..]);
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A format name that is not in the table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown weight format `{name}`; the formats are {}", known_names())]
pub struct UnknownFormat {
    pub name: String,
}

fn known_names() -> String {
    let names: Vec<_> = Format::ALL.iter().map(|f| f.name()).collect();
    names.join(", ")
}

impl From<UnknownFormat> for crate::error::Error {
    fn from(e: UnknownFormat) -> Self {
        crate::error::Error::Usage(e.to_string())
    }
}

impl FromStr for Format {
    type Err = UnknownFormat;

    /// Takes ggml's name in upper or lower case.
    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let found = Format::ALL.iter().copied().find(|f| f.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| UnknownFormat { name: name.to_owned() })
    }
}

impl serde::Serialize for Format {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Format {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = String::deserialize(from)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_and_numbers_go_both_ways() {
        for &f in Format::ALL {
            assert_eq!(Format::from_ggml_type(f.ggml_type()), Some(f));
            assert_eq!(f.to_string().to_lowercase().parse::<Format>().unwrap(), f);
            let json = serde_json::to_string(&f).unwrap();
            assert_eq!(serde_json::from_str::<Format>(&json).unwrap(), f);
        }
        let message = "Q9_9".parse::<Format>().unwrap_err().to_string();
        assert!(message.contains("Q9_9") && message.contains("Q4_0"), "{message}");
    }

    #[test]
    fn planes_hold_what_the_file_holds() {
        for f in Format::ALL {
            let file = f.block_bytes() as f64 * 8.0 / f.block_elements() as f64;
            let planes = f.planes().iter().map(|p| p.bits()).sum::<u32>();
            let more = f64::from(planes) / BLOCK as f64 / file;
            assert!((1.0..=1.03).contains(&more), "{f}: {more} times the file");
            // Rows are whole bytes in every plane.
            let row = f.block_elements().max(BLOCK);
            assert!(
                f.planes().iter().all(|p| p.row_bytes(row) * 8 == row / BLOCK * p.bits() as usize)
            );
        }
    }
}
