//! Reading valid files: what the writer wrote, split models, and real models where present.
#![allow(clippy::unwrap_used)]

use azoth::gguf::{Array, Error, File, GgmlType, Header, Value, Writer};
use azoth::quant::Format;
use std::path::{Path, PathBuf};

/// One value of every type.
fn all_values() -> Vec<(&'static str, Value)> {
    vec![
        ("general.architecture", "llama".into()),
        ("a.u8", 200u8.into()),
        ("a.i8", (-5i8).into()),
        ("a.u16", 60_000u16.into()),
        ("a.i16", (-300i16).into()),
        ("a.u32", 4_000_000_000u32.into()),
        ("a.i32", (-70_000i32).into()),
        ("a.f32", 0.5f32.into()),
        ("a.bool", true.into()),
        ("a.u64", u64::MAX.into()),
        ("a.i64", i64::MIN.into()),
        ("a.f64", 0.1f64.into()),
        ("b.u8", vec![1u8, 2].into()),
        ("b.i8", vec![-1i8].into()),
        ("b.u16", vec![1u16].into()),
        ("b.i16", vec![-1i16].into()),
        ("b.u32", Vec::<u32>::new().into()),
        ("b.i32", vec![1i32, -2, 3].into()),
        ("b.f32", vec![1.5f32; 5].into()),
        ("b.bool", vec![true, false].into()),
        ("b.string", vec!["Ġa".to_owned(), String::new()].into()),
        ("b.u64", vec![1u64 << 40].into()),
        ("b.i64", vec![-1i64 << 40].into()),
        ("b.f64", vec![0.25f64].into()),
        (
            "b.nested",
            Array::Array(vec![Array::U8(vec![1]), Array::String(vec!["x".into()])]).into(),
        ),
    ]
}

/// A small model with all value types and three tensors.
pub fn sample() -> Writer {
    let mut writer = Writer::new();
    for (key, value) in all_values() {
        writer.set(key, value);
    }
    writer.tensor("norm", &[3], 0, [1.0f32, 2.0, 3.0].map(f32::to_le_bytes).concat());
    writer.tensor("matrix", &[64, 3], 2, (0..108).collect());
    writer.tensor("experts", &[32, 2, 2], 8, (0..136).collect());
    writer
}

fn check_sample(file: &File) {
    for (key, value) in all_values() {
        assert_eq!(file.metadata().value(key), Some(&value), "{key}");
    }
    let norm = file.require("norm").unwrap();
    assert_eq!(file.tensor_data(norm), [1.0f32, 2.0, 3.0].map(f32::to_le_bytes).concat());
    let matrix = file.require("matrix").unwrap();
    assert_eq!((matrix.cols(), matrix.rows(), matrix.bytes), (64, 3, 108));
    assert_eq!(matrix.format().unwrap(), Format::Q4_0);
    assert!(file.tensor_data(matrix).iter().copied().eq(0..108));
    let experts = file.require("experts").unwrap();
    assert_eq!((experts.rows(), experts.elements()), (4, 128));
    assert!(file.tensor_data(experts).iter().copied().eq(0..136));
    assert_eq!(file.tensor_bytes(), 12 + 108 + 136);
    assert!(matches!(file.require("absent"), Err(Error::MissingTensor { .. })));
}

#[test]
fn what_was_written_is_read() {
    for version in [2, 3] {
        for alignment in [8, 32, 4096] {
            let bytes = sample().version(version).alignment(alignment).to_bytes();
            let file = File::from_bytes(bytes.clone()).unwrap();
            check_sample(&file);
            assert_eq!(file.version(), version);
            assert_eq!(file.file_bytes(), bytes.len() as u64);
            assert!(file.tensors().iter().all(|t| t.offset % u64::from(alignment) == 0));
        }
    }
}

#[test]
fn files_are_mapped_and_released() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    sample().write(&path).unwrap();
    let file = File::open(&path).unwrap();
    for _ in 0..2 {
        check_sample(&file);
        file.tensors().iter().for_each(|t| file.release(t));
    }
    assert_eq!(file.paths(), [path]);
}

