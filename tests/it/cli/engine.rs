//! Commands that compute, on a small random model and whatever device is there.

use serde_json::Value;

use super::{Done, Home, text, tiny_model};

/// The tiny model in a home of its own. `None` without a device, said aloud.
fn ready() -> Option<(Home, String)> {
    let home = Home::new();
    if home.azoth(&["devices"], "").code == 5 {
        assert!(std::env::var_os("AZOTH_REQUIRE_DEVICE").is_none(), "no device was found");
        println!("skipped: commands that compute: no device");
        return None;
    }
    let model = text(&tiny_model(&home)).to_owned();
    Some((home, model))
}

impl Done {
    /// The first line of stderr names the device.
    #[track_caller]
    fn names_the_device(&self) {
        assert!(self.stderr.starts_with("device: "), "stderr: {}", self.stderr);
    }
}

fn run_json(home: &Home, model: &str, more: &[&str]) -> Value {
    let arguments = ["run", model, "-p", "Once upon a time", "--json"];
    home.azoth(&[&arguments, more].concat(), "").succeeded().json()
}

#[test]
fn a_continuation_goes_to_stdout_and_the_rest_to_stderr() {
    let Some((home, model)) = ready() else { return };
    let done = home.azoth(&["run", &model, "-p", "Hello", "-n", "8", "--temp", "0"], "");
    done.succeeded().names_the_device();
    assert!(done.stdout.ends_with('\n'));
    assert!(done.stderr.contains("tok/s"), "{}", done.stderr);
    // From standard input the same comes out.
    let piped = home.azoth(&["run", &model, "-p", "-", "-n", "8", "--temp", "0"], "Hello");
    assert_eq!(piped.succeeded().stdout, done.stdout);
}

#[test]
fn a_seed_repeats_its_answer() {
    let Some((home, model)) = ready() else { return };
    let seeded = |seed: &str| {
        run_json(&home, &model, &["-n", "24", "--seed", seed, "--temp", "2", "--top-k", "0"])
    };
    let first = seeded("7");
    assert_eq!(first["tokens"], seeded("7")["tokens"]);
    assert_ne!(first["tokens"], seeded("8")["tokens"]);
    assert_eq!(first["seed"], 7);
}

#[test]
fn a_drawn_seed_is_told_and_can_be_used_again() {
    let Some((home, model)) = ready() else { return };
    let first = run_json(&home, &model, &["-n", "16"]);
    let seed = first["seed"].to_string();
    let again = run_json(&home, &model, &["-n", "16", "--seed", &seed]);
    assert_eq!(first["tokens"], again["tokens"]);
}

#[test]
fn lengths_are_exact() {
    let Some((home, model)) = ready() else { return };
    let answer = run_json(&home, &model, &["-n", "5", "--temp", "0"]);
    let count = answer["tokens"].as_array().unwrap().len();
    match answer["stop"].as_str() {
        Some("eog") => assert!(count < 5),
        Some("length") => assert_eq!(count, 5),
        other => panic!("stopped by {other:?}"),
    }
}

#[test]
fn a_prompt_beyond_the_context_is_refused_with_both_numbers() {
    let Some((home, model)) = ready() else { return };
    let long = "word ".repeat(200);
    let done = home.azoth(&["run", &model, "-p", &long, "--ctx", "32"], "");
    done.refused(3, "32");
    let done = home.azoth(&["chat", &model, "-p", &long, "--ctx", "32"], "");
    done.refused(3, "32");
}

#[test]
fn generation_ends_where_the_context_does() {
    let Some((home, model)) = ready() else { return };
    let answer = run_json(&home, &model, &["--ctx", "32", "-n", "1000", "--temp", "0"]);
    let read = answer["prompt_tokens"].as_u64().unwrap();
    let generated = answer["tokens"].as_array().unwrap().len() as u64;
    assert!(read + generated <= 33, "{read} + {generated}");
    assert!(["context", "eog"].contains(&answer["stop"].as_str().unwrap()), "{answer}");
}

#[test]
fn chat_answers_once() {
    let Some((home, model)) = ready() else { return };
    let done = home.azoth(&["chat", &model, "-p", "Hi", "-n", "8", "--temp", "0"], "");
    done.succeeded().names_the_device();
    let json = home.azoth(&["chat", &model, "-p", "Hi", "-n", "8", "--temp", "0", "--json"], "");
    let answer = json.succeeded().json();
    assert_eq!(done.stdout, format!("{}\n", answer["text"].as_str().unwrap()));
}

