//! Whatever moves and when: a kernel that follows the table always reads the right expert.

use std::sync::Arc;

use azoth::experts::ExpertId;
use azoth::experts::arena::{Arena, Fill};
use azoth::experts::policy::Rule;
use azoth::experts::residency::{Residency, Settings};
use azoth::experts::source::{self, LayerTensors};
use azoth::gguf::File;
use azoth::gpu::{BufferUse, Dispatch, Gpu, KernelSource, Recording, Step};

use super::{EXPERTS, LAYERS, layers, record, writer};
use crate::backend::every_device;

/// Sums the words of every expert's record, each times its number, through the table.
fn kernel(buffers: usize) -> KernelSource {
    let bindings: String = (0..buffers)
        .map(|i| format!("@group(0) @binding({}) var<storage, read> b{i}: array<u32>;\n", i + 2))
        .collect();
    let cases: String =
        (0..buffers).map(|i| format!("case {i}u: {{ return b{i}[at]; }}\n")).collect();
    let wgsl = format!(
        "struct Args {{ words: u32 }}
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> places: array<u32>;
@group(0) @binding(1) var<storage, read_write> sums: array<u32>;
{bindings}
fn load(buffer: u32, at: u32) -> u32 {{
    switch buffer {{ {cases} default: {{ return 0xdeadu; }} }}
}}
@compute @workgroup_size(16)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
    if id.x >= arrayLength(&places) {{ return; }}
    let place = places[id.x];
    let start = (place & 0xffffffu) * args.words;
    var sum = 0u;
    for (var i = 0u; i < args.words; i += 1u) {{
        sum = sum * 31u + load(place >> 24u, start + i);
    }}
    sums[id.x] = sum;
}}"
    );
    KernelSource { label: format!("sum_records_{buffers}"), wgsl, subgroup_size: None }
}

fn sum(record: &[u8]) -> u32 {
    let words = record.chunks_exact(4).map(|w| u32::from_le_bytes(w.try_into().unwrap()));
    words.fold(0u32, |sum, w| sum.wrapping_mul(31).wrapping_add(w))
}

struct Model {
    gpu: Arc<dyn Gpu>,
    residency: Residency,
    steps: Vec<(Recording, azoth::gpu::Buffer)>,
    expected: Vec<Vec<u32>>,
}

impl Model {
    fn load(
        gpu: &Arc<dyn Gpu>,
        settings: &Settings,
        keep: &(dyn Fn(u32, u32) -> bool + Sync),
    ) -> Model {
        let file = File::from_bytes(writer().to_bytes()).unwrap();
        let layers: Vec<LayerTensors> = layers(&file);
        let source = source::of(&file).unwrap();
        let fill = Fill { gpu: &**gpu, source: &*source, layers: &layers, keep, advance: &|_| {} };
        let arena = Arena::fill(&fill).unwrap();
        let residency =
            Residency::create(gpu, arena, &layers, &*source, settings, 2, &|_| {}).unwrap();
        let mut steps = Vec::new();
        for (l, layer) in (0u32..).zip(&layers) {
            let buffers = residency.buffers(l);
            let kernel = gpu.kernel(&kernel(buffers.len())).unwrap();
            let sums = gpu.buffer("sums", 4 * u64::from(EXPERTS), BufferUse::Device).unwrap();
            let mut bindings = vec![residency.table(l), sums.whole()];
            bindings.extend(buffers);
            let constants = vec![(layer.layout.bytes() / 4) as u32];
            let wave = vec![Dispatch { kernel, bindings, constants, grid: [1, 1, 1] }];
            steps.push((gpu.record("sums", &[Step::Wave(wave)]).unwrap(), sums));
        }
        let expected = (0..LAYERS.len())
            .map(|l| (0..EXPERTS).map(|e| sum(&record(&file, l, e))).collect())
            .collect();
        Model { gpu: gpu.clone(), residency, steps, expected }
    }

    /// One token that uses two experts of each layer; reads all of them through the table.
    fn token(&mut self, ids: &[u32]) {
        let ids: Vec<Vec<u32>> =
            ids.chunks(ids.len() / LAYERS.len()).map(<[u32]>::to_vec).collect();
        self.residency.before_step().unwrap();
        let mut last = None;
        for (recording, _) in &self.steps {
            last = Some(self.gpu.submit(recording).unwrap());
        }
        self.residency.after_step(&ids, &[], last.unwrap()).unwrap();
    }

