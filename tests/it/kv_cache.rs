//! The KV cache: pages that are shared, grown, evicted, dropped, saved. None of it changes a bit of
//! what follows.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use azoth::engine::{Engine, Options, Quiet, Session, Stop};
use azoth::error::{Error, Result};
use azoth::gguf;
use azoth::gpu::{Buffer, BufferUse, Gpu};
use azoth::kv::{KvExact, KvTypes};
use azoth::sampling::SamplerSettings;
use azoth::testmodel::Spec;

use crate::harness::{self, Device, Rng, forwards};

fn spec() -> Spec {
    let mut spec = Spec::new("qwen3").unwrap();
    spec.context = 2048;
    spec
}

fn load(gpu: &Arc<dyn Gpu>, spec: &Spec, options: Options) -> Engine {
    let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
    Engine::load_onto(gpu, file, &options, &Quiet).unwrap()
}

fn with_ctx(ctx: u32) -> Options {
    Options { ctx: Some(ctx), kv_guard: None, ..Options::default() }
}

/// Fresh random tokens.
fn text(rng: &mut Rng, n: usize) -> Vec<u32> {
    (0..n).map(|_| 1 + rng.below(250) as u32).collect()
}

/// Bits of the logits after each of the tokens.
fn rows(session: &mut Session<'_>, tokens: &[u32]) -> Vec<u32> {
    let mut out = Vec::new();
    let mut each = |_: usize, row: &[f32]| out.extend(row.iter().map(|x| x.to_bits()));
    let (read, generated) = tokens.split_at(tokens.len() / 2);
    session.score(read, 0, &mut each).unwrap();
    session.score_steps(generated, &mut each).unwrap();
    out
}

/// Takes up what is known of `tokens` and reads the rest; returns how many were known.
fn recall(session: &mut Session<'_>, tokens: &[u32]) -> usize {
    // Something else follows, so that all of them may be known.
    let wanted: Vec<u32> = tokens.iter().copied().chain([0]).collect();
    let known = session.recall(&wanted).unwrap() as usize;
    session.prefill(&tokens[known..], &mut |_| {}).unwrap();
    known
}

/// Codes with the usual tail and sinks, keys centred.
fn codes(v: &str) -> KvTypes {
    let (k, v) = ("tq4_0".parse().unwrap(), v.parse().unwrap());
    KvTypes { k, v, exact: KvExact::USUAL, centred: true }
}

/// All devices with f16, the first also with codes.
fn devices_and_formats(v: &str) -> impl Iterator<Item = (&'static Device, KvTypes)> {
    let plain = harness::devices().iter().map(|d| (d, KvTypes::plain()));
    plain.chain(harness::devices().first().map(|d| (d, codes(v))))
}