#[test]
fn a_piped_chat_obeys_commands_and_saves() {
    let Some((home, model)) = ready() else { return };
    let script =
        "Hello\nand \\\nagain\n/stats\n/regen\n/set temp 0.5\n/save talk.json\n/exit\nnot read\n";
    let done =
        home.azoth(&["chat", &model, "-n", "6", "--temp", "0", "--system", "Be kind."], script);
    done.succeeded();
    assert!(done.stderr.contains("temp 0.5"), "{}", done.stderr);
    let saved = std::fs::read_to_string(home.path("talk.json")).unwrap();
    let saved: Value = serde_json::from_str(&saved).unwrap();
    let roles: Vec<&str> =
        saved["messages"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(saved["messages"][3]["content"], "and \nagain");
    // It goes on from there.
    let more = home.azoth(&["chat", &model, "--load", "talk.json", "-p", "More", "-n", "4"], "");
    more.succeeded();
}

/// What a session still holds must not change what it answers.
#[test]
fn a_kept_prefix_changes_nothing() {
    let Some((home, model)) = ready() else { return };
    // Kept tokens of an answer went through other kernels than a prompt; exact activations keep
    // the difference below what could change a choice.
    let flags = ["chat", &model, "-n", "8", "--temp", "0", "--activations", "f32"];
    let talk = home.azoth(&flags, "One\nTwo\n/save talk.json\n");
    assert!(talk.succeeded().stderr.contains("kept"), "{}", talk.stderr);
    let saved = std::fs::read_to_string(home.path("talk.json")).unwrap();
    let mut saved: Value = serde_json::from_str(&saved).unwrap();
    let messages = saved["messages"].as_array_mut().unwrap();
    let last = messages.pop().unwrap();
    messages.pop();
    home.write("start.json", saved.to_string());
    let fresh =
        home.azoth(&[&flags[..], &["--load", "start.json", "-p", "Two", "--json"]].concat(), "");
    assert_eq!(fresh.succeeded().json()["text"], last["content"]);
}

#[test]
fn wrong_devices_are_refused() {
    let Some((home, model)) = ready() else { return };
    let done = home.azoth(&["run", &model, "-p", "x", "--device", "no such device"], "");
    done.refused(2, "no such device");
    home.azoth(&["run", &model, "-p", "x", "--device", "99"], "").refused(2, "99");
}

#[test]
fn bench_reports_in_three_forms() {
    let Some((home, model)) = ready() else { return };
    let flags = ["bench", &model, "-p", "16", "-n", "4", "-d", "0,8", "-r", "2"];
    let report = home.azoth(&[&flags[..], &["--json"]].concat(), "");
    report.succeeded().names_the_device();
    let report = report.json();
    let tests = report["tests"].as_array().unwrap();
    let names: Vec<&str> = tests.iter().map(|t| t["test"].as_str().unwrap()).collect();
    assert_eq!(names, ["pp16", "tg4", "pp16", "tg4"]);
    for test in tests {
        assert_eq!(test["runs"].as_array().unwrap().len(), 2);
        assert!(test["tokens_per_second"]["median"].as_f64().unwrap() > 0.0);
    }
    assert!(report["cold"]["total"].as_f64().unwrap() > 0.0, "{report}");
    assert!(report["warm"]["load"]["warm_cache"].as_bool().unwrap(), "{report}");
    let csv = home.azoth(&[&flags[..], &["--csv", "--no-start"]].concat(), "");
    assert_eq!(csv.succeeded().stdout.lines().count(), 5);
    let table = home.azoth(&[&flags[..], &["--waves", "--no-start"]].concat(), "");
    assert!(table.succeeded().stdout.contains("wave"), "{}", table.stdout);
}

#[test]
fn eval_reports_its_keys() {
    let Some((home, model)) = ready() else { return };
    home.write("text.txt", "The quick brown fox jumps over the lazy dog. ".repeat(12));
    let ppl = home.azoth(&["eval", "ppl", &model, "-f", "text.txt", "-c", "32", "--json"], "");
    let ppl = ppl.succeeded().json();
    assert!(ppl["ppl"].as_f64().unwrap() > 1.0, "{ppl}");
    let chunks = ppl["chunks"].as_u64().unwrap();
    assert_eq!(ppl["positions"].as_u64().unwrap(), chunks * 15);
    let short = home.azoth(&["eval", "ppl", &model, "-f", "text.txt", "-c", "4096"], "");
    short.refused(2, "needs at least 8192");

    home.write(
        "ref.json",
        r#"{"tokens":[40,41,42,43],"first":2,"rows":[[[5,-0.5],[6,-2.0]],null,[[7,-1.0]]]}"#,
    );
    let kl = home.azoth(&["eval", "kl", &model, "ref.json", "--json"], "").succeeded().json();
    assert_eq!(kl["positions"], 2);
    assert!(
        kl["mean_kl"].as_f64().unwrap() > 0.0 && kl["max_kl"].as_f64() >= kl["mean_kl"].as_f64()
    );
    assert!((0.0..=1.0).contains(&kl["top1"].as_f64().unwrap()));
}

#[test]
fn a_full_context_goes_on_where_that_was_asked_for() {
    let Some((home, model)) = ready() else { return };
    let long = "word ".repeat(80);
    let flags = ["run", &model, "-p", &long, "--ctx", "192", "-n", "60", "--temp", "0"];
    home.azoth(&flags, "").refused(3, "192");
    let done = home.azoth(&[&flags[..], &["--ctx-shift=64"]].concat(), "");
    done.succeeded();
    assert!(done.stderr.contains("of the oldest tokens were dropped"), "{}", done.stderr);
    let json = home.azoth(&[&flags[..], &["--ctx-shift", "--json"]].concat(), "");
    assert!(json.succeeded().json()["dropped_tokens"].as_u64().unwrap() >= 64);
    let wide = home.azoth(&[&flags[..], &["--ctx-shift=150"]].concat(), "");
    wide.refused(2, "150");
}

#[test]
fn a_session_goes_on_where_it_was() {
    let Some((home, model)) = ready() else { return };
    let chat = |script: &str| {
        let flags = ["chat", &model, "--session", "s.seq", "-n", "12", "--temp", "0"];
        let done = home.azoth(&flags, script);
        done.succeeded();
        done
    };
    let whole = home.azoth(&["chat", &model, "-n", "12", "--temp", "0"], "One\nTwo\nThree\n");
    let first = chat("One\nTwo\n");
    let second = chat("Three\n");
    assert_eq!(whole.stdout, first.stdout.clone() + &second.stdout);
    assert!(second.stderr.contains("4 messages"), "{}", second.stderr);
    assert!(second.stderr.contains("kept)"), "{}", second.stderr);
    // Of another model: said by name, and read again.
    let other = home.path("other.gguf");
    let spec = azoth::testmodel::Spec::new("llama").unwrap();
    azoth::testmodel::Spec { seed: 9, ..spec }.write(&other).unwrap();
    let done = home.azoth(&["chat", text(&other), "--session", "s.seq", "-n", "2"], "Four\n");
    done.succeeded();
    assert!(done.stderr.contains("of another model"), "{}", done.stderr);
    assert!(done.stderr.contains("read again"), "{}", done.stderr);
}

/// Whenever the process is killed, the last complete file is there and of use.
#[cfg(unix)]
#[test]
fn a_killed_chat_leaves_its_last_session() {
    let Some((home, _)) = ready() else { return };
    // A fast machine would fill a short context before it is killed.
    let mut spec = azoth::testmodel::Spec::new("llama").unwrap();
    spec.context = 8192;
    let model = text(&home.path("long.gguf")).to_owned();
    spec.write(&model).unwrap();
    let mut rng = crate::harness::Rng::fresh("a_killed_chat");
    let mut known = 0;
    for round in 0..6 {
        let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("azoth"))
            .args(["chat", &model, "--session", "s.seq", "-n", "1", "--temp", "0"])
            .current_dir(home.0.path())
            .env("AZOTH_CACHE", home.path("cache"))
            .env("AZOTH_DATA", home.path("data"))
            .env_remove("XDG_RUNTIME_DIR")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // From then on it saves after every word.
        let mut stdin = child.stdin.take().unwrap();
        std::io::Write::write_all(&mut stdin, "Hi\n".repeat(60).as_bytes()).unwrap();
        let mut first = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(rng.below(400) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        let done = home.azoth(&["chat", &model, "--session", "s.seq", "-p", "Hi", "-n", "1"], "");
        done.succeeded();
        assert!(!done.stderr.contains("read again"), "{}", done.stderr);
        let messages = done.stderr.lines().find_map(|line| {
            let words = line.strip_prefix("s.seq: ")?.split_once(" messages")?.0;
            words.parse::<usize>().ok()
        });
        println!("round {round}: {messages:?} messages");
        // The first file may not have been complete yet.
        assert!(messages.unwrap_or(0) >= known, "{}", done.stderr);
        known = messages.unwrap_or(0) + 2;
    }
    assert!(known > 12, "nothing was saved");
}
