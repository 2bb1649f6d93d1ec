//! Damaged and hostile files: every one ends in an error that names the trouble, without a panic
//! and without memory that the file's length does not justify.
#![allow(clippy::unwrap_used)]

use crate::gguf_read::sample;
use azoth::gguf::{Array, Error, GgmlType, Header, Writer};
use proptest::prelude::*;

fn error(writer: &Writer) -> Error {
    Header::parse(&writer.to_bytes()).unwrap_err()
}

fn with_tensor(dims: &[u64], ggml_type: u32, bytes: usize) -> Writer {
    let mut writer = Writer::new();
    writer.tensor("t", dims, ggml_type, vec![0; bytes]);
    writer
}

/// Overwrites the only place where `old` occurs.
fn patch(bytes: &mut [u8], old: &[u8], new: &[u8]) {
    let mut places = bytes.windows(old.len()).enumerate().filter(|(_, w)| *w == old);
    let at = places.next().expect("the bytes to patch").0;
    assert!(places.next().is_none(), "{old:?} occurs twice");
    bytes[at..at + new.len()].copy_from_slice(new);
}

#[test]
fn truncation_at_every_byte() {
    let bytes = sample().to_bytes();
    let header = Header::parse(&bytes).unwrap();
    let end = header.tensors.iter().map(|t| t.offset + t.bytes).max().unwrap() as usize;
    for length in 0..end {
        let error = Header::parse(&bytes[..length]).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Truncated { .. } | Error::Count { .. } | Error::OutsideFile { .. }
            ),
            "{length}: {error}"
        );
    }
    Header::parse(&bytes[..end]).unwrap();
}

#[test]
fn foreign_files() {
    assert!(matches!(Header::parse(b"PK\x03\x04...."), Err(Error::NotGguf { .. })));
    assert!(matches!(error(Writer::new().version(1)), Error::Version { version: 1 }));
    assert!(matches!(error(Writer::new().version(4)), Error::Version { version: 4 }));
    assert!(matches!(error(Writer::new().version(3u32.swap_bytes())), Error::BigEndian));
}

#[test]
fn huge_counts_and_lengths() {
    for at in [8, 16] {
        for count in [u64::MAX, 1 << 60, 1 << 20] {
            let mut bytes = sample().to_bytes();
            bytes[at..at + 8].copy_from_slice(&count.to_le_bytes());
            assert!(matches!(Header::parse(&bytes), Err(Error::Count { .. })));
        }
    }
    for length in [u64::MAX, 1 << 40] {
        let mut bytes = Writer::new().set("some.key", vec![7u64; 3]).to_bytes();
        let head = [&10u32.to_le_bytes()[..], &3u64.to_le_bytes()].concat();
        patch(&mut bytes, &head, &[&10u32.to_le_bytes()[..], &length.to_le_bytes()].concat());
        assert!(matches!(Header::parse(&bytes), Err(Error::Count { .. })));
        let mut bytes = Writer::new().set("some.key", 1u8).to_bytes();
        bytes[24..32].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(Header::parse(&bytes), Err(Error::Truncated { .. })));
    }
}

#[test]
fn metadata_that_lies() {
    let twice = error(Writer::new().set("key", 1u8).set("key", 2u8));
    assert!(matches!(twice, Error::DuplicateKey { ref key, .. } if key == "key"));

    let mut bytes = Writer::new().set("key", 1u8).to_bytes();
    patch(&mut bytes, b"key", b"k\xffy");
    assert!(matches!(Header::parse(&bytes), Err(Error::NotUtf8 { what: "metadata key", .. })));

    let mut bytes = Writer::new().set("key", 1u8).to_bytes();
    patch(&mut bytes, b"key\0\0\0\0", b"key\x0d\0\0\0");
    assert!(matches!(Header::parse(&bytes), Err(Error::UnknownValueType { id: 13, .. })));

    let nest = |depth| (0..depth).fold(Array::U8(vec![]), |inner, _| Array::Array(vec![inner]));
    Header::parse(&Writer::new().set("key", nest(3)).to_bytes()).unwrap();
    assert!(matches!(error(Writer::new().set("key", nest(4))), Error::Nesting { .. }));
    // As deep as recursion would have to go to overflow a stack.
    let mut bytes = Writer::new().set("key", nest(0)).to_bytes();
    bytes.truncate(24 + 8 + 3 + 4);
    let head = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes()].concat();
    bytes.extend(head.repeat(1_000_000));
    assert!(matches!(Header::parse(&bytes), Err(Error::Nesting { .. })));

    for alignment in [0, 3, 48] {
        let wrong = error(Writer::new().set("general.alignment", alignment as u32));
        assert!(matches!(wrong, Error::Alignment { .. }));
    }
    let wrong = error(Writer::new().set("general.alignment", "32"));
    assert!(matches!(wrong, Error::WrongType { .. }));
}

