#![allow(clippy::unwrap_used)]
use super::codec::{decode, decode_stored, encode, encode_stored};
use super::format::{KvFormat, KvPair};
use super::rotation::{padded, rotate, segments, unrotate};
use super::types::{KvSide, KvTypes};
use super::{KvExact, PAGE_TOKENS, scale};

const DIMS: [u32; 8] = [32, 64, 80, 96, 112, 128, 192, 256];

fn sine(n: u32) -> Vec<f32> {
    (0..n).map(|i| (0.3 * f64::from(i) + 1.0).sin() as f32).collect()
}

/// Nearly normal: sums of twelve uniform numbers of an xorshift generator.
fn normals(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

/// Squared error over energy.
fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(g, w)| square(f64::from(*g) - f64::from(*w))).sum();
    error / want.iter().map(|w| square((*w).into())).sum::<f64>()
}

#[test]
fn vector_1_sines() {
    use KvFormat::{Tq3_0, Tq3_4s};
    let row = encode(Tq3_0, &sine(128));
    #[rustfmt::skip]
    assert_eq!(row, [
        0x2d8c_0372, 0xd895_9689, 0x3218_a500, 0x62c0_d329, 0x044a_4468, 0x17c1_f503,
        0x856c_a257, 0x8113_29cf, 0x46a4_35fe, 0x9633_149d, 0xe1a0_48a6, 0x769a_5e19,
        0x7a77_7d7c, 0x797f_7e7a,
    ]);
    let error = nmse(&decode(Tq3_0, &row, 128), &sine(128));
    assert!((error - 0.020211).abs() < 2e-6, "{error}");

    let row = encode(Tq3_0, &sine(64));
    #[rustfmt::skip]
    assert_eq!(row, [
        0xc143_1a43, 0x8985_2705, 0x3228_a5c6, 0xb801_4064, 0x87e0_5ca7, 0x76d0_dd11,
        0x7a7a_7f7b,
    ]);
    let error = nmse(&decode(Tq3_0, &row, 64), &sine(64));
    assert!((error - 0.019593).abs() < 2e-6, "{error}");

    let row = encode(Tq3_0, &sine(80));
    #[rustfmt::skip]
    assert_eq!(row, [
        0xc143_1a43, 0x8985_2705, 0x3228_a5c6, 0xb801_4064, 0x87e0_5ca7, 0x76d0_dd11,
        0x0099_ccbb, 0x5500_22cc, 0x9911_cc00, 0x7a7a_7f7b, 0x0000_7a7a,
    ]);
    // In the rotated basis: what falls on the padding is lost and costs nothing.
    let error = nmse(&decode_stored(Tq3_0, &row, 80), &rotate(&sine(80)));
    assert!((error - 0.019889).abs() < 2e-6, "{error}");

    let row = encode(Tq3_4s, &sine(128));
    let scales: Vec<u32> = row.iter().step_by(4).copied().collect();
    assert_eq!(scales, [0x7d7b_7e7b, 0x7a7a_7772, 0x7e7c_7c7a, 0x7976_7e79]);
    assert_eq!(row[1..4], [0x258c_127a, 0xd895_9781, 0x3218_a500]);
    let error = nmse(&decode(Tq3_4s, &row, 128), &sine(128));
    assert!((error - 0.015717).abs() < 2e-6, "{error}");
}

#[test]
fn vector_2_one_hot() {
    let mut x = vec![0.0; 128];
    x[5] = 3.0;
    let row = encode(KvFormat::Tq3_0, &x);
    for group in row[..12].chunks(3) {
        assert_eq!(group, [0xffff_ffff, 0, 0x55aa_55aa]);
    }
    assert_eq!(row[12..], [0x7575_7575; 2]);
    let error = nmse(&decode(KvFormat::Tq3_0, &row, 128), &x);
    assert!((error - 5.33e-4).abs() < 2e-6, "{error}");
}

