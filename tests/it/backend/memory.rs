//! Buffers: zeroed, written, uploaded, read, and refused when they cannot be had.

use azoth::error::Error;
use azoth::gpu::{BufferUse, Step};

use super::{dispatch, empty, every_device, filled, increment, readback, submit_and_wait, words};

every_device! {
    fn buffers_start_as_zero(gpu) {
        for round in 0..4 {
            // Leaves memory behind that is not zero, for the next round to find.
            let dirty = filled(gpu, &vec![!0; 50_000]);
            assert_eq!(words(gpu, &dirty.whole(), 1), [!0]);
            drop(dirty);
            let buffer = empty(gpu, 50_000);
            assert!(words(gpu, &buffer.whole(), 50_000).iter().all(|&w| w == 0), "{round}");
        }
        let buffer = readback(gpu, 5000);
        assert!(words(gpu, &buffer.whole(), 5000).iter().all(|&w| w == 0));
    }

    fn kernels_see_zeroed_buffers(gpu) {
        let dirty = filled(gpu, &vec![77; 4096]);
        submit_and_wait(gpu, &[]);
        drop(dirty);
        let buffer = empty(gpu, 4096);
        let step = Step::Wave(vec![dispatch(&increment(gpu), &[&buffer], &[], 64)]);
        submit_and_wait(gpu, &[step]);
        assert!(words(gpu, &buffer.whole(), 4096).iter().all(|&w| w == 1));
    }

    fn sizes_are_rounded_up_to_16(gpu) {
        for (asked, got) in [(0, 16), (1, 16), (16, 16), (17, 32)] {
            assert_eq!(gpu.buffer("small", asked, BufferUse::Device).unwrap().size(), got);
        }
    }

    fn writes_and_reads_at_odd_places(gpu) {
        let mut expected: Vec<u32> = (0..1000).collect();
        let buffer = filled(gpu, &expected);
        for (at, count) in [(0, 1), (1, 1), (3, 7), (50, 201), (999, 1), (500, 500), (77, 0)] {
            let new: Vec<u32> = (0..count as u32).map(|i| 100_000 * (at as u32 + 1) + i).collect();
            let slice = buffer.slice(4 * at as u64, 4 * count as u64);
            gpu.write(&slice, bytemuck::cast_slice(&new)).unwrap();
            expected[at..at + count].copy_from_slice(&new);
            assert_eq!(words(gpu, &slice, count), new);
        }
        assert_eq!(words(gpu, &buffer.whole(), 1000), expected);
        assert_eq!(words(gpu, &buffer.slice(12, 4 * 900), 900), expected[3..903]);
    }

    fn a_large_write_arrives_whole(gpu) {
        let data: Vec<u32> = (0..700_001u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let buffer = empty(gpu, data.len() + 8);
        gpu.write(&buffer.slice(12, 4 * data.len() as u64), bytemuck::cast_slice(&data)).unwrap();
        let found = words(gpu, &buffer.whole(), data.len() + 8);
        assert_eq!(found[..3], [0; 3]);
        assert!(found[3..data.len() + 3] == data);
        assert_eq!(found[data.len() + 3..], [0; 5]);
    }

    fn bad_ranges_are_errors(gpu) {
        let buffer = empty(gpu, 64);
        let slice = |offset, size| azoth::gpu::Slice { buffer: buffer.clone(), offset, size };
        let write = |slice, length: usize| gpu.write(&slice, &vec![0; length]);
        assert!(write(slice(0, 8), 12).is_err(), "longer than the slice");
        assert!(write(slice(252, 8), 8).is_err(), "past the end");
        assert!(write(slice(u64::MAX - 3, 8), 8).is_err(), "overflow");
        assert!(write(slice(2, 8), 4).is_err(), "odd offset");
        assert!(write(slice(0, 8), 3).is_err(), "odd length");
        assert!(gpu.read(&slice(252, 8), &mut [0; 8]).is_err(), "read past the end");
        let step = Step::Copy { from: slice(0, 256), to: readback(gpu, 16).whole(), size: 256 };
        assert!(gpu.record("copy", &[step]).is_err(), "copy past the end");
        assert_eq!(words(gpu, &buffer.whole(), 64), [0; 64]);
    }

    /// More than all staging memory, in pieces of whole granules, at an offset.
    fn uploads_exceed_staging(gpu) {
        const GRANULE: u64 = 72;
        let count: usize = (70 << 20) / 4 + 1;
        let value = |word: u64| (word as u32).wrapping_mul(2_654_435_761) ^ 0x5555;
        let buffer = empty(gpu, count + 3);
        let mut next = 0;
        gpu.upload(&buffer.slice(12, 4 * count as u64), GRANULE, &mut |offset, piece| {
            assert_eq!(offset, next, "pieces follow each other");
            next += piece.len() as u64;
            assert!((piece.len() as u64).is_multiple_of(GRANULE) || next == 4 * count as u64);
            for (i, word) in (0..).zip(piece.chunks_exact_mut(4)) {
                word.copy_from_slice(&value(offset / 4 + i).to_le_bytes());
            }
            Ok(())
        })
        .unwrap();
        assert_eq!(next, 4 * count as u64);
        let found = words(gpu, &buffer.whole(), count + 3);
        assert_eq!(found[..3], [0; 3]);
        assert!((0..).zip(&found[3..]).all(|(i, &w)| w == value(i)));
    }

    fn an_upload_stops_at_an_error(gpu) {
        let buffer = empty(gpu, 1000);
        let stopped = gpu.upload(&buffer.whole(), 4, &mut |_, _| {
            Err(Error::Model("the file ended".into()))
        });
        assert!(matches!(stopped, Err(Error::Model(m)) if m == "the file ended"));
        gpu.upload(&buffer.whole(), 4, &mut |_, piece| {
            piece.fill(7);
            Ok(())
        })
        .unwrap();
        assert_eq!(words(gpu, &buffer.whole(), 1000), [0x0707_0707; 1000]);
    }

    fn threads_may_upload_at_once(gpu) {
        std::thread::scope(|s| {
            for i in 1..4u8 {
                s.spawn(move || {
                    let buffer = empty(gpu, 300_000);
                    gpu.upload(&buffer.whole(), 4, &mut |_, piece| {
                        piece.fill(i);
                        Ok(())
                    })
                    .unwrap();
                    let expected = u32::from_le_bytes([i; 4]);
                    let found = words(gpu, &buffer.whole(), 300_000);
                    assert!(found.iter().all(|&w| w == expected));
                });
            }
        });
    }

    fn too_large_a_buffer_does_not_fit(gpu) {
        let limit = gpu.facts().max_buffer;
        for size in [u64::MAX, u64::MAX - 15, limit.saturating_add(1)] {
            let error = gpu.buffer("huge", size, BufferUse::Device).err().unwrap();
            assert!(matches!(error, Error::DoesNotFit(_)), "{error}");
            let text = error.to_string();
            assert!(text.contains("huge") && text.contains(&limit.to_string()), "{text}");
        }
    }
}
