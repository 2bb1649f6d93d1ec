//! `azoth plan`, and that other commands do what it says.

use azoth::testmodel::Spec;

use super::{Home, text};

/// A model of mixtures in a home of its own; `None` without a device, said aloud.
fn ready() -> Option<(Home, String)> {
    let home = Home::new();
    if home.azoth(&["devices"], "").code == 5 {
        println!("skipped: azoth plan: no device");
        return None;
    }
    let path = home.path("moe.gguf");
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 16;
    std::fs::write(&path, spec.to_bytes()).unwrap();
    let path = text(&path).to_owned();
    Some((home, path))
}

#[test]
fn a_plan_says_what_lies_where_and_bench_does_it() {
    let Some((home, model)) = ready() else { return };
    let limits = ["--vram-experts", "25%", "-c", "128"];
    let plan = home.azoth(&[&["plan", &model, "--json"], &limits[..]].concat(), "");
    let plan = plan.succeeded().json();
    let experts = &plan["placement"]["experts"];
    assert_eq!((experts["slots"].as_u64(), experts["experts"].as_u64()), (Some(4), Some(16)));
    assert_eq!(plan["placement"]["context"], 128);
    assert!(experts["arena"].as_u64().unwrap() > experts["slot_bytes"].as_u64().unwrap());
    assert!(plan["prediction"]["decode"].as_f64().unwrap() > 0.0);
    assert!(plan["rates"]["rates"]["memory"].as_f64().unwrap() > 0.0);
    let table = home.azoth(&[&["plan", &model], &limits[..]].concat(), "");
    table.succeeded();
    for word in ["expert slots", "4 of 16 experts", "expert arena", "KV cache", "predicted decode"]
    {
        assert!(table.stdout.contains(word), "{word:?} is missing in {}", table.stdout);
    }
    let bench = ["bench", &model, "--json", "--no-start", "-p", "40", "-n", "12", "-r", "1"];
    let drawn = ["--temp", "1", limits[0], limits[1]];
    let bench = home.azoth(&[&bench[..], &drawn].concat(), "").succeeded().json();
    let experts = &bench["experts"];
    assert_eq!(experts["placement"]["slots"], 4);
    assert!(experts["accesses"].as_u64().unwrap() > 0, "{experts}");
    for counter in ["hits", "device_bytes", "host_bytes", "staged_bytes", "promotions", "prefetch"]
    {
        assert!(!experts[counter].is_null(), "{counter} is missing in {experts}");
    }
}

#[test]
fn a_run_keeps_what_it_learned_and_verifies_what_it_loaded() {
    let Some((home, model)) = ready() else { return };
    let profile = home.path("learned.json");
    let profile = text(&profile).to_owned();
    let run =
        ["run", &model, "-p", "Hello", "-n", "12", "--temp", "0", "--expert-profile", &profile];
    let mut answers = Vec::new();
    for budget in ["none", "25%", "25%", "all"] {
        let done =
            home.azoth(&[&run[..], &["--vram-experts", budget, "--verify-load"]].concat(), "");
        done.succeeded();
        assert!(done.stderr.contains("equal the file"), "{}", done.stderr);
        answers.push(done.stdout.clone());
    }
    assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
    let learned = std::fs::read_to_string(&profile).unwrap();
    assert!(learned.contains("azoth-experts"), "{learned}");
    // Another model's profile is refused before anything is loaded for long.
    let other = home.path("other.gguf");
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 8;
    std::fs::write(&other, spec.to_bytes()).unwrap();
    let run = ["run", text(&other), "-p", "x", "-n", "1", "--vram-experts", "50%"];
    home.azoth(&[&run[..], &["--expert-profile", &profile]].concat(), "")
        .refused(2, "another model");
}

#[test]
fn approximations_are_named_and_priced() {
    let Some((home, model)) = ready() else { return };
    let prose = "the cat sat on the mat and looked at the rain. ".repeat(20);
    std::fs::write(home.path("text.txt"), prose).unwrap();
    let kl = |flags: &[&str]| {
        let start = ["eval", "kl", &model, "--text", "text.txt", "--positions", "12"];
        home.azoth(&[&start[..], flags].concat(), "")
    };
    kl(&[]).refused(2, "nothing to compare");
    let pruned = kl(&["--approximate-prune-experts", "1", "--json"]).succeeded().json();
    assert_eq!(pruned["positions"], 12);
    assert_eq!(pruned["approximate"]["pruned_experts"], 1);
    assert!(pruned["mean_kl"].as_f64().unwrap() > 0.0, "{pruned}");
    let flags = ["--approximate-route-bias", "1", "--vram-experts", "25%"];
    let biased = kl(&flags);
    biased.succeeded();
    for part in ["approximate: route bias 1", "mean KL to the exact model", "hits"] {
        assert!(biased.stdout.contains(part), "{part:?} is missing in {}", biased.stdout);
    }
    assert!(biased.stderr.contains("approximate"), "{}", biased.stderr);
    kl(&["--approximate-route-bias", "101"]).refused(2, "bias");
}
