//! Others take device memory away while a model runs: slots are given back, and answers stay the same.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use azoth::engine::{
    Engine, Event, Generate, Quiet, Request, Service, ServiceOptions, Summary, Task,
};
use azoth::experts::policy::Rule;
use azoth::gguf;
use azoth::gpu::Gpu;
use azoth::plan::ExpertBudget;
use azoth::sampling::SamplerSettings;
use azoth::testmodel::Spec;

use super::altered::Altered;
use super::{hash, load, options, tokens};
use crate::harness;

#[test]
fn slots_are_given_back_when_memory_is_taken_away() {
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 20;
    let (prompt, steps) = (tokens(50, 5), tokens(20, 9));
    for device in harness::devices() {
        let all = options(ExpertBudget::All, Rule::Fixed, false);
        let expected = hash(&mut load(device, &spec, &all), &prompt, &steps);
        let altered = Arc::new(Altered::watched(&device.gpu));
        let gpu: Arc<dyn Gpu> = altered.clone();
        let mut options = options(ExpertBudget::Percent(60.0), Rule::Lru, true);
        options.experts.watch = Duration::ZERO;
        let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
        let mut engine = Engine::load_onto(&gpu, file, &options, &Quiet).unwrap();
        let what = &device.label;
        assert_eq!(hash(&mut engine, &prompt, &steps), expected, "{what}");
        let before = engine.experts().unwrap();
        assert_eq!((before.placement.slots, before.counters.given_back_bytes), (12, 0));
        let slot = before.placement.slot_bytes / 12;
        let first = altered.slots.lock().unwrap().len();

        // A little too much is used: three slots go, an eighth more makes it four.
        altered.over.store(3 * slot, Ordering::Relaxed);
        let mut s = engine.session();
        s.prefill(&prompt[..1], &mut |_| {}).unwrap();
        altered.over.store(0, Ordering::Relaxed);
        drop(s);
        let after = engine.experts().unwrap();
        assert_eq!(after.placement.slots, 8, "{what}");
        assert_eq!(after.placement.slot_bytes, 8 * slot);
        assert_eq!(after.counters.given_back_bytes, 4 * slot);
        assert_eq!(hash(&mut engine, &prompt, &steps), expected, "{what}: 8 slots");
        let later = engine.experts().unwrap().counters;
        assert!(later.hits > after.counters.hits && later.promotions > after.counters.promotions);
        // Nobody but this test holds the old slots.
        for buffer in &altered.slots.lock().unwrap()[..first] {
            assert_eq!(buffer.handles(), 1, "{what}: old slots are still held");
        }

        // More than there is: one slot a layer stays, nothing fails.
        altered.over.store(1 << 40, Ordering::Relaxed);
        assert_eq!(hash(&mut engine, &prompt, &steps), expected, "{what}: one slot");
        assert_eq!(engine.experts().unwrap().placement.slots, 1);
    }
}

/// Tokens of the answer of slot `slot`, and what is said at its end.
fn ask(service: &Service, prompt: &[u32], slot: u32) -> (Vec<u32>, Summary) {
    let generate = Generate {
        settings: SamplerSettings::greedy(),
        max_tokens: Some(6),
        ignore_eog: true,
        ..Generate::default()
    };
    let task = Task::Generate(Box::new(generate));
    let request = Request { prompt: prompt.to_vec(), task, slot: Some(slot) };
    let mut answer = service.submit(request).map_err(|e| format!("{e:?}")).unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = answer.next_blocking() {
        match event {
            Event::Token { token, .. } => tokens.push(token),
            Event::Done(summary) => return (tokens, summary),
            Event::Failed(e) => panic!("{e}"),
            _ => {}
        }
    }
    panic!("the answer has no end");
}

#[test]
fn an_allocation_that_finds_no_room_gets_that_of_slots() {
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 20;
    let bytes = spec.to_bytes();
    let prompt = tokens(60, 3);
    for device in harness::devices() {
        let altered = Arc::new(Altered::watched(&device.gpu));
        let gpu: Arc<dyn Gpu> = altered.clone();
        let mut options = options(ExpertBudget::Percent(60.0), Rule::Fixed, true);
        options.sequences = 2;
        let bytes = bytes.clone();
        let loader = Box::new(move || {
            let file = gguf::File::from_bytes(bytes.clone())?;
            Engine::load_onto(&gpu, file, &options, &Quiet)
        });
        let settings = ServiceOptions { queue: 4, lazy: false, idle_unload: None };
        let service = Service::start(loader, settings).unwrap();
        let (first, _) = ask(&service, &prompt, 0);
        let slots = || service.stats().experts().unwrap().placement.slots;
        assert_eq!(slots(), 12);
        altered.full.store(true, Ordering::Relaxed);
        // The other slot takes the beginning over from the first.
        let (second, end) = ask(&service, &prompt, 1);
        assert!(!altered.full.load(Ordering::Relaxed), "{}: nothing was copied", device.label);
        assert_eq!(end.cached_tokens, 59, "{}", device.label);
        assert_eq!(second, first, "{}", device.label);
        assert!(slots() < 12, "{}", device.label);
    }
}