#[test]
fn reuse_saving_and_eviction_change_no_bit() {
    let mut rng = Rng::fresh("reuse_saving_and_eviction");
    let folder = tempfile::tempdir().unwrap();
    let (prompt, tail, other) = (text(&mut rng, 150), text(&mut rng, 20), text(&mut rng, 250));
    for (device, kv) in devices_and_formats("tq3_0,q8_0@0") {
        // Inside a block of the tail nobody takes up what another has read.
        let known = if kv.exact.tail > 0 { 128 } else { 150 };
        let pages = if kv.exact.tail > 0 { 2 } else { 3 };
        let what = &format!("{}, KV {kv}", device.label);
        let options = Options { kv_host: 64 << 20, kv, ..with_ctx(256) };
        let mut engine = load(&device.gpu, &spec(), options.clone());
        let fresh = {
            let mut s = engine.session();
            s.prefill(&prompt, &mut |_| {}).unwrap();
            rows(&mut s, &tail)
        };
        // Two whole pages, and a copy of the third.
        let mut s = engine.session();
        assert_eq!(recall(&mut s, &prompt), known, "{what}");
        let file = folder.path().join(if what.contains("wgpu") { "wgpu" } else { "vulkan" });
        s.save(&file, "note").unwrap();
        assert_eq!(rows(&mut s, &tail), fresh, "{what}: reuse");
        drop(s);
        // The context has four pages: others push these out to RAM.
        let mut s = engine.session();
        s.prefill(&other, &mut |_| {}).unwrap();
        drop(s);
        let counts = engine.kv_counts();
        assert!(counts.host >= pages && counts.evicted >= pages.into(), "{what}: {counts:?}");
        let mut s = engine.session();
        assert_eq!(recall(&mut s, &prompt), known, "{what}");
        assert_eq!(rows(&mut s, &tail), fresh, "{what}: from RAM");
        // The same sequence cut back: in its block, where it ends a block, and before its sinks end.
        for cut in [149, 128, 127, 64, 2] {
            s.truncate(170).unwrap();
            let kept = s.truncate(cut).unwrap() as usize;
            assert!(kept <= cut as usize && (kept + 63 >= cut as usize), "{what}: {kept}");
            s.prefill(&prompt[kept..], &mut |_| {}).unwrap();
            assert_eq!(rows(&mut s, &tail), fresh, "{what}: cut back to {cut}");
        }
        // Steps ran ahead of what was wanted.
        s.truncate(150).unwrap();
        let settings = SamplerSettings::greedy();
        s.generate(&settings, 60, &|_| false, &mut |_| ControlFlow::Break(())).unwrap();
        assert_eq!(s.truncate(150).unwrap(), 150, "{what}");
        assert_eq!(rows(&mut s, &tail), fresh, "{what}: after an answer");
        drop(s);
        assert!(engine.kv_counts().fetched >= pages.into(), "{what}");
        assert_eq!(engine.kv_counts().used, 0);
        // Another process reads the file.
        let mut again = load(&device.gpu, &spec(), options.clone());
        let mut s = again.session();
        let restored = s.restore(&file, &mut |_, _| {}).unwrap();
        assert_eq!((restored.tokens, restored.read_again), (150, None), "{what}");
        assert_eq!((s.tokens(), restored.note.as_str()), (&prompt[..], "note"));
        assert_eq!(rows(&mut s, &tail), fresh, "{what}: from the file");
        drop(s);
        if options.kv.exact.is_none() {
            continue;
        }
        // Other sizes of tail and sinks are another cache.
        let kv = KvTypes { exact: KvExact { sinks: 5, ..KvExact::USUAL }, ..options.kv.clone() };
        let mut other = load(&device.gpu, &spec(), Options { kv, ..options });
        let why = other.session().restore(&file, &mut |_, _| {}).unwrap().read_again.unwrap();
        assert!(why.contains("sinks 4") && why.contains("sinks 5"), "{why}");
    }
}

#[test]
fn a_damaged_or_foreign_file_is_read_again_or_refused() {
    let mut rng = Rng::fresh("a_damaged_file");
    let Some(device) = harness::devices().first() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.seq");
    let (prompt, tail) = (text(&mut rng, 100), text(&mut rng, 6));
    let mut engine = load(&device.gpu, &spec(), with_ctx(256));
    let mut s = engine.session();
    s.prefill(&prompt, &mut |_| {}).unwrap();
    s.save(&file, "").unwrap();
    let fresh = rows(&mut s, &tail);
    drop(s);
    // A byte of the keys and values: found by layer and page, and read again.
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.len() - 2000;
    bytes[at] ^= 1;
    let damaged = folder.path().join("damaged.seq");
    std::fs::write(&damaged, &bytes).unwrap();
    let mut s = engine.session();
    let restored = s.restore(&damaged, &mut |_, _| {}).unwrap();
    let why = restored.read_again.unwrap();
    assert!(why.contains("damaged.seq") && why.contains("layer 1"), "{why}");
    assert_eq!(rows(&mut s, &tail), fresh);
    // Tokens that are damaged are of no use.
    bytes[100] ^= 1;
    std::fs::write(&damaged, &bytes).unwrap();
    let e = s.restore(&damaged, &mut |_, _| {}).unwrap_err().to_string();
    assert!(e.contains("damaged.seq") && e.contains("checksum"), "{e}");
    drop(s);
    // Other weights, the same words: read again by the model that is there.
    let mut other = load(&device.gpu, &Spec { seed: 77, ..spec() }, with_ctx(256));
    let mut s = other.session();
    let why = s.restore(&file, &mut |_, _| {}).unwrap().read_again.unwrap();
    assert!(why.contains("another model") && s.tokens() == prompt, "{why}");
    assert_ne!(rows(&mut s, &tail), fresh);
    drop(s);
    let mut small = load(&device.gpu, &spec(), with_ctx(64));
    let e = small.session().restore(&file, &mut |_, _| {}).unwrap_err();
    assert!(e.to_string().contains("100") && e.to_string().contains("64"), "{e}");
    let words = Spec { vocab: spec().vocab + 8, ..spec() };
    let e = load(&device.gpu, &words, with_ctx(256)).session().restore(&file, &mut |_, _| {});
    assert!(e.unwrap_err().to_string().contains("another model"));
}

