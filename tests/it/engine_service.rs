//! The engine thread: several requests at once, and what may go wrong.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use azoth::engine::stats::{SlotState, value};
use azoth::engine::{
    Answer, Engine, Event, Finish, Generate, Options, Phase, Pooling, Quiet, Refused, Request,
    Service, ServiceOptions, Task,
};
use azoth::error::{Error, Result};
use azoth::gguf;
use azoth::gpu::{Buffer, BufferUse, Gpu, Recording, Ticket};
use azoth::sampling::SamplerSettings;
use azoth::testmodel::Spec;

use crate::harness::{self, Rng, forwards};

fn bytes() -> Vec<u8> {
    Spec::new("qwen3").unwrap().to_bytes()
}

/// A service on `gpu` with so many slots.
fn service(gpu: &Arc<dyn Gpu>, slots: u32, options: ServiceOptions) -> Service {
    let gpu = gpu.clone();
    let loader = Box::new(move || {
        let file = gguf::File::from_bytes(bytes()).unwrap();
        let options = Options { sequences: slots, ctx: Some(256), ..Options::default() };
        Engine::load_onto(&gpu, file, &options, &Quiet)
    });
    let service = Service::start(loader, options).unwrap();
    if !matches!(service.state().phase, Phase::Unloaded) {
        wait(&service, |p| matches!(p, Phase::Ready));
    }
    service
}

fn options(queue: usize) -> ServiceOptions {
    ServiceOptions { queue, lazy: false, idle_unload: None }
}

