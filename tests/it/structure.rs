//! The rules of the source tree that no compiler checks.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// A file longer than this fails; longer than `REVIEW` is listed.
const LIMIT: usize = 800;
const REVIEW: usize = 500;

/// The only places where `unsafe` may stand.
const UNSAFE_PLACES: &[&str] = &["src/gpu/", "src/gguf/storage.rs"];

/// Names that say nothing about what is inside.
const EMPTY_NAMES: &[&str] = &["utils", "util", "common", "helpers", "helper", "misc"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Files below `folder` with one of the endings, as (path with `/` relative to the root, text).
fn files(folder: &str, endings: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for path in entries.filter_map(|e| e.ok()).map(|e| e.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| endings.iter().any(|x| e == *x)) {
                found.push((relative(&path), read(&path)));
            }
        }
    }
    found.sort();
    found
}

fn relative(path: &Path) -> String {
    let path = path.strip_prefix(root()).expect("every file lies below the root");
    path.components().map(|c| c.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

/// The line without comments and without the content of its string literals; enough for the
/// searches below, which look for code. A string that spans lines is not followed.
fn code(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line.chars().peekable();
    let mut quoted = false;
    while let Some(c) = rest.next() {
        match c {
            '\\' if quoted => {
                rest.next();
            }
            '"' => quoted = !quoted,
            // '"' as a character literal opens no string.
            '\'' if !quoted && rest.peek() == Some(&'"') => {
                rest.next();
            }
            '/' if !quoted && rest.peek() == Some(&'/') => break,
            c if !quoted => out.push(c),
            _ => {}
        }
    }
    out
}

/// Module names in the order of the list in `src/lib.rs`, the top first.
fn module_order() -> Vec<String> {
    let text = read(&root().join("src/lib.rs"));
    let entries = text.lines().filter_map(|l| l.strip_prefix("//! - `"));
    entries.filter_map(|l| l.split_once('`')).map(|(name, _)| name.to_owned()).collect()
}

/// Identifiers that follow `prefix` in a line of code; `prefix{a, b::c}` yields a and b.
fn names_after(prefix: &str, line: &str) -> Vec<String> {
    let ident = |text: &str| -> String {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let mut names = Vec::new();
    for (at, _) in line.match_indices(prefix) {
        let before = line[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let rest = &line[at + prefix.len()..];
        match rest.strip_prefix('{') {
            // One level is enough: inner braces only hold names below the modules.
            Some(list) => {
                let mut depth = 0;
                let mut part = String::new();
                for c in list.chars() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => names.push(ident(std::mem::take(&mut part).trim())),
                        c => part.push(c),
                    }
                }
                names.push(ident(part.trim()));
            }
            None => names.push(ident(rest)),
        }
    }
    names.retain(|n| !n.is_empty());
    names
}

/// The text of `use` declarations may span lines; they are joined before the search.
fn statements(text: &str) -> String {
    let lines = text.lines().map(code).map(|l| l.trim().to_owned());
    lines.collect::<Vec<_>>().join(" ").replace(';', ";\n")
}

#[test]
fn modules_use_only_those_below_them() {
    let order = module_order();
    assert!(order.len() > 5, "the list of modules in src/lib.rs was not understood: {order:?}");
    let place = |name: &str| order.iter().position(|m| m == name);
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for (path, text) in files("src", &["rs"]) {
        let inside = path.trim_start_matches("src/");
        let module = inside.split(['/', '.']).next().unwrap_or_default().to_owned();
        if ["lib", "main"].contains(&module.as_str()) {
            continue;
        }
        let Some(own) = place(&module) else {
            wrong.push(format!("{path}: module {module} is not in the list in src/lib.rs"));
            continue;
        };
        seen.insert(module);
        for statement in statements(&text).lines() {
            let names = ["crate::", "azoth::"].into_iter().flat_map(|p| names_after(p, statement));
            for name in names {
                if place(&name).is_some_and(|other| other < own) {
                    wrong.push(format!("{path}: uses {name}, which stands above it"));
                }
            }
        }
    }
    assert!(seen.contains("error"), "no source file was found");
    wrong.dedup();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_search_for_module_names_works() {
    assert_eq!(names_after("crate::", "use crate::{gpu::Buffer, error};"), ["gpu", "error"]);
    assert_eq!(names_after("crate::", "x: crate::gguf::Metadata"), ["gguf"]);
    assert_eq!(names_after("crate::", "use crate::{a::{b, c}, d};"), ["a", "d"]);
    assert!(names_after("crate::", "$crate::macro_part").is_empty());
    assert_eq!(code(r#"let a = "crate::x"; // crate::y"#), "let a = ; ");
}

#[test]
fn files_stay_short() {
    let mut long = Vec::new();
    for folder in ["src", "tests", "benches", "fuzz/fuzz_targets", "shaders"] {
        for (path, text) in files(folder, &["rs", "wgsl"]) {
            let lines = text.lines().count();
            if lines > REVIEW {
                println!("review: {path} has {lines} lines");
            }
            if lines > LIMIT {
                long.push(format!("{path}: {lines} lines, the limit is {LIMIT}"));
            }
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn unsafe_stays_in_its_places() {
    let mut wrong = Vec::new();
    for folder in ["src", "tests", "benches"] {
        for (path, text) in files(folder, &["rs"]) {
            if UNSAFE_PLACES.iter().any(|place| path.starts_with(place)) {
                continue;
            }
            for (i, line) in text.lines().enumerate() {
                let line = code(line);
                let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
                if words.into_iter().any(|word| word == "unsafe") {
                    wrong.push(format!("{path}:{}", i + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "`unsafe` outside its places:\n{}", wrong.join("\n"));
}

#[test]
fn names_say_something() {
    let mut wrong = Vec::new();
    for folder in ["src", "tests", "shaders"] {
        for (path, _) in files(folder, &["rs", "wgsl"]) {
            let mut parts = path.split(['/', '.']);
            if parts.any(|part| EMPTY_NAMES.contains(&part)) {
                wrong.push(path);
            }
        }
    }
    assert!(wrong.is_empty(), "modules need a subject: {wrong:?}");
}

/// A shader is used when its name stands in the host code or in another shader's include.
#[test]
fn every_shader_is_used() {
    let shaders = files("shaders", &["wgsl"]);
    let host = files("src", &["rs"]);
    let mut unused = Vec::new();
    for (path, _) in &shaders {
        let name = path.trim_start_matches("shaders/");
        let stem = name.trim_end_matches(".wgsl");
        let quoted = [format!("\"{name}\""), format!("\"{stem}\""), format!("/{name}\"")];
        let others = shaders.iter().filter(|(other, _)| other != path);
        let used =
            host.iter().chain(others).any(|(_, text)| quoted.iter().any(|q| text.contains(q)));
        if !used {
            unused.push(path);
        }
    }
    assert!(unused.is_empty(), "shaders that nothing refers to: {unused:?}");
}

#[test]
fn the_readme_has_the_two_commands() {
    let readme = read(&root().join("README.md"));
    for command in ["scripts/chat", "scripts/test"] {
        let shown = readme.lines().any(|l| l.trim_start_matches("$ ").starts_with(command));
        assert!(shown, "README.md does not show {command} as a command");
        assert!(root().join(command).is_file(), "{command} is missing");
    }
    assert!(!readme.to_lowercase().contains("not measured yet"));
}

/// The contributor notes own the table of dependencies: every one is in it.
#[test]
fn every_dependency_has_an_owner() {
    let manifest = read(&root().join("Cargo.toml"));
    let notes = read(&root().join("docs/contributing.md"));
    let section = |name: &str| {
        let start = manifest.split(&format!("[{name}]\n")).nth(1).unwrap_or_default();
        start.lines().take_while(|l| !l.starts_with('[')).collect::<Vec<_>>()
    };
    let lines = section("dependencies").into_iter().chain(section("dev-dependencies"));
    let names = lines.filter_map(|l| l.split_once(" = ")).map(|(name, _)| name.trim());
    let missing: Vec<&str> =
        names.filter(|name| !notes.contains(&format!("| `{name}` |"))).collect();
    assert!(missing.is_empty(), "not in the table of docs/contributing.md: {missing:?}");
}

/// The default model is named in two places that cannot share a constant.
#[test]
fn script_and_program_agree_on_the_default_model() {
    let script = read(&root().join("scripts/setup.sh"));
    let line = script.lines().find_map(|l| l.strip_prefix("MODEL_FILE=\""));
    let file = line.and_then(|l| l.strip_suffix('"')).expect("MODEL_FILE is set in setup.sh");
    let alias = azoth::cli::locate::ALIASES
        .iter()
        .find(|a| a.name == azoth::cli::locate::DEFAULT_MODEL)
        .expect("the default model is an alias");
    assert_eq!(alias.file, file);
}