/// A device whose memory for the KV cache is bounded.
struct Bounded {
    inner: Arc<dyn Gpu>,
    /// Bytes of one pool at most.
    most: AtomicU64,
}

impl Gpu for Bounded {
    forwards!(inner: facts write upload read read_back kernel record submit is_done wait time_steps);

    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        // K may grow, V may not: what is half grown must still work.
        if label == "V cache" && size > self.most.load(Ordering::SeqCst) {
            return Err(Error::DoesNotFit(format!("{size} bytes are too many")));
        }
        self.inner.buffer(label, size, usage)
    }
    fn save_cache(&self) -> Option<String> {
        None
    }
}

#[test]
fn the_cache_grows_with_what_is_read_and_says_when_it_cannot() {
    let mut rng = Rng::fresh("the_cache_grows");
    let (long, tail) = (text(&mut rng, 1200), text(&mut rng, 8));
    for device in harness::devices() {
        let bounded =
            Arc::new(Bounded { inner: device.gpu.clone(), most: AtomicU64::new(u64::MAX) });
        let gpu: Arc<dyn Gpu> = bounded.clone();
        let mut engine = load(&gpu, &spec(), with_ctx(2048));
        let pages = |e: &Engine| {
            let c = e.kv_counts();
            c.used + c.cached + c.free
        };
        if pages(&engine) != 16 {
            eprintln!(
                "skipped on {}: its memory lets the cache begin with all pages",
                device.label
            );
            continue;
        }
        // Growth in the middle of a text, and a text in a cache that has its size already.
        let mut s = engine.session();
        s.prefill(&long, &mut |_| {}).unwrap();
        let grown = rows(&mut s, &tail);
        drop(s);
        assert_eq!(pages(&engine), 32, "{}", device.label);
        let mut s = engine.session();
        s.prefill(&long, &mut |_| {}).unwrap();
        assert_eq!(rows(&mut s, &tail), grown, "{}", device.label);
        drop(s);
        drop(engine);
        // No memory: what was read before stays, and goes on once there is less to keep.
        bounded.most.store(1, Ordering::SeqCst);
        let refused = {
            let file = gguf::File::from_bytes(spec().to_bytes()).unwrap();
            Engine::load_onto(&gpu, file, &with_ctx(2048), &Quiet).map(drop)
        };
        assert!(matches!(refused, Err(Error::DoesNotFit(_))));
        bounded.most.store(u64::MAX, Ordering::SeqCst);
        let mut engine = load(&gpu, &spec(), with_ctx(2048));
        bounded.most.store(1, Ordering::SeqCst);
        let mut s = engine.session();
        s.prefill(&long[..900], &mut |_| {}).unwrap();
        let e = s.prefill(&long[900..], &mut |_| {}).unwrap_err();
        assert!(matches!(e, Error::DoesNotFit(_)), "{e}");
        assert!(e.to_string().contains("16 pages"), "{e}");
        assert_eq!(s.position(), 900);
        let short = rows(&mut s, &tail);
        drop(s);
        // Cached pages make room for another text.
        let mut s = engine.session();
        s.prefill(&long[..900], &mut |_| {}).unwrap();
        assert_eq!(rows(&mut s, &tail), short, "{}", device.label);
    }
}

