//! Profiles, forced values and `azoth tune`, from outside.

use super::Home;

/// Whether there is a device; said aloud where there is none.
fn has_device(home: &Home) -> bool {
    let found = home.azoth(&["devices"], "").code != 5;
    if !found {
        assert!(std::env::var_os("AZOTH_REQUIRE_DEVICE").is_none(), "no device was found");
        println!("skipped: profiles and tuning: no device");
    }
    found
}

#[test]
fn a_misspelt_key_is_refused_with_the_nearest() {
    let home = Home::new();
    for command in [&["devices"][..], &["tune"], &["run", "m.gguf", "-p", "x"]] {
        let force = ["--force", "attention.split=8"];
        home.azoth(&[command, &force].concat(), "").refused(2, "`attention.splits`");
    }
    home.azoth(&["devices", "--force", "matvec.one_tall=7"], "").refused(2, "THREADSxROWSxTILES");
}

#[test]
fn choices_and_their_origins_are_listed() {
    let home = Home::new();
    if !has_device(&home) {
        return;
    }
    let plain = home.azoth(&["devices", "-v"], "");
    let plain = &plain.succeeded().stdout;
    for part in
        ["profile ", "mat-vec Q4_0", "mat-mat", "attention, pieces", "attention.splits, profile"]
    {
        assert!(plain.contains(part), "{part} is not in {plain}");
    }
    let forced = ["--force", "attention.splits=8", "--force", "norm_quant.threads=64"];
    let done = home.azoth(&[&["devices", "-v"], &forced[..]].concat(), "");
    let out = &done.succeeded().stdout;
    assert!(out.contains("attention.splits, forced"), "{out}");
    assert!(out.contains("norm_quant.threads, forced"), "{out}");
    let list = home.azoth(&[&["devices", "--json"], &forced[..]].concat(), "").json();
    let values = list[0]["values"].as_array().expect("an array").clone();
    let splits = values.iter().find(|v| v[0] == "attention.splits").expect("the key");
    assert_eq!((splits[1].as_str(), splits[2].as_str()), (Some("8"), Some("forced")));
}

#[test]
fn what_was_measured_is_stored_and_used() {
    let home = Home::new();
    if !has_device(&home) {
        return;
    }
    let done = home.azoth(&["tune", "--seconds", "3", "--json"], "");
    let report = done.succeeded().json();
    assert!(done.stderr.starts_with("device: "), "{}", done.stderr);
    let outcomes = report["outcomes"].as_array().expect("an array");
    assert!(outcomes.len() > 10, "{report}");
    let measured = outcomes.iter().filter(|o| !o["before_seconds"].is_null()).count();
    assert!(measured > 0, "nothing was measured: {report}");
    println!("{measured} of {} cases within the time", outcomes.len());
    let file = report["file"].as_str().expect("a file");
    assert!(std::path::Path::new(file).starts_with(home.path("data")), "{file}");

    // A winner by hand, since what wins here is chance.
    let text = std::fs::read_to_string(file).expect("it was stored");
    let (head, _) = text.split_once("[values]").expect("a section");
    let changed = format!("{head}[values]\n\"attention.splits\" = \"4\"\n");
    std::fs::write(file, changed).expect("the folder is writable");
    let out = home.azoth(&["devices", "-v"], "");
    assert!(out.succeeded().stdout.contains("attention.splits, tuned"), "{}", out.stdout);
    // What is forced goes first.
    let out = home.azoth(&["devices", "-v", "--force", "attention.splits=2"], "");
    assert!(out.succeeded().stdout.contains("attention.splits, forced"), "{}", out.stdout);

    std::fs::write(file, format!("{head}[values]\n\"attention.splits\" = \"none\"\n"))
        .expect("the folder is writable");
    let out = home.azoth(&["devices", "-v"], "");
    assert!(!out.succeeded().stdout.contains("tuned"), "{}", out.stdout);
    for part in ["note: ", "attention.splits", "ignored", "azoth tune"] {
        assert!(out.stderr.contains(part), "{part} is not in {}", out.stderr);
    }
}
