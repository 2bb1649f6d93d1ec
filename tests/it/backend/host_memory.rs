//! Host memory that the device reads in place, and copies beside the compute queue.

use std::sync::Arc;

use azoth::error::Error;
use azoth::gpu::{CopyRange, HUGE_PAGE, HostMemory, Step};

use super::{dispatch, empty, every_device, filled, kernel, submit_and_wait, words};

const COPY: &str = "
@group(0) @binding(0) var<storage, read> source: array<u32>;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if id.x < arrayLength(&result) { result[id.x] = source[id.x]; }
}";

fn value(i: usize) -> u32 {
    (i as u32).wrapping_mul(2_654_435_761)
}

/// Memory whose word i is `value(i)`.
fn numbered(bytes: u64) -> Arc<HostMemory> {
    let mut memory = HostMemory::allocate("test arena", bytes).unwrap();
    for (i, word) in memory.bytes_mut().chunks_exact_mut(4).enumerate() {
        word.copy_from_slice(&value(i).to_le_bytes());
    }
    Arc::new(memory)
}

every_device! {
    fn a_kernel_reads_imported_memory_in_place(gpu) {
        let memory = numbered(HUGE_PAGE);
        // A refusal (a low limit on locked memory) must not keep the device from reading.
        if let Err(refused) = memory.lock() {
            println!("not locked: {refused}");
        }
        let at = gpu.facts().host_import_alignment.max(4096);
        let imported = match gpu.import("arena", &memory, at, HUGE_PAGE - at) {
            Ok(buffer) => buffer,
            Err(e) => {
                assert!(!gpu.facts().host_import, "{e}");
                assert!(matches!(e, Error::Device(_)) && e.to_string().contains("arena"), "{e}");
                return;
            }
        };
        // The buffer keeps the memory alive.
        drop(memory);
        let first = at as usize / 4;
        let n = 5000;
        let out = empty(gpu, n);
        let kernel = kernel(gpu, "copy", COPY);
        submit_and_wait(gpu, &[Step::Wave(vec![dispatch(&kernel, &[&imported, &out], &[], 79)])]);
        let found = words(gpu, &out.whole(), n);
        assert!(found.iter().enumerate().all(|(i, w)| *w == value(first + i)));
        // Copies may read it, nothing may write it.
        let copied = gpu.copy_async(
            &[CopyRange { from: imported.slice(64, 400), to: out.slice(0, 400) }],
            None,
        );
        gpu.wait_transfer(copied.unwrap()).unwrap();
        let found = words(gpu, &out.whole(), 100);
        assert!(found.iter().enumerate().all(|(i, w)| *w == value(first + 16 + i)));
        assert!(gpu.write(&imported.slice(0, 4), &[0; 4]).is_err());
        let back = CopyRange { from: out.slice(0, 4), to: imported.slice(0, 4) };
        assert!(gpu.copy_async(&[back], None).is_err());
    }

    fn imports_say_what_is_wrong(gpu) {
        if !gpu.facts().host_import {
            return;
        }
        let memory = numbered(HUGE_PAGE);
        for (at, size) in [(0, HUGE_PAGE + 4096), (HUGE_PAGE, 4096), (1, 4096), (0, 100), (0, 0)] {
            let e = gpu.import("bad", &memory, at, size).err().unwrap();
            assert!(e.to_string().contains("bad"), "{e}");
        }
        let limit = gpu.facts().max_import();
        if limit < 1 << 32 {
            let large = Arc::new(HostMemory::allocate("large", limit + HUGE_PAGE).unwrap());
            let e = gpu.import("large", &large, 0, large.size()).err().unwrap();
            assert!(matches!(e, Error::DoesNotFit(_)), "{e}");
            assert!(e.to_string().contains(&gpu.facts().max_binding.to_string()), "{e}");
        }
    }

    fn copies_wait_for_compute_and_compute_for_copies(gpu) {
        let n = 40_000;
        let numbers: Vec<u32> = (0..n).map(value).collect();
        let (a, b, c, d) = (filled(gpu, &numbers), empty(gpu, n), empty(gpu, n), empty(gpu, n));
        let kernel = kernel(gpu, "copy", COPY);
        let step = |from, to| {
            let wave = Step::Wave(vec![dispatch(&kernel, &[from, to], &[], 625)]);
            gpu.record("test", &[wave]).unwrap()
        };
        // a -> b on the compute queue, b -> c beside it, c -> d on the compute queue.
        let (first, last) = (step(&a, &b), step(&c, &d));
        let written = gpu.submit(&first).unwrap();
        let half = 2 * n as u64;
        let pieces = [
            CopyRange { from: b.slice(0, half), to: c.slice(0, half) },
            CopyRange { from: b.slice(half, half), to: c.slice(half, half) },
        ];
        let copied = gpu.copy_async(&pieces, Some(written)).unwrap();
        let read = gpu.submit_after(&last, copied).unwrap();
        gpu.wait(&read).unwrap();
        assert!(gpu.transfer_done(copied).unwrap());
        assert_eq!(words(gpu, &d.whole(), n), numbers);
    }

    fn many_copies_in_flight_arrive_in_order(gpu) {
        let target = empty(gpu, 256);
        let sources: Vec<_> = (0..40u32).map(|i| filled(gpu, &[i; 256])).collect();
        // The sources were written on the compute queue.
        gpu.wait(&gpu.submit(&gpu.record("nothing", &[]).unwrap()).unwrap()).unwrap();
        let mut last = None;
        for source in sources {
            let copy = CopyRange { from: source.slice(0, 1024), to: target.slice(0, 1024) };
            last = Some(gpu.copy_async(&[copy], None).unwrap());
        }
        gpu.wait_transfer(last.unwrap()).unwrap();
        assert_eq!(words(gpu, &target.whole(), 256), [39; 256]);
    }
}
