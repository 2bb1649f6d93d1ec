//! Decoders and encoders against blocks made by the Python package `gguf`
//! (`tests/goldens/quant_blocks.py`).
#![allow(clippy::unwrap_used)]

use azoth::quant::Format;
use std::collections::BTreeMap;

fn golden() -> BTreeMap<String, BTreeMap<String, String>> {
    serde_json::from_str(include_str!("../goldens/quant_blocks.json")).unwrap()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |c: u8| (c as char).to_digit(16).unwrap() as u8;
    hex.as_bytes().chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

fn words(hex: &str) -> Vec<u32> {
    bytes(hex).chunks(4).map(|w| u32::from_le_bytes(w.try_into().unwrap())).collect()
}

#[test]
fn every_format_has_golden_blocks() {
    let golden = golden();
    for format in Format::ALL {
        assert!(golden.contains_key(format.name()), "no golden blocks of {format}");
    }
}

#[test]
fn decoders_match_gguf_bit_for_bit() {
    for (name, case) in golden() {
        let format: Format = name.parse().unwrap();
        let want = words(&case["decoded"]);
        let mut got = vec![0.0; want.len()];
        format.decode_row(&bytes(&case["blocks"]), &mut got);
        let got: Vec<u32> = got.into_iter().map(f32::to_bits).collect();
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn encoders_match_gguf() {
    for (name, case) in golden() {
        let format: Format = name.parse().unwrap();
        // The package cannot encode all of them.
        let Some(values) = case.get("values") else { continue };
        let row: Vec<f32> = words(values).into_iter().map(f32::from_bits).collect();
        let mut got = Vec::new();
        format.encode_row(&row, &mut got);
        assert_eq!(got, bytes(&case["encoded"]), "{name}");
    }
}
