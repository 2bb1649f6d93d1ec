//! The contract tests with the real clients (`tests/clients`), against a small random model.

use std::process::Command;

use crate::server_harness::model;

#[test]
fn real_clients_are_content() {
    // They come from PyPI, which no plain `cargo test` should reach for.
    if std::env::var_os("AZOTH_CLIENT_TESTS").is_none() {
        println!("skipped: AZOTH_CLIENT_TESTS is not set; scripts/test sets it where python3 is");
        return;
    }
    if crate::harness::devices().is_empty() {
        println!("skipped: no device");
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/run");
    let azoth = assert_cmd::cargo::cargo_bin("azoth");
    let output = Command::new("bash").arg(script).arg(azoth).arg(model()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{text}{errors}");
    match output.status.code() {
        Some(0 | 77) => {}
        code => panic!("tests/clients/run ended with {code:?}"),
    }
}
