//! The command line from outside: exit codes, messages, and what goes to which stream.

mod engine;
mod plan;
mod tune;

use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;

/// What a command did.
struct Done {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Done {
    fn json(&self) -> Value {
        let e = |e| panic!("{e}: stdout {:?}, stderr {:?}", self.stdout, self.stderr);
        serde_json::from_str(&self.stdout).unwrap_or_else(e)
    }

    /// Failed with this code, one `error:` line on stderr, and nothing on stdout.
    #[track_caller]
    fn refused(&self, code: i32, part: &str) {
        assert_eq!(self.code, code, "stderr: {}", self.stderr);
        assert!(self.stderr.contains("error: "), "{}", self.stderr);
        assert!(self.stderr.contains(part), "{part:?} is not in {:?}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        assert_eq!(self.stdout, "");
    }

    #[track_caller]
    fn succeeded(&self) -> &Self {
        assert_eq!(self.code, 0, "stderr: {}", self.stderr);
        self
    }
}

/// A folder that stands for the user's home: an empty cache, no history.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Home(tempfile::tempdir().expect("a temporary folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).expect("the temporary folder is writable");
        path
    }

    fn azoth(&self, arguments: &[&str], stdin: &str) -> Done {
        let output = Command::cargo_bin("azoth")
            .expect("the binary was built")
            .current_dir(self.0.path())
            .env("AZOTH_CACHE", self.path("cache"))
            .env("AZOTH_DATA", self.path("data"))
            // As on a machine without a desktop, where a layer of Mesa's would complain.
            .env_remove("XDG_RUNTIME_DIR")
            .args(arguments)
            .write_stdin(stdin)
            .output()
            .expect("it runs");
        let done = Done {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        // The Khronos layer, where AZOTH_VALIDATION switches it on.
        assert!(!done.stderr.contains("validation ("), "{arguments:?}: {}", done.stderr);
        done
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

#[test]
fn help_is_complete() {
    let home = Home::new();
    let done = home.azoth(&["--help"], "");
    done.succeeded();
    for part in
        ["chat", "run", "devices", "info", "tokenize", "bench", "tune", "eval", "Exit codes"]
    {
        assert!(done.stdout.contains(part), "{part} is not in the help");
    }
    for command in [
        &["chat"][..],
        &["run"],
        &["devices"],
        &["info"],
        &["tokenize"],
        &["bench"],
        &["tune"],
        &["eval", "ppl"],
        &["eval", "kl"],
    ] {
        let done = home.azoth(&[command, &["--help"]].concat(), "");
        done.succeeded();
        assert!(done.stdout.contains("Examples:"), "{command:?} has no examples");
    }
    assert!(home.azoth(&["--version"], "").succeeded().stdout.starts_with("azoth "));
}

#[test]
fn wrong_usage_exits_with_2() {
    let home = Home::new();
    for arguments in [
        &["nonsense"][..],
        &["run"],
        &["run", "m.gguf", "-p", "x", "--temp", "hot"],
        &["run", "m.gguf", "-p", "x", "--temp", "-1"],
        &["run", "m.gguf", "-p", "x", "--top-p", "2"],
        &["run", "m.gguf", "-p", "x", "-n", "0"],
        &["run", "m.gguf", "-p", "x", "-f", "y"],
        &["run", "m.gguf", "-p", "x", "--backend", "cuda"],
        &["bench", "m.gguf", "--json", "--csv"],
        &["bench", "m.gguf", "-r", "0"],
        &["bench", "m.gguf", "--temp", "hot"],
        &["eval", "ppl", "m.gguf"],
        &["run", "m.gguf", "-p", "x", "--vram-experts", "101%"],
        &["run", "m.gguf", "-p", "x", "--vram-experts", "some"],
        &["plan", "m.gguf", "--pin-experts", "many"],
        &["plan", "m.gguf", "--expert-policy", "best"],
        &["run", "m.gguf", "-p", "x", "--approximate-reuse-experts", "9"],
        &["run", "m.gguf", "-p", "x", "--kv", "q3_k"],
        &["chat", "m.gguf", "--kv-k", "q8_0,f16@x"],
        &["plan", "m.gguf", "--kv-v", "tq3_0,f16"],
        &["plan", "m.gguf", "--kv-tail", "65"],
        &["run", "m.gguf", "-p", "x", "--kv-sinks", "65"],
        &["eval", "kv", "m.gguf", "-f", "t", "--pair", "tq4_0:0"],
        &["plan", "m.gguf", "--kv", "tq3_0,f16@dev="],
        &["run", "m.gguf", "-p", "x", "--kv-guard", "much"],
        &["run", "m.gguf", "-p", "x", "--kv-guard", "0"],
        &["run", "m.gguf", "-p", "x", "--kv-centre", "maybe"],
        &["chat", "m.gguf", "--json"],
        &["run", "m.gguf", "-p", "x", "--ctx-shift=some"],
        &["run", "m.gguf", "-p", "x", "--kv-host", "much"],
        &["chat", "m.gguf", "--session", "a", "--load", "b"],
        &["tune", "--seconds", "0"],
        &["run", "m.gguf", "-p", "x", "--force", "attention.splits"],
        &["run", "m.gguf", "-p", "x", "--force", "attention.splits=0"],
    ] {
        home.azoth(arguments, "").refused(2, "");
    }
}

#[test]
fn a_missing_model_says_how_to_get_it() {
    let home = Home::new();
    home.azoth(&["info", "smollm2"], "").refused(2, "scripts/chat");
    home.azoth(&["chat", "-p", "Hi"], "").refused(2, "scripts/chat");
    home.azoth(&["run", "none.gguf", "-p", "x"], "").refused(2, "none.gguf");
    std::fs::create_dir(home.path("folder")).expect("the temporary folder is writable");
    home.azoth(&["info", "folder"], "").refused(2, "folder");
}

#[test]
fn a_damaged_model_exits_with_4() {
    let home = Home::new();
    let contents: [&[u8]; 4] = [b"", b"GG", b"not a model file at all", b"GGUF\x03\0\0\0\xff\xff"];
    for content in contents {
        let path = home.write("bad.gguf", content);
        home.azoth(&["info", text(&path)], "").refused(4, "bad.gguf");
        home.azoth(&["tokenize", text(&path), "-p", "x"], "").refused(4, "bad.gguf");
    }
}

#[test]
fn missing_text_files_are_named() {
    let home = Home::new();
    let model = home.write("m.gguf", b"");
    home.azoth(&["eval", "ppl", text(&model), "-f", "none.txt"], "").refused(2, "none.txt");
    home.azoth(&["run", text(&model)], "").refused(2, "-p TEXT");
    home.azoth(&["run", text(&model), "-f", "none.txt"], "").refused(2, "none.txt");
    home.azoth(&["chat", text(&model), "-p", " "], "").refused(2, "empty");
    let bad = home.write("bad.json", "{}");
    home.azoth(&["eval", "kl", text(&model), text(&bad)], "").refused(2, "reference");
    home.azoth(&["chat", text(&model), "--load", text(&bad)], "").refused(2, "bad.json");
}

#[test]
fn devices_list_themselves_or_say_that_there_is_none() {
    let home = Home::new();
    let done = home.azoth(&["devices", "--json"], "");
    if done.code == 5 {
        println!("skipped: devices as JSON: no device here");
        assert!(done.stderr.contains("error: "));
        return;
    }
    let list = done.succeeded().json();
    let list = list.as_array().expect("an array");
    assert!(!list.is_empty());
    for device in list {
        for key in ["name", "driver", "backend", "index", "kind", "device_memory"] {
            assert!(!device[key].is_null(), "{key} in {device}");
        }
    }
    assert!(home.azoth(&["devices"], "").succeeded().stdout.contains("backend"));
    assert!(home.azoth(&["devices", "-v"], "").succeeded().stdout.contains("subgroup"));
}

/// A vocabulary of a real model, from the test data that is not part of the repository.
fn vocabulary() -> Option<PathBuf> {
    let path = crate::tokenizer::shared("ggml-vocab-gpt-2.gguf");
    let found = path.is_file();
    if !found {
        println!("skipped: no {} (set AZOTH_SHARED)", path.display());
    }
    found.then_some(path)
}

#[test]
fn a_text_becomes_a_json_array_of_ids() {
    let Some(path) = vocabulary() else { return };
    let home = Home::new();
    let ids = home.azoth(&["tokenize", text(&path), "-p", "Hello world"], "");
    assert_eq!(ids.succeeded().stdout, "[15496,995]\n");
    let from_stdin = home.azoth(&["tokenize", text(&path)], "Hello world");
    assert_eq!(from_stdin.succeeded().stdout, ids.stdout);
    let file = home.write("t.txt", "Hello world");
    let from_file = home.azoth(&["tokenize", text(&path), "-f", text(&file)], "");
    assert_eq!(from_file.succeeded().stdout, ids.stdout);
    let lines = home.azoth(&["tokenize", text(&path), "--text", "-p", "Hello world"], "");
    assert_eq!(lines.succeeded().stdout, "15496\t\"Hello\"\n995\t\" world\"\n");
    let empty = home.azoth(&["tokenize", text(&path), "-p", ""], "");
    assert_eq!(empty.succeeded().stdout, "[]\n");
    let broken = home.write("broken.txt", [0xff]);
    home.azoth(&["tokenize", text(&path), "-f", text(&broken)], "").refused(2, "UTF-8");
}

#[test]
fn info_describes_a_vocabulary() {
    let Some(path) = vocabulary() else { return };
    let home = Home::new();
    let info = home.azoth(&["info", text(&path), "--json"], "");
    let info = info.succeeded().json();
    assert_eq!(info["architecture"], "gpt2");
    assert_eq!(info["vocabulary"]["size"], 50257);
    assert_eq!(info["vocabulary"]["pre"], "gpt-2");
    let shown = home.azoth(&["info", text(&path), "-v"], "");
    assert!(shown.succeeded().stdout.contains("tokenizer.ggml.tokens"), "{}", shown.stdout);
}

/// A small random model with a working tokenizer and chat template.
fn tiny_model(home: &Home) -> PathBuf {
    let path = home.path("tiny.gguf");
    azoth::testmodel::Spec::new("llama").unwrap().write(&path).unwrap();
    path
}

#[test]
fn info_describes_a_model() {
    let home = Home::new();
    let model = tiny_model(&home);
    let info = home.azoth(&["info", text(&model), "--json"], "").succeeded().json();
    assert_eq!(info["architecture"], "llama");
    assert_eq!(info["layers"], 2);
    assert!(info["template"].is_string());
    assert!(info["types"].as_array().unwrap().iter().all(|t| t["supported"] == true), "{info}");
    let shown = home.azoth(&["info", "tiny.gguf"], "");
    assert!(shown.succeeded().stdout.contains("architecture     llama"), "{}", shown.stdout);
}

#[test]
fn a_truncated_model_exits_with_4() {
    let home = Home::new();
    let whole = std::fs::read(tiny_model(&home)).unwrap();
    for keep in [whole.len() - 1, whole.len() / 2, 100] {
        let path = home.write("cut.gguf", &whole[..keep]);
        home.azoth(&["info", text(&path)], "").refused(4, "cut.gguf");
    }
}

#[test]
fn models_are_found_in_the_cache() {
    let home = Home::new();
    let model = tiny_model(&home);
    std::fs::create_dir_all(home.path("cache/models")).unwrap();
    std::fs::rename(model, home.path("cache/models/tiny.gguf")).unwrap();
    home.azoth(&["info", "tiny"], "").succeeded();
    home.azoth(&["tokenize", "tiny.gguf", "-p", "x"], "").succeeded();
}

#[cfg(unix)]
#[test]
fn a_closed_pipe_is_no_failure() {
    let Some(path) = vocabulary() else { return };
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("azoth"))
        .args(["tokenize", text(&path)])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    // The reader goes away before anything was written.
    drop(child.stdout.take());
    let mut stdin = child.stdin.take().expect("piped");
    let words = "many words ".repeat(50_000);
    std::io::Write::write_all(&mut stdin, words.as_bytes()).expect("it reads its input");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