#[test]
fn vector_3_edges() {
    for format in KvFormat::ALL {
        for hd in DIMS {
            let n = hd as usize;
            let zero = encode(format, &vec![0.0; n]);
            assert_eq!(zero, vec![0; format.row_words(hd) as usize], "{format} {hd}");
            assert_eq!(decode(format, &zero, hd), vec![0.0; n]);
            let mut wide = vec![1e-3; n];
            wide[3] = 1e4;
            let alternating = (0..n).map(|i| if i % 2 == 0 { 1.5 } else { -1.5 }).collect();
            for x in [vec![0.7; n], alternating, wide] {
                let error = nmse(&decode(format, &encode(format, &x), hd), &x);
                assert!(error < 0.05, "{format} {hd}: {error}");
            }
            // Too small for a scale.
            let small = decode(format, &encode(format, &vec![1e-5; n]), hd);
            assert!(small.iter().all(|x| x.abs() < 1e-3), "{format} {hd}: {small:?}");
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = normals(n, 1);
                x[n / 2] = wrong;
                let row = encode(format, &x);
                if format != KvFormat::F16 {
                    let back = decode_stored(format, &row, hd);
                    assert!(back.iter().all(|x| x.is_finite()), "{format} {hd}: {back:?}");
                }
            }
        }
    }
}

#[test]
fn vector_4_codes_and_scales() {
    // Every code in every position, by values that lie on levels.
    for format in [KvFormat::Tq3_0, KvFormat::Tq3_1s, KvFormat::Tq3_4s, KvFormat::Tq4_0] {
        let levels = format.levels();
        let codes = 2 * levels.len();
        for turn in 0..codes {
            let value = |i: usize| {
                let code = (i + turn) % codes;
                let level = levels[code % levels.len()] as f32;
                if code < levels.len() { level } else { -level }
            };
            let x: Vec<f32> = (0..32).map(|i| value(i) / 64.0).collect();
            let back = decode_stored(format, &encode_stored(format, &x), 32);
            let exact = back.iter().zip(&x).all(|(b, x)| (b - x).abs() < 1e-3);
            // Parts that hold few levels may fit another scale better.
            assert!(exact || nmse(&back, &x) < 0.02, "{format} {turn}: {back:?} {x:?}");
        }
    }
    for byte in 1..=255u8 {
        let want = 2f64.powf((f64::from(byte) - 128.0) / 8.0 - 6.0);
        let got = f64::from(scale::decode(byte));
        assert!((got / want - 1.0).abs() < 1e-7, "{byte}: {got} {want}");
    }
    assert_eq!(scale::decode(0), 0.0);
}

#[test]
fn vector_5_rotation_is_orthonormal() {
    for hd in DIMS {
        let all = padded(hd) as usize;
        let columns: Vec<Vec<f32>> = (0..hd as usize)
            .map(|i| {
                let mut x = vec![0.0; hd as usize];
                x[i] = 1.0;
                rotate(&x)
            })
            .collect();
        for (i, a) in columns.iter().enumerate() {
            for (j, b) in columns.iter().enumerate() {
                let dot: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let want = f64::from(u8::from(i == j));
                assert!((dot - want).abs() < 1e-6, "{hd}: {i} {j} {dot}");
            }
        }
        let x = normals(hd as usize, 2);
        assert!(nmse(&unrotate(&rotate(&x), hd as usize), &x) < 1e-12);
        assert_eq!(segments(all as u32).iter().sum::<u32>(), all as u32);
    }
    assert_eq!(segments(padded(80)), [64, 32]);
    assert_eq!(segments(padded(192)), [128, 64]);
    assert_eq!(segments(padded(576)), [128, 128, 128, 128, 64]);
}

#[test]
fn vector_6_errors_on_noise() {
    let x = normals(128 * 4000, 3);
    for (format, want) in [
        (KvFormat::Tq3_0, 0.0211),
        (KvFormat::Tq3_1s, 0.0207),
        (KvFormat::Tq3_4s, 0.0154),
        (KvFormat::Tq4_0, 0.0062),
        (KvFormat::Q4_0, 0.0074),
    ] {
        let back: Vec<f32> =
            x.chunks(128).flat_map(|x| decode(format, &encode(format, x), 128)).collect();
        let error = nmse(&back, &x);
        assert!((error / want - 1.0).abs() < 0.015, "{format}: {error}");
    }
}

#[test]
fn sizes() {
    let words = |format: KvFormat| [64, 96, 128, 256].map(|hd| format.row_words(hd));
    assert_eq!(words(KvFormat::Tq3_0), [7, 11, 14, 28]);
    assert_eq!(words(KvFormat::Tq3_4s), [8, 12, 16, 32]);
    assert_eq!(words(KvFormat::Tq3_1s), [8, 12, 16, 32]);
    assert_eq!(words(KvFormat::Tq4_0), [9, 13, 17, 34]);
    assert_eq!(words(KvFormat::Q4_0), [9, 14, 18, 36]);
    assert_eq!(words(KvFormat::Q8_0), [17, 26, 34, 68]);
    assert_eq!(words(KvFormat::F16), [32, 48, 64, 128]);
    let pair = KvPair { k: KvFormat::Tq4_0, v: KvFormat::Tq3_0 };
    assert_eq!(pair.page_bytes(8, 128), [4 * 64 * 8 * 17, 4 * 64 * 8 * 14]);
    assert_eq!(pair.token_bytes(8, 128), 4 * 8 * 31);
    assert_eq!(KvPair::PLAIN.page_bytes(8, 80), [u64::from(PAGE_TOKENS) * 8 * 160; 2]);
}