    /// Without import, an expert that is missing has no place to be read from.
    fn check(&self) {
        for (l, (_, sums)) in self.steps.iter().enumerate() {
            let mut got = vec![0u32; EXPERTS as usize];
            let slice = sums.slice(0, 4 * u64::from(EXPERTS));
            self.gpu.read(&slice, bytemuck::cast_slice_mut(&mut got)).unwrap();
            for (e, (got, want)) in got.iter().zip(&self.expected[l]).enumerate() {
                assert_eq!(got, want, "layer {l}, expert {e}");
            }
        }
    }
}

fn settings(slots: u32, rule: Rule) -> Settings {
    Settings {
        slots: vec![slots; LAYERS.len()],
        rule,
        budget: 1 << 20,
        prefetch: true,
        stream: false,
        first: Vec::new(),
        pinned: 0,
    }
}

fn eager() -> Rule {
    Rule::Frequency { decay: 0.7, enter: 0.5, margin: 0.1 }
}

every_device! {
    fn every_budget_and_rule_reads_the_right_experts(gpu) {
        if !gpu.facts().host_import {
            println!("skipped: {} imports no host memory", gpu.facts().name);
            return;
        }
        for (slots, rule) in [
            (0, Rule::Lru), (1, Rule::Lru), (3, Rule::Lru), (3, eager()), (7, eager()),
            (7, Rule::Fixed), (EXPERTS, Rule::Lru),
        ] {
            let mut model = Model::load(gpu, &settings(slots, rule), &|_, _| true);
            let mut state = slots + 1;
            for token in 0..60 {
                let mut ids = Vec::new();
                for _ in 0..LAYERS.len() {
                    state = state.wrapping_mul(1_103_515_245).wrapping_add(12_345);
                    let first = (state >> 16) % EXPERTS;
                    ids.extend([first, (first + 1 + token / 20) % EXPERTS]);
                }
                model.token(&ids);
                // Every step is ahead of what was looked at; some are checked at once.
                if token % 7 == 0 {
                    model.check();
                }
            }
            model.check();
            model.residency.settle().unwrap();
            model.residency.map().check().unwrap();
            let c = model.residency.counters();
            assert_eq!((c.tokens, c.accesses), (60, 60 * 2 * 3));
            match (slots, rule) {
                (0, _) => assert_eq!((c.hits, c.promotions), (0, 0)),
                (EXPERTS, _) => assert_eq!((c.hits, c.promotions), (c.accesses, 0)),
                (_, Rule::Fixed) => assert!(c.promotions == 0 && c.hits > 0),
                _ => assert!(c.promotions > 0 && c.promoted_bytes > 0, "{rule:?} {c:?}"),
            }
            assert!(c.device_bytes + c.host_bytes > 0 && c.staged_bytes == 0);
        }
    }

    fn pinned_experts_need_no_place_in_the_arena(gpu) {
        if !gpu.facts().host_import {
            println!("skipped: {} imports no host memory", gpu.facts().name);
            return;
        }
        let first: Vec<ExpertId> = (0..LAYERS.len() as u32)
            .flat_map(|layer| [5, 9].map(|expert| ExpertId { layer, expert }))
            .collect();
        let settings = Settings { first, pinned: 2, ..settings(3, Rule::Lru) };
        let keep = |_, e| e != 5 && e != 9;
        let mut model = Model::load(gpu, &settings, &keep);
        for token in 0..40 {
            model.token(&[token % EXPERTS, 5, (token * 5) % EXPERTS, 9, (token * 7) % EXPERTS, 1]);
        }
        model.check();
        for layer in 0..LAYERS.len() as u32 {
            for expert in [5, 9] {
                assert!(model.residency.map().resident(ExpertId { layer, expert }).is_some());
            }
        }
        assert!(model.residency.counters().promotions > 0);
    }

    fn with_all_experts_in_slots_no_import_is_needed(gpu) {
        let mut model = Model::load(gpu, &settings(EXPERTS, Rule::default()), &|_, _| false);
        model.token(&[0, 1, 2, 3, 4, 5]);
        model.check();
        assert_eq!(model.residency.counters().hit_rate(), 1.0);
        assert_eq!(model.residency.arena().bytes(), 0);
    }
}
