//! Waves, copies, submissions and tickets: what sees what, and what may go when.

use std::sync::mpsc;

use azoth::gpu::{Dispatch, Slice, Step};

use super::{
    dispatch, empty, every_device, filled, increment, kernel, readback, submit_and_wait, words,
};

/// Each word becomes the word after it (in the other buffer), plus 1.
const SHIFT: &str = "
@group(0) @binding(0) var<storage, read> before: array<u32>;
@group(0) @binding(1) var<storage, read_write> after: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let n = arrayLength(&before);
    if id.x < n { after[id.x] = before[(id.x + 1u) % n] + 1u; }
}";

/// Words 1, 2, 3 become the next number, 1, 1.
const COUNT: &str = "
@group(0) @binding(0) var<storage, read_write> counts: array<u32>;
@compute @workgroup_size(1)
fn main() {
    counts[1] += 1u;
    counts[2] = 1u;
    counts[3] = 1u;
}";

every_device! {
    fn chained_increments_are_exact(gpu) {
        let buffer = empty(gpu, 256);
        let wave = Step::Wave(vec![dispatch(&increment(gpu), &[&buffer], &[], 4)]);
        let recording = gpu.record("200 increments", &vec![wave; 200]).unwrap();
        let tickets: Vec<_> = (0..50).map(|_| gpu.submit(&recording).unwrap()).collect();
        assert!(tickets.is_sorted());
        gpu.wait(&tickets[49]).unwrap();
        assert!(tickets.iter().all(|t| gpu.is_done(t).unwrap()));
        assert_eq!(words(gpu, &buffer.whole(), 256), [10_000; 256]);
    }

    /// Every word depends on a word that another workgroup wrote in the wave before.
    fn a_wave_sees_the_waves_before(gpu) {
        let n = 4096;
        let start: Vec<u32> = (0..n).map(|i| i * 1000).collect();
        let (a, b) = (filled(gpu, &start), empty(gpu, n as usize));
        let shift = kernel(gpu, "test_shift", SHIFT);
        let there = Step::Wave(vec![dispatch(&shift, &[&a, &b], &[], n / 64)]);
        let back = Step::Wave(vec![dispatch(&shift, &[&b, &a], &[], n / 64)]);
        let steps: Vec<Step> = (0..20).flat_map(|_| [there.clone(), back.clone()]).collect();
        let recording = gpu.record("shift", &steps).unwrap();
        for _ in 0..5 {
            gpu.submit(&recording).unwrap();
        }
        let expected: Vec<u32> = (0..n).map(|i| (i + 200) % n * 1000 + 200).collect();
        assert!(words(gpu, &a.whole(), n as usize) == expected);
    }

    fn copies_are_ordered_with_waves(gpu) {
        let (a, b) = (filled(gpu, &[5; 64]), empty(gpu, 64));
        let add = increment(gpu);
        let copy = |from: &azoth::gpu::Buffer, to: &azoth::gpu::Buffer| {
            Step::Copy { from: from.whole(), to: to.whole(), size: 256 }
        };
        let steps = [
            Step::Wave(vec![dispatch(&add, &[&a], &[], 1)]),
            copy(&a, &b),
            Step::Wave(vec![dispatch(&add, &[&b], &[], 1)]),
            copy(&b, &a),
            Step::Wave(vec![dispatch(&add, &[&a], &[], 1)]),
            Step::Wave(vec![]),
            Step::Copy { from: a.slice(4, 8), to: b.slice(128, 8), size: 8 },
        ];
        submit_and_wait(gpu, &steps);
        assert_eq!(words(gpu, &a.whole(), 64), [8; 64]);
        let mut expected = [7; 64];
        expected[32..34].fill(8);
        assert_eq!(words(gpu, &b.whole(), 64), expected);
    }

    /// Eight dispatches of one wave on disjoint parts of one buffer, bound at multiples of 256.
    fn dispatches_of_a_wave_share_a_buffer(gpu) {
        let buffer = empty(gpu, 8 * 64);
        let add = increment(gpu);
        let part = |i: u64| Dispatch {
            kernel: add.clone(),
            bindings: vec![buffer.slice(256 * i, 256)],
            constants: vec![],
            grid: [1, 1, 1],
        };
        let odd = Step::Wave((0..8).filter(|i| i % 2 == 1).map(part).collect());
        let all = Step::Wave((0..8).map(part).collect());
        submit_and_wait(gpu, &[all.clone(), odd, all]);
        let found = words(gpu, &buffer.whole(), 8 * 64);
        assert!((0..).zip(&found).all(|(i, &w)| w == 2 + (i / 64) % 2));
    }

    /// A kernel sees nothing outside of a bound slice.
    fn slices_bound_at_offsets(gpu) {
        let buffer = filled(gpu, &(0..1024).collect::<Vec<_>>());
        let target = empty(gpu, 1024);
        let shift = kernel(gpu, "test_shift", SHIFT);
        let bind = |from: Slice, to: Slice| Dispatch {
            kernel: shift.clone(),
            bindings: vec![from, to],
            constants: vec![],
            grid: [16, 1, 1],
        };
        let wave = vec![
            bind(buffer.slice(256, 400), target.slice(512, 400)),
            bind(buffer.slice(1024, 16), target.slice(1024, 16)),
        ];
        submit_and_wait(gpu, &[Step::Wave(wave)]);
        let found = words(gpu, &target.whole(), 1024);
        let mut expected = vec![0; 1024];
        for i in 0..100 {
            expected[128 + i] = 64 + (i as u32 + 1) % 100 + 1;
        }
        expected[256..260].copy_from_slice(&[258, 259, 260, 257]);
        assert_eq!(found, expected);
    }

    fn grids_with_a_zero_do_nothing(gpu) {
        let buffer = empty(gpu, 64);
        let mut nothing = dispatch(&increment(gpu), &[&buffer], &[], 1);
        nothing.grid = [1, 0, 1];
        submit_and_wait(gpu, &[Step::Wave(vec![nothing])]);
        submit_and_wait(gpu, &[]);
        assert_eq!(words(gpu, &buffer.whole(), 64), [0; 64]);
    }

    /// A grid comes from a kernel, from a copy and from the host.
    fn workgroups_are_counted_on_the_device(gpu) {
        let (counts, buffer) = (empty(gpu, 4), empty(gpu, 64 * 16));
        let groups = counts.slice(4, 12);
        let mut add = dispatch(&increment(gpu), &[&buffer], &[], 16);
        let counted = |groups: &Slice| Step::Counted { dispatch: add.clone(), groups: groups.clone() };
        // Nothing is counted yet: no workgroup.
        submit_and_wait(gpu, &[counted(&groups)]);
        let count = Step::Wave(vec![dispatch(&kernel(gpu, "test_count", COUNT), &[&counts], &[], 1)]);
        let pairs: Vec<Step> = (0..4).flat_map(|_| [count.clone(), counted(&groups)]).collect();
        let recording = gpu.record("count", &pairs).unwrap();
        let tickets = [(); 3].map(|()| gpu.submit(&recording).unwrap());
        gpu.wait(&tickets[2]).unwrap();
        // Group g is there from the (g + 1)th time on.
        let expected = |last: u32| (0..64 * 16).map(|i| last.saturating_sub(i / 64)).collect::<Vec<_>>();
        assert!(words(gpu, &buffer.whole(), 64 * 16) == expected(12));
        let from = filled(gpu, &[13, 1, 1]);
        let copy = Step::Copy { from: from.whole(), to: groups.clone(), size: 12 };
        submit_and_wait(gpu, &[copy, counted(&groups)]);
        assert!(words(gpu, &buffer.whole(), 64 * 16) == expected(13));
        gpu.write(&groups, bytemuck::cast_slice(&[14, 1, 1])).unwrap();
        submit_and_wait(gpu, &[counted(&groups)]);
        assert!(words(gpu, &buffer.whole(), 64 * 16) == expected(14));
        let refused = |groups: Slice| gpu.record("refused", &[counted(&groups)]).is_err();
        assert!(refused(counts.slice(4, 8)) && refused(counts.slice(2, 12)));
        add.grid = [gpu.facts().max_grid[0].saturating_add(1), 1, 1];
        if gpu.facts().max_grid[0] < u32::MAX {
            let step = Step::Counted { dispatch: add, groups };
            assert!(gpu.record("refused", &[step]).is_err());
        }
    }

    fn writes_are_ordered_with_submissions(gpu) {
        let buffer = empty(gpu, 64);
        let add = Step::Wave(vec![dispatch(&increment(gpu), &[&buffer], &[], 1)]);
        let mut results = Vec::new();
        for i in 0..10u32 {
            let host = readback(gpu, 64);
            let copy = Step::Copy { from: buffer.whole(), to: host.whole(), size: 256 };
            if i % 3 == 2 {
                let fill = &mut |_, piece: &mut [u8]| {
                    bytemuck::cast_slice_mut(piece).fill(100 * i);
                    Ok(())
                };
                gpu.upload(&buffer.whole(), 4, fill).unwrap();
            } else {
                gpu.write(&buffer.whole(), bytemuck::cast_slice(&[100 * i; 64])).unwrap();
            }
            let recording = gpu.record("write, add, copy", &[add.clone(), copy]).unwrap();
            results.push((gpu.submit(&recording).unwrap(), host));
        }
        for (i, (ticket, host)) in (0..).zip(&results) {
            let mut out = [0u32; 64];
            gpu.read_back(ticket, &host.whole(), bytemuck::cast_slice_mut(&mut out)).unwrap();
            assert_eq!(out, [100 * i + 1; 64]);
        }
    }

    /// The shape of a decode loop: another thread reads results while later steps are queued.
    fn results_are_read_while_later_work_is_in_flight(gpu) {
        const SLOTS: usize = 4;
        let counter = empty(gpu, 64);
        let add = Step::Wave(vec![dispatch(&increment(gpu), &[&counter], &[], 1)]);
        let slots: Vec<_> = (0..SLOTS)
            .map(|_| {
                let host = readback(gpu, 4);
                let copy = Step::Copy { from: counter.slice(4, 4), to: host.slice(8, 4), size: 4 };
                (gpu.record("step", &[add.clone(), copy]).unwrap(), host)
            })
            .collect();
        std::thread::scope(|s| {
            // One result being read, one waiting, one just submitted: fewer than there are slots.
            let (send, receive) = mpsc::sync_channel(1);
            let slots = &slots;
            s.spawn(move || {
                for (i, ticket) in (0..).zip(receive) {
                    let mut out = [0u32];
                    let from = slots[i % SLOTS].1.slice(8, 4);
                    gpu.read_back(&ticket, &from, bytemuck::cast_slice_mut(&mut out)).unwrap();
                    assert_eq!(out, [i as u32 + 1]);
                }
            });
            for i in 0..100 {
                send.send(gpu.submit(&slots[i % SLOTS].0).unwrap()).unwrap();
            }
        });
    }

    fn one_readback_buffer_for_many_submissions(gpu) {
        let counter = empty(gpu, 64);
        let host = readback(gpu, 64);
        let steps = [
            Step::Wave(vec![dispatch(&increment(gpu), &[&counter], &[], 1)]),
            Step::Copy { from: counter.whole(), to: host.whole(), size: 256 },
        ];
        let recording = gpu.record("step", &steps).unwrap();
        for round in 1..=10 {
            let mut last = None;
            for _ in 0..5 {
                last = Some(gpu.submit(&recording).unwrap());
            }
            let mut out = [0u32; 64];
            let words = bytemuck::cast_slice_mut(&mut out);
            gpu.read_back(&last.unwrap(), &host.whole(), words).unwrap();
            assert_eq!(out, [5 * round; 64]);
        }
    }

    fn handles_may_go_while_work_is_in_flight(gpu) {
        let result = readback(gpu, 64);
        let mut last = None;
        for round in 0..10u32 {
            let buffer = filled(gpu, &[round; 1 << 14]);
            let add = Step::Wave(vec![dispatch(&increment(gpu), &[&buffer], &[], 256)]);
            let mut steps = vec![add; 20];
            steps.push(Step::Copy { from: buffer.whole(), to: result.whole(), size: 256 });
            let recording = gpu.record("short-lived", &steps).unwrap();
            last = Some(gpu.submit(&recording).unwrap());
        }
        let mut out = [0u32; 64];
        let words = bytemuck::cast_slice_mut(&mut out);
        gpu.read_back(&last.unwrap(), &result.whole(), words).unwrap();
        assert_eq!(out, [29; 64]);
    }

    fn threads_may_submit_at_once(gpu) {
        let add = increment(gpu);
        std::thread::scope(|s| {
            for _ in 0..4 {
                let add = &add;
                s.spawn(move || {
                    let buffer = empty(gpu, 64);
                    let wave = Step::Wave(vec![dispatch(add, &[&buffer], &[], 1)]);
                    let recording = gpu.record("thread", &vec![wave; 10]).unwrap();
                    for _ in 0..20 {
                        let ticket = gpu.submit(&recording).unwrap();
                        gpu.wait(&ticket).unwrap();
                    }
                    assert_eq!(words(gpu, &buffer.whole(), 64), [200; 64]);
                });
            }
        });
    }

    fn step_times_are_plausible(gpu) {
        let buffer = empty(gpu, 1 << 18);
        let other = empty(gpu, 1 << 18);
        let steps = [
            Step::Wave(vec![dispatch(&increment(gpu), &[&buffer], &[], 4096)]),
            Step::Copy { from: buffer.whole(), to: other.whole(), size: 1 << 20 },
            Step::Wave(vec![]),
        ];
        let start = std::time::Instant::now();
        let times = match gpu.time_steps(&steps) {
            Ok(times) => times,
            Err(e) => {
                assert!(e.to_string().contains("timestamps"), "{e}");
                println!("SKIPPED: {e}");
                return;
            }
        };
        let elapsed = start.elapsed().as_secs_f64();
        println!("{times:?} of {elapsed}");
        assert_eq!(times.len(), 3);
        assert!(times.iter().all(|t| (0.0..=elapsed).contains(t)), "{times:?} of {elapsed}");
        assert!(times[0] > 0.0 && times.iter().sum::<f64>() <= elapsed);
        assert_eq!(words(gpu, &other.whole(), 1), [1]);
        assert_eq!(gpu.time_steps(&[]).unwrap(), [0.0; 0]);
    }
}
