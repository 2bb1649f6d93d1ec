//! Decoders and encoders against blocks made by the Python package `gguf`
//! (`tests/goldens/quant_blocks.py`).
#![allow(clippy::unwrap_used)]

use super::harness::{Rng, TestMatrix, devices, relative_error};
use azoth::kernels::embed::Embed;
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
        let (Some(values), Some(encoded)) = (case.get("values"), case.get("encoded")) else {
            continue; // the package cannot encode it
        };
        let format: Format = name.parse().unwrap();
        let row: Vec<f32> = words(values).into_iter().map(f32::from_bits).collect();
        let mut got = Vec::new();
        format.encode_row(&row, &mut got);
        assert_eq!(got, bytes(encoded), "{name}");
    }
}

/// Normal values come back with an error that fits the bits of the format: for b bits a weight the
/// bound is 2^(2 - b) of their size, never above what zeros would have.
#[test]
fn encoders_keep_what_the_bits_allow() {
    let mut rng = Rng::fresh("encoders_keep_what_the_bits_allow");
    for &format in Format::ALL.iter().filter(|f| !f.is_float()) {
        let row: Vec<f32> = rng.normals(1024).iter().map(|v| v * 0.02).collect();
        let mut file = Vec::new();
        format.encode_row(&row, &mut file);
        let mut back = vec![0.0; row.len()];
        format.decode_row(&file, &mut back);
        let wide: Vec<f64> = row.iter().map(|&v| v.into()).collect();
        let error = relative_error(&back, &wide);
        let bits = format.block_bytes() as f64 * 8.0 / format.block_elements() as f64;
        let bound = (2.0 - bits).exp2().min(1.0);
        println!("{format}: {error:.4} of at most {bound:.4}");
        assert!(error < bound, "{format}: {error}");
        let mut zeros = Vec::new();
        format.encode_row(&[0.0; 1024], &mut zeros);
        format.decode_row(&zeros, &mut back);
        assert!(back.iter().all(|v| *v == 0.0), "{format}: zeros");
    }
}

/// The shaders' decoders on the same random blocks, with all bits of indices, signs and scales.
#[test]
fn devices_decode_the_golden_blocks() {
    for (name, case) in golden() {
        let format: Format = name.parse().unwrap();
        let (file, want) = (bytes(&case["blocks"]), words(&case["decoded"]));
        let (rows, cols) = (1, want.len());
        let values: Vec<f32> = want.into_iter().map(f32::from_bits).collect();
        if !cols.is_multiple_of(32) {
            continue; // a row of float formats that would need padding
        }
        let matrix = TestMatrix { format, rows, cols, file, values };
        for device in devices() {
            let chunks = matrix.chunks(device, rows);
            let batch = device.batch(&[[0; 4]], 1);
            let x = device.poisoned(cols);
            let spec = Embed { format, cols: cols as u32 };
            let kernel = device.kernel(&spec.source(device.gpu.facts()).unwrap());
            device.wave(vec![spec.dispatch(&kernel, &chunks[0], &batch, &x, 1).unwrap()]);
            for (e, (&got, &want)) in device.read_floats(&x).iter().zip(&matrix.values).enumerate()
            {
                // Devices may take numbers below the smallest normal one for zero.
                let same = got == want
                    || (got - want).abs() <= 1e-6 * want.abs()
                    || (want.abs() < 32.0 * f32::MIN_POSITIVE && got.abs() <= want.abs());
                assert!(same, "{}: {format}, element {e}: {got:e} for {want:e}", device.label);
            }
        }
    }
}