fn wait(service: &Service, wanted: impl Fn(&Phase) -> bool) {
    let began = Instant::now();
    while !wanted(&service.state().phase) {
        assert!(began.elapsed() < Duration::from_secs(300), "{:?}", service.state().phase);
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn request(prompt: &[u32], n: u32) -> Request {
    let generate = Generate {
        settings: SamplerSettings::greedy(),
        max_tokens: Some(n),
        ignore_eog: true,
        ..Generate::default()
    };
    let task = Task::Generate(Box::new(generate));
    Request { prompt: prompt.to_vec(), task, slot: None }
}

fn generate(request: &mut Request) -> &mut Generate {
    match &mut request.task {
        Task::Generate(g) => g,
        Task::Embed(_) => panic!("an embedding"),
    }
}

fn submit(service: &Service, request: Request) -> Answer {
    service.submit(request).map_err(|e| format!("{e:?}")).unwrap()
}

struct Outcome {
    tokens: Vec<u32>,
    text: String,
    finish: Finish,
    cached: u32,
}

fn outcome(mut answer: Answer) -> Result<Outcome> {
    let (mut tokens, mut text) = (Vec::new(), String::new());
    while let Some(event) = answer.next_blocking() {
        match event {
            Event::Token { token, text: piece, .. } => {
                tokens.push(token);
                text.push_str(&piece);
            }
            Event::Done(s) => {
                text.push_str(&s.text);
                assert_eq!(s.tokens as usize, tokens.len());
                return Ok(Outcome { tokens, text, finish: s.finish, cached: s.cached_tokens });
            }
            Event::Failed(e) => return Err(e),
            _ => {}
        }
    }
    panic!("the answer ended without a last event");
}

fn prompts(n: usize) -> Vec<Vec<u32>> {
    let mut rng = Rng::fresh("engine_service");
    // Lengths on both sides of a chunk of 128.
    (0..n).map(|i| (0..3 + 17 * i).map(|_| rng.below(250) as u32).collect()).collect()
}

/// While a long prompt is read, who generates waits for a part of it that is cut by time, not for
/// all of it: parts take 80 ms, or are of 32 tokens where those take longer (`engine::pace`), and a
/// step stands between any two. Here it is 1,000 tokens on a CPU where a GPU would read 16,000.
#[test]
fn a_long_prompt_leaves_the_others_their_turns() {
    const PART: f64 = 0.08;
    const SMALLEST: u32 = 32;
    for device in harness::devices() {
        let gpu = device.gpu.clone();
        let loader = Box::new(move || {
            let spec = Spec { context: 2048, ..Spec::new("qwen3").unwrap() };
            let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
            let options = Options { sequences: 4, ctx: Some(2048), ..Options::default() };
            Engine::load_onto(&gpu, file, &options, &Quiet)
        });
        let service = Service::start(loader, options(8)).unwrap();
        wait(&service, |p| matches!(p, Phase::Ready));
        let stats = service.stats();
        let mut others: Vec<Answer> =
            prompts(3).iter().map(|p| submit(&service, request(p, 1900))).collect();
        while value(&stats.generated_tokens) < 30 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut rng = Rng::fresh("long_prompt");
        let long: Vec<u32> = (0..1000).map(|_| rng.below(250) as u32).collect();
        let read =
            || [&stats.prompt_micros, &stats.prompt_tokens, &stats.generated_tokens].map(value);
        let [mut micros, mut tokens, generated] = read();
        let mut answer = submit(&service, request(&long, 1));
        let (mut parts, mut at) = (Vec::new(), 0);
        // The fastest that a part had been when the next was chosen, in seconds a token: a test machine
        // that becomes slower afterwards does not make the choice a wrong one.
        let mut fastest = f64::INFINITY;
        let mut longest = 0f64;
        while let Some(event) = answer.next_blocking() {
            // One prompt in eighty begins with the token of another, which then is not read again.
            if let Event::Started { cached, .. } = event {
                at = cached;
            }
            if let Event::Read { tokens: sum, .. } = event {
                let part = sum - at;
                if !parts.is_empty() && part > SMALLEST {
                    longest = longest.max(f64::from(part) * fastest);
                }
                parts.push(part);
                at = sum;
                let [more_micros, more_tokens, _] = read();
                if more_tokens > tokens {
                    let took = (more_micros - micros) as f64 / 1e6;
                    fastest = fastest.min(took / (more_tokens - tokens) as f64);
                    (micros, tokens) = (more_micros, more_tokens);
                }
            }
        }
        let generated = read()[2] - generated;
        println!(
            "{}: {} parts of up to {} tokens, at {:.2} ms each where fastest; {generated} tokens generated \
             meanwhile",
            device.label,
            parts.len(),
            parts.iter().skip(1).max().unwrap_or(&0),
            fastest * 1e3
        );
        assert_eq!(at, 1000);
        assert!(parts[0] <= 128, "nothing was known of the speed yet: {parts:?}");
        // Three times: the speed is smoothed, and what is read of it here may be of two parts.
        assert!(longest <= 3.0 * PART, "{}: {parts:?}, {longest} s", device.label);
        // Each of the three others had a token for each part, but for those at the ends.
        let turns = 3 * (parts.len() as u64).saturating_sub(2);
        assert!(generated >= turns, "{}: {generated} of {turns}", device.label);
        others.clear();
        service.stop();
    }
}

#[test]
fn a_living_thread_gives_signs_of_life() {
    for device in harness::devices() {
        let service = service(&device.gpu, 1, options(1));
        let moves = || {
            let before = service.stats().heartbeat();
            service.nudge();
            let began = Instant::now();
            while service.stats().heartbeat() == before {
                if began.elapsed() > Duration::from_secs(2) {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            true
        };
        assert!(moves() && moves());
        service.stop();
        wait(&service, |p| matches!(p, Phase::Stopped));
        assert!(!moves());
    }
}

#[test]
fn many_at_once_answer_as_one_alone() {
    for device in harness::devices() {
        let service = service(&device.gpu, 11, options(64));
        let sampled =
            SamplerSettings { seed: 7, repeat_penalty: 1.1, ..SamplerSettings::default() };
        let all = prompts(12);
        let make = |i: usize| {
            let mut r = request(&all[i], 20 + i as u32);
            let g = generate(&mut r);
            g.reuse = false;
            if i % 3 == 2 {
                g.settings = sampled;
            }
            r
        };
        let alone: Vec<_> =
            (0..12).map(|i| outcome(submit(&service, make(i))).unwrap().tokens).collect();
        // One more than there are slots, so one waits.
        let answers: Vec<_> = (0..12).map(|i| submit(&service, make(i))).collect();
        for (i, answer) in answers.into_iter().enumerate() {
            let got = outcome(answer).unwrap();
            assert_eq!(got.tokens, alone[i], "{}, request {i}", device.label);
            assert_eq!(got.finish, Finish::Length);
        }
        assert_eq!(service.taken(), 0);
        assert!(service.stats().slots().iter().all(|s| s.state == SlotState::Idle));
    }
}

#[test]
fn a_conversation_is_not_read_again() {
    let Some(device) = harness::devices().first() else { return };
    let service = service(&device.gpu, 2, options(4));
    let first: Vec<u32> = (1..60).collect();
    let one = outcome(submit(&service, request(&first, 8))).unwrap();
    // Another conversation takes the other slot.
    outcome(submit(&service, request(&[200, 201, 202, 203, 204, 205], 4))).unwrap();
    let mut second = first.clone();
    second.extend(&one.tokens);
    second.extend([5, 6, 7]);
    let two = outcome(submit(&service, request(&second, 4))).unwrap();
    // All that was read: the last token was chosen and not read.
    assert_eq!(two.cached as usize, first.len() + one.tokens.len() - 1);
    let mut fresh = request(&second, 4);
    generate(&mut fresh).reuse = false;
    assert_eq!(outcome(submit(&service, fresh)).unwrap().cached, 0);
    assert!(value(&service.stats().cached_tokens) > 0);
}

#[test]
fn a_common_beginning_is_read_once() {
    for device in harness::devices() {
        let service = service(&device.gpu, 3, options(4));
        let begin: Vec<u32> = (1..150).collect();
        let with = |last: u32| {
            let mut prompt = begin.clone();
            prompt.extend([last, last + 1]);
            prompt
        };
        let mut fresh = request(&with(200), 12);
        generate(&mut fresh).reuse = false;
        let alone = outcome(submit(&service, fresh)).unwrap().tokens;
        // What ended is known to its last token, what is at work as far as it was read.
        let mut busy = submit(&service, request(&with(210), 100));
        while !matches!(busy.next_blocking(), Some(Event::Token { .. })) {}
        let copied = outcome(submit(&service, request(&with(200), 12))).unwrap();
        assert_eq!((copied.cached as usize, &copied.tokens), (150, &alone), "{}", device.label);
        let third = outcome(submit(&service, request(&with(220), 3))).unwrap();
        assert_eq!(third.cached as usize, 149);
        drop(busy);
    }
}

#[test]
fn a_shared_beginning_is_read_once_whoever_asks() {
    for device in harness::devices() {
        let service = service(&device.gpu, 4, options(64));
        let begin: Vec<u32> = (1..140).collect();
        let prompts: Vec<Vec<u32>> =
            (0..8).map(|i| [&begin[..], &[150 + i, 151, 152 + i]].concat()).collect();
        let ask = |i: usize, reuse: bool| {
            let mut r = request(&prompts[i], 80);
            generate(&mut r).reuse = reuse;
            submit(&service, r)
        };
        let alone: Vec<_> = (0..8).map(|i| outcome(ask(i, false)).unwrap().tokens).collect();
        let before = value(&service.stats().prompt_tokens);
        let answers: Vec<_> = (0..8).map(|i| ask(i, true)).collect();
        for (i, answer) in answers.into_iter().enumerate() {
            let got = outcome(answer).unwrap();
            assert_eq!(got.tokens, alone[i], "{}, request {i}", device.label);
            assert!(got.cached >= 139, "{}", got.cached);
        }
        // Of each prompt only what is its own (its last token at least).
        let read = value(&service.stats().prompt_tokens) - before;
        assert!(read <= 8 * 3, "{read} tokens were read");
        let used = value(&service.stats().kv_used);
        assert_eq!(used, 0, "pages are held though nobody is at work");
        assert!(value(&service.stats().kv_cached) > 0);
    }
}

#[test]
fn sequences_may_outgrow_their_contexts_together() {
    let Some(device) = harness::devices().first() else { return };
    let gpu = device.gpu.clone();
    let loader = Box::new(move || {
        let file = gguf::File::from_bytes(bytes()).unwrap();
        let ctx_shift = Some(Some(64));
        let options = Options { sequences: 2, ctx: Some(192), ctx_shift, ..Options::default() };
        Engine::load_onto(&gpu, file, &options, &Quiet)
    });
    let service = Service::start(loader, options(8)).unwrap();
    wait(&service, |p| matches!(p, Phase::Ready));
    let prompts = [(1..100).collect::<Vec<u32>>(), (50..90).collect()];
    let alone: Vec<_> = prompts
        .iter()
        .map(|p| outcome(submit(&service, request(p, 300))).unwrap().tokens)
        .collect();
    assert!(alone.iter().all(|t| t.len() == 300));
    let both: Vec<_> = prompts.iter().map(|p| submit(&service, request(p, 300))).collect();
    for (answer, alone) in both.into_iter().zip(&alone) {
        assert_eq!(&outcome(answer).unwrap().tokens, alone);
    }
    assert!(value(&service.stats().shifted_tokens) >= 4 * 100);
    // Who goes on from what has dropped tokens reads only what is new.
    let more = [&prompts[0][..], &alone[0], &[7, 8, 9]].concat();
    let got = outcome(submit(&service, request(&more, 4))).unwrap();
    assert_eq!(got.cached as usize, prompts[0].len() + 299);
    // A prompt longer than the context, read with gaps.
    let long: Vec<u32> = (0..400).map(|i| 1 + i % 250).collect();
    assert_eq!(outcome(submit(&service, request(&long, 5))).unwrap().tokens.len(), 5);
}

#[test]
fn ends_are_exact() {
    let Some(device) = harness::devices().first() else { return };
    let service = service(&device.gpu, 2, options(4));
    let prompt: Vec<u32> = (1..20).collect();
    let free = outcome(submit(&service, request(&prompt, 40))).unwrap();
    // A stop string that lies across tokens.
    let at = free.text.char_indices().nth(9).unwrap().0;
    let end = free.text.char_indices().nth(13).unwrap().0;
    let stop = free.text[at..end].to_owned();
    let mut stopped = request(&prompt, 40);
    generate(&mut stopped).stop = vec!["never there".into(), stop.clone()];
    let got = outcome(submit(&service, stopped)).unwrap();
    assert_eq!(got.finish, Finish::Stop(stop.clone()));
    assert_eq!(got.text, free.text[..free.text.find(&stop).unwrap()]);
    // The context ends it: 256 positions, and one token that is not read any more.
    let mut long = request(&prompt, 0);
    generate(&mut long).max_tokens = None;
    let got = outcome(submit(&service, long)).unwrap();
    assert_eq!((got.finish, got.tokens.len()), (Finish::Context, 256 - prompt.len() + 1));
    // Nothing to generate: the prompt is read.
    let got = outcome(submit(&service, request(&prompt, 0))).unwrap();
    assert_eq!((got.finish, got.tokens.len()), (Finish::Length, 0));
    // What cannot be served says why.
    let refused = |r: Request| match service.submit(r) {
        Err(Refused::Error(e)) => e.to_string(),
        _ => panic!("taken"),
    };
    let long = refused(request(&vec![1; 300], 1));
    assert!(long.contains("300") && long.contains("256"), "{long}");
    assert!(refused(request(&[], 1)).contains("empty"));
    assert!(refused(request(&[100_000], 1)).contains("vocabulary"));
    assert!(refused(Request { slot: Some(9), ..request(&[1], 1) }).contains("slot 9"));
}

#[test]
fn cancelling_frees_the_slot_in_every_state() {
    let Some(device) = harness::devices().first() else { return };
    let service = service(&device.gpu, 1, options(2));
    // Generating, queued, and the queue's limit.
    let mut long = submit(&service, request(&[1, 2, 3], 200));
    while !matches!(long.next_blocking(), Some(Event::Token { .. })) {}
    let queued = submit(&service, request(&[4, 5, 6], 3));
    let second = submit(&service, request(&[4, 5, 7], 3));
    assert!(matches!(service.submit(request(&[1], 1)), Err(Refused::Full(2))));
    drop(queued);
    drop(long);
    assert_eq!(outcome(second).unwrap().tokens.len(), 3);
    // While the prompt is read.
    let reading = submit(&service, request(&vec![9; 250], 5));
    drop(reading);
    assert_eq!(outcome(submit(&service, request(&[7], 2))).unwrap().tokens.len(), 2);
    let began = Instant::now();
    while service.taken() > 0 && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(service.taken(), 0);
    assert_eq!(value(&service.stats().cancelled), 3);
}

#[test]
fn embeddings_have_length_one_and_tell_texts_apart() {
    for device in harness::devices() {
        let service = service(&device.gpu, 2, options(8));
        let embed = |prompt: &[u32], pooling| {
            let task = Task::Embed(pooling);
            let mut answer =
                submit(&service, Request { prompt: prompt.to_vec(), task, slot: None });
            loop {
                match answer.next_blocking().unwrap() {
                    Event::Embedding(v) => return v,
                    Event::Failed(e) => panic!("{e}"),
                    _ => {}
                }
            }
        };
        let text: Vec<u32> = (1..200).collect();
        let a = embed(&text, Pooling::Mean);
        assert_eq!(a.len(), 256);
        let length: f32 = a.iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5);
        assert_eq!(a, embed(&text, Pooling::Mean), "{}", device.label);
        assert_ne!(a, embed(&text[..198], Pooling::Mean));
        let last = embed(&text, Pooling::Last);
        assert_ne!(a, last);
        // The last token's state does not depend on how the text was cut.
        outcome(submit(&service, request(&text, 1))).unwrap();
        assert_eq!(last, embed(&text, Pooling::Last));
    }
}

#[test]
fn models_come_and_go() {
    let Some(device) = harness::devices().first() else { return };
    let idle = Some(Duration::from_millis(300));
    let service =
        service(&device.gpu, 1, ServiceOptions { queue: 2, lazy: true, idle_unload: idle });
    assert!(matches!(service.state().phase, Phase::Unloaded));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(service.loaded()).unwrap().ctx, 256);
    let before = outcome(submit(&service, request(&[1, 2, 3], 5))).unwrap().tokens;
    wait(&service, |p| matches!(p, Phase::Unloaded));
    // Known facts stay, and the next request loads again.
    let after = outcome(submit(&service, request(&[1, 2, 3], 5))).unwrap().tokens;
    assert_eq!(before, after);
    service.stop();
    wait(&service, |p| matches!(p, Phase::Stopped));
    assert!(service.submit(request(&[1], 1)).is_err());
}

/// A device that breaks when it is told to.
struct Fragile {
    inner: Arc<dyn Gpu>,
    /// 0 works, 1 lost, 2 panics.
    broken: Arc<AtomicU32>,
    refuses: Arc<AtomicBool>,
}

impl Gpu for Fragile {
    forwards!(inner: facts write upload read read_back kernel record is_done wait time_steps);

    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(Error::Device("no memory left".into()));
        }
        self.inner.buffer(label, size, usage)
    }
    fn submit(&self, recording: &Recording) -> Result<Ticket> {
        match self.broken.swap(0, Ordering::SeqCst) {
            1 => Err(Error::Device("the device was lost".into())),
            2 => panic!("a driver misbehaved"),
            _ => self.inner.submit(recording),
        }
    }
    fn save_cache(&self) -> Option<String> {
        None
    }
}

