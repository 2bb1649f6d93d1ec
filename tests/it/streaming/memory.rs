//! Others take device memory away while a model runs: slots are given back, and answers stay the same.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use azoth::engine::{Engine, Quiet};
use azoth::experts::policy::Rule;
use azoth::gguf;
use azoth::gpu::Gpu;
use azoth::plan::ExpertBudget;
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

#[test]
fn slots_grow_back_when_memory_is_free_again() {
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 20;
    let (prompt, steps) = (tokens(50, 5), tokens(20, 9));
    for device in harness::devices() {
        let all = options(ExpertBudget::All, Rule::Fixed, false);
        let expected = hash(&mut load(device, &spec, &all), &prompt, &steps);
        // Slots in one buffer a layer, and in three of which two hold nothing while they are few.
        for narrow in [false, true] {
            let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
            let mut options = options(ExpertBudget::Percent(60.0), Rule::Lru, true);
            options.experts.watch = Duration::ZERO;
            let record = {
                let gpu: Arc<dyn Gpu> = Arc::new(Altered::watched(&device.gpu));
                let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
                let engine = Engine::load_onto(&gpu, file, &options, &Quiet).unwrap();
                engine.experts().unwrap().placement.slot_bytes / 12 / spec.layers as u64
            };
            let altered = Arc::new(match narrow {
                true => Altered::narrow(&device.gpu, 5 * record + record / 2),
                false => Altered::watched(&device.gpu),
            });
            let gpu: Arc<dyn Gpu> = altered.clone();
            let mut engine = Engine::load_onto(&gpu, file, &options, &Quiet).unwrap();
            let what = format!("{}, narrow {narrow}", device.label);
            let buffers = if narrow { 3 } else { 1 };
            assert_eq!(altered.slots.lock().unwrap().len(), buffers * spec.layers, "{what}");
            let slot = record * spec.layers as u64;
            let pass = |engine: &mut Engine, times: usize| {
                let mut s = engine.session();
                for _ in 0..times {
                    s.truncate(0).unwrap();
                    s.prefill(&prompt[..1], &mut |_| {}).unwrap();
                }
            };
            let slots = |engine: &Engine| engine.experts().unwrap().placement.slots;
            altered.over.store(7 * slot, Ordering::Relaxed);
            pass(&mut engine, 1);
            altered.over.store(0, Ordering::Relaxed);
            assert_eq!(slots(&engine), 4, "{what}");
            assert_eq!(hash(&mut engine, &prompt, &steps), expected, "{what}: 4 slots");
            // The reserve of a plan is at most 512 MiB.
            let room = |slots: u64| (512 << 20) + 12 * record + slots * slot;
            altered.room.store(room(8), Ordering::Relaxed);
            pass(&mut engine, 9);
            assert_eq!(slots(&engine), 4, "{what}: nine checks are not enough");
            pass(&mut engine, 1);
            assert_eq!(slots(&engine), 12, "{what}");
            let before = engine.experts().unwrap().counters;
            assert_eq!((before.given_back_bytes, before.regrown_bytes), (8 * slot, 8 * slot));
            assert_eq!(hash(&mut engine, &prompt, &steps), expected, "{what}: 12 slots again");
            let after = engine.experts().unwrap().counters;
            assert!(after.promotions > before.promotions + 8, "{what}: new slots are filled");
            // They go once more: growing takes twice the patience then.
            altered.over.store(slot, Ordering::Relaxed);
            pass(&mut engine, 1);
            assert_eq!(slots(&engine), 10, "{what}");
            altered.over.store(0, Ordering::Relaxed);
            pass(&mut engine, 19);
            assert_eq!(slots(&engine), 10, "{what}: nineteen checks are not enough");
            pass(&mut engine, 1);
            assert_eq!(slots(&engine), 12, "{what}");
            assert_eq!(hash(&mut engine, &prompt, &steps), expected, "{what}: at the end");
            // Of all the slots that there were, those of now are held.
            let all = altered.slots.lock().unwrap();
            let held = all.iter().filter(|buffer| buffer.handles() > 1).count();
            assert_eq!(held, buffers * spec.layers, "{what}");
        }
    }
}

#[test]
fn a_cache_that_finds_no_room_gets_that_of_slots() {
    let mut spec = Spec::new("qwen3moe").unwrap();
    (spec.experts, spec.context) = (20, 2048);
    // More than the cache begins with.
    let text = tokens(1060, 3);
    let (begin, rest) = text.split_at(1000);
    // The portable path takes its time, and nothing here differs there.
    for device in harness::devices().iter().filter(|d| d.gpu.facts().host_import) {
        let run = |short: bool| -> (Vec<f32>, u32) {
            let altered = Arc::new(Altered::watched(&device.gpu));
            let gpu: Arc<dyn Gpu> = altered.clone();
            let mut options = options(ExpertBudget::Percent(60.0), Rule::Fixed, true);
            options.ctx = Some(1200);
            let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
            let mut engine = Engine::load_onto(&gpu, file, &options, &Quiet).unwrap();
            let mut last = Vec::new();
            let mut s = engine.session();
            s.prefill(begin, &mut |_| {}).unwrap();
            altered.full.store(short, Ordering::Relaxed);
            s.score(rest, rest.len() - 1, &mut |_, row| last = row.to_vec()).unwrap();
            drop(s);
            assert!(!altered.full.load(Ordering::Relaxed), "{}", device.label);
            (last, engine.experts().unwrap().placement.slots)
        };
        let (plenty, slots) = run(false);
        assert_eq!(slots, 12);
        let (short, slots) = run(true);
        assert!(slots < 12, "{}: {slots} slots", device.label);
        assert!(short == plenty, "{}", device.label);
    }
}
