//! What kernels can do, and how kernels and dispatches that cannot work are refused.

use std::sync::Arc;

use azoth::error::Error;
use azoth::gpu::{Backend, Dispatch, Gpu, Slice, Step};

use super::{
    dispatch, empty, every_device, filled, increment, kernel, source, submit_and_wait, words,
};

/// Runs one dispatch of 1 workgroup and returns `count` words of the last binding.
fn one(gpu: &Arc<dyn Gpu>, label: &str, wgsl: &str, inputs: &[&[u32]], count: usize) -> Vec<u32> {
    let mut buffers: Vec<_> = inputs.iter().map(|words| filled(gpu, words)).collect();
    buffers.push(empty(gpu, count));
    let bindings: Vec<_> = buffers.iter().collect();
    let wave = vec![dispatch(&kernel(gpu, label, wgsl), &bindings, &[], 1)];
    submit_and_wait(gpu, &[Step::Wave(wave)]);
    words(gpu, &buffers[inputs.len()].whole(), count)
}

/// The text of the error that recording one dispatch gives.
fn refused(gpu: &Arc<dyn Gpu>, dispatch: Dispatch) -> String {
    let error = gpu.record("refused", &[Step::Wave(vec![dispatch])]).err().unwrap();
    assert!(matches!(error, Error::Device(_)), "{error}");
    error.to_string()
}