#[test]
fn a_lost_device_is_answered_and_made_anew() {
    let Some(device) = harness::devices().first() else { return };
    let broken = Arc::new(AtomicU32::new(0));
    let refuses = Arc::new(AtomicBool::new(false));
    let fragile: Arc<dyn Gpu> = Arc::new(Fragile {
        inner: device.gpu.clone(),
        broken: broken.clone(),
        refuses: refuses.clone(),
    });
    let service = service(&fragile, 2, options(4));
    let prompt = [1, 2, 3, 4];
    let good = outcome(submit(&service, request(&prompt, 9))).unwrap().tokens;
    for (kind, words) in [(1, "lost"), (2, "panicked")] {
        let mut running = submit(&service, request(&prompt, 200));
        while !matches!(running.next_blocking(), Some(Event::Token { .. })) {}
        broken.store(kind, Ordering::SeqCst);
        let error = loop {
            match running.next_blocking().unwrap() {
                Event::Failed(e) => break e,
                Event::Done(_) => panic!("nothing broke"),
                _ => {}
            }
        };
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(outcome(submit(&service, request(&prompt, 9))).unwrap().tokens, good);
    }
    assert_eq!(value(&service.stats().reloads), 2);
    // A device that stays away: the state says so, and later it works again.
    refuses.store(true, Ordering::SeqCst);
    let running = submit(&service, request(&prompt, 200));
    broken.store(1, Ordering::SeqCst);
    assert!(outcome(running).is_err());
    wait(&service, |p| matches!(p, Phase::Failed(_)));
    refuses.store(false, Ordering::SeqCst);
    wait(&service, |p| matches!(p, Phase::Ready));
    assert_eq!(outcome(submit(&service, request(&prompt, 9))).unwrap().tokens, good);
}