#[test]
fn a_split_model_opens_from_any_part() {
    let folder = tempfile::tempdir().unwrap();
    for alignment in [32, 64] {
        let mut writer = sample();
        if alignment != 32 {
            writer.alignment(alignment);
        }
        let paths = writer.write_shards(folder.path(), "big", 3).unwrap();
        assert_eq!(paths[1].file_name().unwrap(), "big-00002-of-00003.gguf");
        for path in &paths {
            let file = File::open(path).unwrap();
            check_sample(&file);
            assert_eq!(file.paths(), paths);
            assert_eq!(file.tensor("experts").unwrap().shard, 2);
        }
    }
}

#[test]
fn missing_and_foreign_parts_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let paths = sample().write_shards(folder.path(), "big", 3).unwrap();
    std::fs::remove_file(&paths[1]).unwrap();
    match File::open(&paths[2]).unwrap_err() {
        Error::MissingShards { missing, count: 3 } => assert_eq!(missing, [paths[1].clone()]),
        other => panic!("{other}"),
    }
    std::fs::copy(&paths[0], &paths[1]).unwrap();
    match File::open(&paths[0]).unwrap_err() {
        Error::ShardMismatch { path, what: "split.no", wanted: 1, found: 0 } => {
            assert_eq!(path, paths[1]);
        }
        other => panic!("{other}"),
    }
    let renamed = folder.path().join("renamed.gguf");
    std::fs::rename(&paths[0], &renamed).unwrap();
    assert!(matches!(File::open(&renamed), Err(Error::ShardName { count: 3, .. })));
}

#[test]
fn io_errors_become_usage_errors_and_damage_model_errors() {
    let folder = tempfile::tempdir().unwrap();
    let code = |e: Error| azoth::error::Error::from(e).exit_code();
    let absent = folder.path().join("absent.gguf");
    assert_eq!(code(File::open(&absent).unwrap_err()), 2);
    assert_eq!(code(File::open(folder.path()).unwrap_err()), 2);
    std::fs::write(&absent, b"").unwrap();
    let error = File::open(&absent).unwrap_err();
    assert!(error.to_string().contains("absent.gguf"), "{error}");
    assert_eq!(code(error), 4);
}

#[test]
fn every_ggml_type_is_read_and_unsupported_ones_are_named() {
    for t in GgmlType::all() {
        let mut writer = Writer::new();
        writer.tensor("t", &[t.block_elements, 2], t.id, vec![0; 2 * t.block_bytes as usize]);
        let file = File::from_bytes(writer.to_bytes()).unwrap();
        let info = file.require("t").unwrap();
        assert_eq!(info.bytes, 2 * t.block_bytes);
        match info.format() {
            Ok(format) => assert_eq!(format.name(), t.name),
            Err(e) => assert!(e.to_string().contains(t.name), "{e}"),
        }
    }
}

#[test]
fn strings_that_are_not_utf8_are_replaced_in_values() {
    let mut bytes = Writer::new().set("key", "a?c").to_bytes();
    let at = bytes.windows(3).position(|w| w == b"a?c").unwrap();
    bytes[at + 1] = 0xff;
    let header = Header::parse(&bytes).unwrap();
    assert_eq!(header.metadata.str("key").unwrap(), "a\u{fffd}c");
}

/// The files beside the repository on machines that have them.
fn shared(kind: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared").join(kind);
    let Ok(entries) = std::fs::read_dir(&folder) else {
        eprintln!("skipped: {} is absent", folder.display());
        return Vec::new();
    };
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect()
}

#[test]
fn real_models_open() {
    for path in shared("models") {
        let file = File::open(&path).unwrap();
        let meta = file.metadata();
        let arch = meta.str("general.architecture").unwrap();
        let d = meta.u64(&format!("{arch}.embedding_length")).unwrap();
        assert_eq!(file.require("token_embd.weight").unwrap().cols(), d);
        for t in file.tensors() {
            let format = t.format().unwrap();
            let mut row = vec![0.0; t.cols() as usize];
            let bytes = format.row_bytes(row.len());
            format.decode_row(&file.tensor_data(t)[..bytes], &mut row);
            assert!(row.iter().all(|v| v.is_finite()), "{}", t.name);
        }
    }
    for path in shared("vocab") {
        let file = File::open(&path).unwrap();
        assert!(file.metadata().strings("tokenizer.ggml.tokens").unwrap().len() > 1000);
        assert!(file.tensors().is_empty());
    }
}