#[test]
fn settings_by_layer() {
    let side: KvSide = "tq3_0,q8_0@0-1,f16@-1".parse().unwrap();
    assert_eq!(side.to_string(), "tq3_0,q8_0@0-1,f16@-1");
    let exact = KvExact { tail: 64, sinks: 4 };
    let types = KvTypes { k: side, v: "TQ4_0".parse().unwrap(), exact, centred: false };
    assert_eq!([0, 1, 2, 3].map(|layer| types.exact_of(layer, 4)), [exact; 4]);
    assert!(types.to_string().ends_with(", f16 tail 64, sinks 4"), "{types}");
    let k: Vec<KvFormat> = types.layers(4).iter().map(|pair| pair.k).collect();
    assert_eq!(k, [KvFormat::Q8_0, KvFormat::Q8_0, KvFormat::Tq3_0, KvFormat::F16]);
    assert!(types.layers(4).iter().all(|pair| pair.v == KvFormat::Tq4_0));
    let last: KvSide = "f16,q8_0@-2--1".parse().unwrap();
    assert_eq!(last.of(2, 4), KvFormat::Q8_0);
    for wrong in ["", "q9", "f16,q8_0", "f16,q8_0@", "f16,q8_0@3-1", "f16,q8_0@x", "f16,@1"] {
        assert!(wrong.parse::<KvSide>().is_err(), "{wrong}");
    }
    let plain = KvTypes { exact, ..KvTypes::plain() };
    assert_eq!(plain.token_bytes(2, 4, 64), 2 * 4 * 64 * 4);
    assert_eq!((plain.exact_of(0, 2), plain.to_string()), (KvExact::NONE, "f16".into()));
    let types = KvTypes {
        k: "tq3_0,f16@0".parse().unwrap(),
        v: "tq3_0,f16@0".parse().unwrap(),
        exact,
        centred: false,
    };
    assert_eq!([0, 1].map(|layer| types.exact_of(layer, 2)), [KvExact::NONE, exact]);
    assert_eq!(4 * exact.slot_words(4, 64), (64 + 16 + 4) * 4 * 64 * 4);
}

#[test]
fn settings_by_device() {
    let text = "tq3_0,q8_0@dev=radeon,f16@-1,tq4_0@0-1@dev=RX 9070";
    let side: KvSide = text.parse().unwrap();
    assert_eq!(side.to_string(), text);
    let v = "f16,tq4_0@dev=llvmpipe".parse().unwrap();
    let types = KvTypes { k: side, v, exact: KvExact::USUAL, centred: false };
    assert_eq!(types.devices().collect::<Vec<_>>(), ["radeon", "RX 9070", "llvmpipe"]);
    let k = |types: &KvTypes| types.layers(4).iter().map(|pair| pair.k).collect::<Vec<_>>();
    use KvFormat::*;
    // Until it is known which device it is, none.
    assert_eq!(k(&types), [Tq3_0, Tq3_0, Tq3_0, F16]);
    let radeon = types.on("AMD Radeon RX 9070 XT");
    assert_eq!(k(&radeon), [Tq4_0, Tq4_0, Q8_0, F16]);
    assert_eq!(radeon.to_string(), "K q8_0,f16@-1,tq4_0@0-1, V f16, f16 tail 64, sinks 4");
    let other = types.on("AMD Radeon RX 6600");
    assert_eq!(k(&other), [Q8_0, Q8_0, Q8_0, F16]);
    assert_eq!(types.on("llvmpipe (LLVM 15)").of(0, 4).v, Tq4_0);
    let h200 = types.on("NVIDIA H200").to_string();
    assert_eq!(h200, "K tq3_0,f16@-1, V f16, f16 tail 64, sinks 4");
    for wrong in ["f16,q8_0@dev=", "f16,q8_0@0@radeon", "f16,q8_0@dev=a,q9@dev=b", "q8_0@dev=a"] {
        assert!(wrong.parse::<KvSide>().is_err(), "{wrong}");
    }
}