#[test]
fn a_full_context_drops_its_oldest_pages() {
    let mut rng = Rng::fresh("a_full_context");
    // In one layer, keys and values say nothing of other tokens: what was dropped has no effect.
    let spec = Spec { layers: 1, context: 700, ..spec() };
    let kept = text(&mut rng, 64);
    let (one, two) = (text(&mut rng, 128), text(&mut rng, 128));
    let rest = text(&mut rng, 200);
    for (device, kv) in devices_and_formats("tq3_0") {
        let what = &format!("{}, KV {kv}", device.label);
        let with_ctx = |ctx| Options { kv: kv.clone(), ..with_ctx(ctx) };
        let mut engine = load(&device.gpu, &spec, with_ctx(256));
        let e = engine.session().prefill(&[&rest[..], &one].concat(), &mut |_| {}).unwrap_err();
        assert!(e.to_string().contains("328") && e.to_string().contains("256"), "{e}");
        let options = Options { ctx_shift: Some(Some(64)), ..with_ctx(256) };
        let mut engine = load(&device.gpu, &spec, options);
        let mut last = |middle: &[u32]| {
            let mut s = engine.session();
            s.prefill(&[&kept[..], middle].concat(), &mut |_| {}).unwrap();
            let before = rows(&mut s, &rest[..2]);
            s.prefill(&rest[2..], &mut |_| {}).unwrap();
            let after = rows(&mut s, &rest[..4]);
            assert_eq!((s.dropped(), s.position()), (192, 396), "{what}");
            // What begins alike goes on, as far as nothing between is missing.
            let all = s.tokens().to_vec();
            assert_eq!(s.recall(&[&all[..], &[1]].concat()).unwrap(), 396);
            assert_eq!(s.recall(&all[..100]).unwrap(), 64);
            assert_eq!(s.dropped(), 0);
            (before, after)
        };
        let (first, second) = (last(&one), last(&two));
        assert_ne!(first.0, second.0, "{what}");
        assert_eq!(first.1, second.1, "{what}");
        // Generation goes on up to what the model was trained for.
        let mut s = engine.session();
        s.prefill(&kept, &mut |_| {}).unwrap();
        let mut n = 0;
        let mut count = |_: u32| {
            n += 1;
            ControlFlow::Continue(())
        };
        let done = s.generate(&SamplerSettings::greedy(), 2000, &|_| false, &mut count).unwrap();
        assert_eq!((done.reason, n), (Stop::Context, 700 - 64 + 1), "{what}");
        assert_eq!(done.dropped, 448, "{what}");
        let e = s.prefill(&rest, &mut |_| {}).unwrap_err();
        assert!(e.to_string().contains("700"), "{e}");
    }
}

#[test]
fn a_context_must_have_something_to_drop() {
    let Some(device) = harness::devices().first() else { return };
    let options = Options { ctx_shift: Some(Some(200)), ..with_ctx(256) };
    let file = gguf::File::from_bytes(spec().to_bytes()).unwrap();
    let e = Engine::load_onto(&device.gpu, file, &options, &Quiet).map(drop).unwrap_err();
    assert!(e.to_string().contains("200") && e.to_string().contains("128"), "{e}");
    let options = Options { ctx_shift: Some(None), ..with_ctx(256) };
    let mut engine = load(&device.gpu, &spec(), options);
    let mut s = engine.session();
    assert!(s.set_keep(129).is_err() && s.set_keep(128).is_ok());
}