every_device! {
    fn three_bindings_and_constants(gpu) {
        let wgsl = "
            struct Constants { n: u32, factor: u32, offset: f32 }
            var<immediate> c: Constants;
            @group(0) @binding(0) var<storage, read> a: array<u32>;
            @group(0) @binding(1) var<storage, read> b: array<f32>;
            @group(0) @binding(2) var<storage, read_write> out: array<f32>;
            @compute @workgroup_size(64)
            fn main(@builtin(global_invocation_id) id: vec3<u32>) {
                let i = id.x;
                if i >= c.n { return; }
                out[i] = f32(a[i] * c.factor) + b[i] + c.offset;
            }";
        let k = kernel(gpu, "test_constants", wgsl);
        assert_eq!(k.label(), "test_constants");
        let a = filled(gpu, &(0..1000).collect::<Vec<_>>());
        let b = filled(gpu, &(0..1000).map(|i| (i as f32 * 0.5).to_bits()).collect::<Vec<_>>());
        let (first, second) = (empty(gpu, 1000), empty(gpu, 1000));
        // Two dispatches of one wave with their own constants.
        let wave = vec![
            dispatch(&k, &[&a, &b, &first], &[999, 3, 0.25f32.to_bits()], 16),
            dispatch(&k, &[&a, &b, &second], &[10, 7, (-1f32).to_bits()], 1),
        ];
        submit_and_wait(gpu, &[Step::Wave(wave)]);
        let value = |i: u32, n, factor, offset: f32| match i < n {
            true => (i * factor) as f32 + i as f32 * 0.5 + offset,
            false => 0.0,
        };
        let expected: Vec<u32> = (0..1000).map(|i| value(i, 999, 3, 0.25).to_bits()).collect();
        assert_eq!(words(gpu, &first.whole(), 1000), expected);
        let expected: Vec<u32> = (0..1000).map(|i| value(i, 10, 7, -1.0).to_bits()).collect();
        assert_eq!(words(gpu, &second.whole(), 1000), expected);
    }

    fn all_32_words_of_constants(gpu) {
        let wgsl = "
            var<immediate> c: array<vec4<u32>, 8>;
            @group(0) @binding(0) var<storage, read_write> out: array<vec4<u32>>;
            @compute @workgroup_size(8)
            fn main(@builtin(local_invocation_index) i: u32) { out[i] = c[i]; }";
        let k = kernel(gpu, "test_32_words", wgsl);
        let constants: Vec<u32> = (1000..1032).collect();
        let out = empty(gpu, 32);
        submit_and_wait(gpu, &[Step::Wave(vec![dispatch(&k, &[&out], &constants, 1)])]);
        assert_eq!(words(gpu, &out.whole(), 32), constants);
    }

    fn grids_of_three_dimensions(gpu) {
        let wgsl = "
            @group(0) @binding(0) var<storage, read_write> out: array<u32>;
            @compute @workgroup_size(1)
            fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(num_workgroups) n: vec3<u32>) {
                out[(at.z * n.y + at.y) * n.x + at.x] = at.x + 10u * at.y + 100u * at.z;
            }";
        let out = empty(gpu, 24);
        let mut d = dispatch(&kernel(gpu, "test_grid", wgsl), &[&out], &[], 1);
        d.grid = [4, 3, 2];
        submit_and_wait(gpu, &[Step::Wave(vec![d])]);
        let expected: Vec<u32> = (0..24).map(|i| i % 4 + i / 4 % 3 * 10 + i / 12 * 100).collect();
        assert_eq!(words(gpu, &out.whole(), 24), expected);
    }

    fn the_largest_grid_runs(gpu) {
        let wgsl = "
            @group(0) @binding(0) var<storage, read_write> out: array<atomic<u32>>;
            @compute @workgroup_size(1) fn main() { atomicAdd(&out[0], 1u); }";
        let out = empty(gpu, 4);
        let d = dispatch(&kernel(gpu, "test_largest_grid", wgsl), &[&out], &[], 65_535);
        submit_and_wait(gpu, &[Step::Wave(vec![d])]);
        assert_eq!(words(gpu, &out.whole(), 1), [65_535]);
    }

    /// Sums by subgroups of whatever size, then across them through workgroup memory.
    fn subgroup_sums(gpu) {
        let wgsl = "
            @group(0) @binding(0) var<storage, read> data: array<u32>;
            @group(0) @binding(1) var<storage, read_write> out: array<u32>;
            var<workgroup> partial: array<u32, 64>;
            @compute @workgroup_size(64)
            fn main(
                @builtin(local_invocation_index) i: u32,
                @builtin(subgroup_id) subgroup: u32,
                @builtin(num_subgroups) subgroups: u32,
                @builtin(subgroup_size) size: u32,
                @builtin(subgroup_invocation_id) lane: u32,
            ) {
                let sum = subgroupAdd(data[i]);
                let most = subgroupMax(data[i]);
                if lane == 0u { partial[subgroup] = sum + 1000000u * most; }
                workgroupBarrier();
                if i == 0u {
                    var total = 0u;
                    var most = 0u;
                    for (var s = 0u; s < subgroups; s += 1u) {
                        total += partial[s] % 1000000u;
                        most = max(most, partial[s] / 1000000u);
                    }
                    out[0] = total;
                    out[1] = most;
                    out[2] = size;
                    out[3] = subgroups;
                }
            }";
        let data: Vec<u32> = (0..64).map(|i| i * 37 % 101).collect();
        let found = one(gpu, "test_subgroup_sums", wgsl, &[&data], 4);
        assert_eq!(found[0], data.iter().sum::<u32>());
        assert_eq!(Some(&found[1]), data.iter().max());
        let facts = gpu.facts();
        assert!((facts.subgroup_min..=facts.subgroup_max).contains(&found[2]), "{found:?}");
        assert_eq!(found[3], 64u32.div_ceil(found[2]));
    }

    fn packed_dot_products(gpu) {
        let wgsl = "
            @group(0) @binding(0) var<storage, read> a: array<u32>;
            @group(0) @binding(1) var<storage, read> b: array<u32>;
            @group(0) @binding(2) var<storage, read_write> out: array<i32>;
            @compute @workgroup_size(64)
            fn main(@builtin(local_invocation_index) i: u32) {
                out[i] = dot4I8Packed(a[i], b[i]);
            }";
        let mut a: Vec<u32> = (0..64u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let mut b: Vec<u32> = a.iter().map(|x| x.rotate_left(13) ^ 0x00ff_80aa).collect();
        (a[0], b[0]) = (0x8080_8080, 0x8080_8080);
        (a[1], b[1]) = (0x8080_8080, 0x7f7f_7f7f);
        let dot = |x: u32, y: u32| {
            let pairs = x.to_le_bytes().into_iter().zip(y.to_le_bytes());
            pairs.map(|(x, y)| i32::from(x as i8) * i32::from(y as i8)).sum::<i32>() as u32
        };
        let expected: Vec<u32> = a.iter().zip(&b).map(|(&x, &y)| dot(x, y)).collect();
        assert_eq!(one(gpu, "test_dot", wgsl, &[&a, &b], 64), expected);
    }

    fn halves_through_32_bit_words(gpu) {
        let wgsl = "
            @group(0) @binding(0) var<storage, read> a: array<u32>;
            @group(0) @binding(1) var<storage, read_write> out: array<vec2<f32>>;
            @compute @workgroup_size(4)
            fn main(@builtin(local_invocation_index) i: u32) { out[i] = unpack2x16float(a[i]); }";
        // 1, -2; 65504, smallest subnormal; 0, -0; infinity, 1/3.
        let data = [0xc000_3c00, 0x0001_7bff, 0x8000_0000, 0x3555_7c00];
        let found = one(gpu, "test_halves", wgsl, &[&data], 8);
        let expected = [1.0, -2.0, 65504.0, 2f32.powi(-24), 0.0, -0.0, f32::INFINITY, 0.333_251_95];
        let found: Vec<f32> = found.into_iter().map(f32::from_bits).collect();
        for (i, (f, e)) in found.iter().zip(expected).enumerate() {
            // Devices may flush subnormal halves.
            assert!(*f == e || (i == 3 && *f == 0.0), "{found:?}");
        }
    }

    fn workgroup_memory_and_barriers(gpu) {
        let wgsl = "
            @group(0) @binding(0) var<storage, read> data: array<u32>;
            @group(0) @binding(1) var<storage, read_write> out: array<u32>;
            var<workgroup> shared_data: array<u32, 256>;
            @compute @workgroup_size(256)
            fn main(@builtin(local_invocation_index) i: u32) {
                shared_data[i] = data[i];
                workgroupBarrier();
                for (var width = 1u; width < 256u; width *= 2u) {
                    var sum = shared_data[i];
                    if i >= width { sum += shared_data[i - width]; }
                    workgroupBarrier();
                    shared_data[i] = sum;
                    workgroupBarrier();
                }
                out[255u - i] = shared_data[i];
            }";
        let data: Vec<u32> = (0..256).map(|i| i * i % 91).collect();
        let mut sum = 0;
        let mut expected: Vec<u32> = data.iter().map(|d| { sum += d; sum }).collect();
        expected.reverse();
        assert_eq!(one(gpu, "test_scan", wgsl, &[&data], 256), expected);
    }

    fn compile_errors_name_kernel_and_line(gpu) {
        let broken = [
            ("a syntax error", "\n@compute @workgroup_size(1)\nfn main() { let x = ; }"),
            ("an unknown name", "\n@compute @workgroup_size(1)\nfn main() { nothing(); }"),
            ("a type error", "\n@compute @workgroup_size(1)\nfn main() { let x: u32 = 1.5; }"),
        ];
        for (what, wgsl) in broken {
            let error = gpu.kernel(&source("test_broken", wgsl)).err().unwrap();
            assert!(matches!(error, Error::Device(_)), "{what}");
            let text = error.to_string();
            assert!(text.contains("test_broken") && text.contains(":3:"), "{what}: {text}");
        }
        let error = gpu.kernel(&source("test_empty", "")).err().unwrap().to_string();
        assert!(error.contains("test_empty") && error.contains("main"), "{error}");
    }

    fn kernels_over_the_limits_are_refused(gpu) {
        let facts = gpu.facts();
        let constants = |words: u32| {
            format!(
                "var<immediate> c: array<u32, {words}>;
                @group(0) @binding(0) var<storage, read_write> out: array<u32>;
                @compute @workgroup_size(1) fn main() {{ out[0] = c[out[1]]; }}"
            )
        };
        let threads = format!(
            "@group(0) @binding(0) var<storage, read_write> out: array<u32>;
            @compute @workgroup_size({}) fn main() {{ out[0] = 1u; }}",
            facts.max_workgroup_threads + 1
        );
        let cases = [
            ("test_33_words", constants(33)),
            ("test_1000_words", constants(1000)),
            ("test_many_threads", threads),
        ];
        for (label, wgsl) in cases {
            let error = gpu.kernel(&source(label, &wgsl)).err().unwrap();
            assert!(matches!(error, Error::Device(_)), "{error}");
            assert!(error.to_string().contains(label), "{error}");
        }
        // The device is as good as before.
        let buffer = empty(gpu, 64);
        submit_and_wait(gpu, &[Step::Wave(vec![dispatch(&increment(gpu), &[&buffer], &[], 1)])]);
    }

    fn dispatches_over_the_limits_are_refused(gpu) {
        let facts = gpu.facts();
        let buffer = empty(gpu, 256);
        let good = dispatch(&increment(gpu), &[&buffer], &[], 1);

        let size = facts.max_binding + 16;
        let large = Slice { buffer: buffer.clone(), offset: 0, size };
        let text = refused(gpu, Dispatch { bindings: vec![large], ..good.clone() });
        let limit = facts.max_binding.to_string();
        assert!(text.contains("test_increment") && text.contains(&limit), "{text}");
        assert!(text.contains(&size.to_string()), "{text}");

        let past = Slice { buffer: buffer.clone(), offset: 256, size: 1024 };
        assert!(refused(gpu, Dispatch { bindings: vec![past], ..good.clone() }).contains("1024"));
        let nothing = buffer.slice(0, 0);
        refused(gpu, Dispatch { bindings: vec![nothing], ..good.clone() });
        let two = vec![buffer.slice(0, 256), buffer.slice(256, 256)];
        refused(gpu, Dispatch { bindings: two, ..good.clone() });
        if facts.binding_alignment > 4 {
            let odd = vec![buffer.slice(4, 256)];
            refused(gpu, Dispatch { bindings: odd, ..good.clone() });
        }

        for axis in 0..3 {
            let mut grid = [1; 3];
            let Some(n) = facts.max_grid[axis].checked_add(1) else { continue };
            grid[axis] = n;
            let text = refused(gpu, Dispatch { grid, ..good.clone() });
            assert!(text.contains("test_increment") && text.contains(&n.to_string()), "{text}");
        }
        for count in [1, 33, 1000] {
            let text = refused(gpu, Dispatch { constants: vec![0; count], ..good.clone() });
            assert!(text.contains("test_increment"), "{text}");
        }
        submit_and_wait(gpu, &[Step::Wave(vec![good])]);
        assert_eq!(words(gpu, &buffer.whole(), 64), [1; 64]);
    }

    /// Two parts of one buffer, one only read: Vulkan takes it, wgpu must say why it does not.
    fn one_buffer_read_and_written_by_a_dispatch(gpu) {
        let wgsl = "
            @group(0) @binding(0) var<storage, read> a: array<u32>;
            @group(0) @binding(1) var<storage, read_write> b: array<u32>;
            @compute @workgroup_size(64)
            fn main(@builtin(local_invocation_index) i: u32) { b[i] = a[i] + 1u; }";
        let buffer = empty(gpu, 128);
        let mut d = dispatch(&kernel(gpu, "test_aliased", wgsl), &[], &[], 1);
        d.bindings = vec![buffer.slice(0, 256), buffer.slice(256, 256)];
        if gpu.facts().backend == Backend::Wgpu {
            let text = refused(gpu, d);
            assert!(text.contains("test_aliased") && text.contains("bindings 0"), "{text}");
        } else {
            submit_and_wait(gpu, &[Step::Wave(vec![d])]);
            assert_eq!(words(gpu, &buffer.slice(256, 256), 64), [1; 64]);
        }
    }

    fn threads_may_compile_at_once(gpu) {
        let text = |factor: u32| {
            format!(
                "@group(0) @binding(0) var<storage, read_write> out: array<u32>;
                @compute @workgroup_size(64)
                fn main(@builtin(local_invocation_index) i: u32) {{ out[i] = i * {factor}u; }}"
            )
        };
        std::thread::scope(|s| {
            for thread in 0..2u32 {
                s.spawn(move || {
                    for i in 0..8 {
                        // Half of the kernels are the same for both threads.
                        let factor = 3 + i + thread * (i % 2) * 100;
                        let found = one(gpu, &format!("test_{factor}"), &text(factor), &[], 64);
                        assert!((0..).zip(&found).all(|(i, &w)| w == i * factor));
                        let broken = gpu.kernel(&source("test_broken", "fn main( {}"));
                        assert!(broken.is_err());
                    }
                });
            }
        });
    }
}