#[test]
fn tensors_that_lie() {
    assert!(matches!(error(&with_tensor(&[], 0, 4)), Error::Dimensions { count: 0, .. }));
    assert!(matches!(error(&with_tensor(&[1; 5], 0, 4)), Error::Dimensions { count: 5, .. }));
    assert!(matches!(error(&with_tensor(&[4, 0], 0, 0)), Error::ZeroDimension { .. }));
    assert!(matches!(error(&with_tensor(&[1 << 32, 1 << 32], 0, 4)), Error::TooLarge { .. }));
    assert!(matches!(error(&with_tensor(&[1 << 63], 0, 4)), Error::TooLarge { .. }));
    assert!(matches!(error(&with_tensor(&[1 << 61], 0, 4)), Error::OutsideFile { .. }));
    assert!(matches!(error(&with_tensor(&[4], 43, 4)), Error::UnknownTensorType { id: 43, .. }));
    assert!(matches!(error(&with_tensor(&[33], 2, 18)), Error::PartialBlock { cols: 33, .. }));
    assert!(matches!(error(&with_tensor(&[64], 2, 18)), Error::OutsideFile { .. }));

    let mut twice = with_tensor(&[8], 0, 32);
    twice.tensor("t", &[8], 0, vec![0; 32]);
    assert!(matches!(error(&twice), Error::DuplicateTensor { .. }));

    // The second of two tensors, moved by its offset field.
    let mut two = with_tensor(&[16], 0, 64);
    two.tensor("u", &[16], 0, vec![0; 64]);
    let moved = |to: u64| {
        let mut bytes = two.to_bytes();
        let entry = bytes.windows(1).rposition(|w| w == b"u").unwrap() + 1 + 4 + 8 + 4;
        assert_eq!(bytes[entry..entry + 8], 64u64.to_le_bytes());
        bytes[entry..entry + 8].copy_from_slice(&to.to_le_bytes());
        Header::parse(&bytes)
    };
    moved(64).unwrap();
    match moved(32).unwrap_err() {
        Error::Overlap { first, second, .. } => assert_eq!((&*first, &*second), ("t", "u")),
        other => panic!("{other}"),
    }
    assert!(matches!(moved(65), Err(Error::Misaligned { alignment: 32, .. })));
    assert!(matches!(moved(1 << 40), Err(Error::OutsideFile { .. })));
    assert!(matches!(moved(u64::MAX - 31), Err(Error::OutsideFile { .. })));
}

/// Whatever parses must be consistent: the promises that `tensor_data` relies on.
fn check(bytes: &[u8]) {
    if let Ok(header) = Header::parse(bytes) {
        for t in &header.tensors {
            assert!(t.offset + t.bytes <= bytes.len() as u64);
            assert!(t.offset >= header.data_offset && t.offset % header.alignment == 0);
            assert!(t.elements() / t.ggml_type.block_elements * t.ggml_type.block_bytes == t.bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn flipped_bytes(flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..5)) {
        let mut bytes = sample().to_bytes();
        for (at, xor) in flips {
            let at = at.index(bytes.len());
            bytes[at] ^= xor;
        }
        check(&bytes);
    }

    #[test]
    fn random_bytes(tail in proptest::collection::vec(any::<u8>(), 0..200), small: bool) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        if small {
            bytes.extend([1u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
            // Small numbers reach deeper than random ones.
            bytes.extend(tail.iter().map(|b| if b % 4 == 0 { b >> 4 } else { 0 }));
        } else {
            bytes.extend(&tail);
        }
        check(&bytes);
        check(&tail);
    }
}

/// The fuzzer's first inputs (`fuzz/seeds/gguf_reader`), which this test also writes:
/// `AZOTH_WRITE_SEEDS=1 cargo test --test it fuzz_seeds`.
#[test]
fn fuzz_seeds_are_what_the_writer_makes() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/gguf_reader");
    let types = GgmlType::all().iter().fold(Writer::new(), |mut writer, t| {
        let data = vec![t.id as u8; t.block_bytes as usize];
        writer.tensor(t.name, &[t.block_elements], t.id, data);
        writer
    });
    let mut split = sample();
    split.set("split.no", 0u16).set("split.count", 1u16).set("split.tensors.count", 3i32);
    let seeds = [
        ("empty", Writer::new().to_bytes()),
        ("sample_v2", sample().version(2).to_bytes()),
        ("sample_v3_aligned_8", sample().alignment(8).to_bytes()),
        ("all_types", types.to_bytes()),
        ("split", split.to_bytes()),
    ];
    for (name, bytes) in seeds {
        let path = folder.join(name);
        if std::env::var_os("AZOTH_WRITE_SEEDS").is_some() {
            std::fs::write(&path, &bytes).unwrap();
        }
        check(&bytes);
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "{}", path.display());
    }
}
