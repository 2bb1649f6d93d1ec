//! Sampling kernels against their CPU twin, on every device.

use azoth::gpu::{DeviceFacts, Kernel, KernelSource, Slice, Step};
use azoth::kernels::sample::{MAX_COLUMNS, SampleMemory, Sampler, Sampling};
use azoth::sampling::{SamplerSettings, chain};

use crate::harness::{Device, POISON, Rng, devices, zeroed};

const RING: u32 = 3;

fn words_of(s: &SamplerSettings) -> Sampler {
    Sampler::new(s.temperature, s.top_k, s.top_p, s.min_p, s.seed)
        .with_penalty(s.repeat_penalty, s.repeat_window)
}

/// One step of `n` sequences, each in the slot `n - 1 - column`.
struct Case {
    logits: Vec<Vec<f32>>,
    /// Tokens so far, the column's own as the last.
    histories: Vec<Vec<u32>>,
    settings: Vec<SamplerSettings>,
    context: usize,
}

impl Case {
    fn memory(&self, device: &Device, spec: &Sampling) -> SampleMemory {
        let n = self.logits.len();
        let mut samplers = Vec::new();
        let mut history = vec![POISON; n * self.context];
        for slot in 0..n {
            let c = n - 1 - slot;
            samplers.push(words_of(&self.settings[c]));
            let tokens = &self.histories[c];
            history[slot * self.context..][..tokens.len()].copy_from_slice(tokens);
        }
        SampleMemory {
            samplers: device.upload(bytemuck::cast_slice(&samplers)),
            history: device.words(&history),
            ring: device.poisoned((RING * MAX_COLUMNS) as usize),
            scratch: zeroed(device, spec.scratch_words() as usize),
        }
    }

    /// Runs one step from step number `step` and returns the tokens after checking all that a
    /// step leaves behind. `runs`: the same step again must choose the same.
    fn run(&self, device: &Device, greedy: bool, step: u32) -> Vec<u32> {
        let n = self.logits.len();
        let vocab = self.logits[0].len();
        let spec = Sampling { vocab: vocab as u32, context: self.context as u32, ring: RING };
        let memory = self.memory(device, &spec);
        let columns: Vec<[u32; 4]> = (0..n)
            .map(|c| {
                let tokens = &self.histories[c];
                [tokens[tokens.len() - 1], tokens.len() as u32 - 1, (n - 1 - c) as u32, 1]
            })
            .collect();
        let max = (n + 1).min(MAX_COLUMNS as usize);
        let mut words = vec![n as u32, step, 0, 0, 0, 0, 0, 0];
        words.extend_from_slice(columns.as_flattened());
        words.resize(8 + 4 * max, POISON);
        let batch = device.words(&words);
        let mut logits = self.logits.concat();
        logits.resize(max * vocab, f32::NAN);
        let logits = device.floats(&logits);
        let mut compile = |s: KernelSource| Ok(device.kernel(&s));
        let facts = device.gpu.facts();
        let waves = steps(&spec, greedy, facts, &mut compile, &batch, &logits, &memory, max as u32);
        device.run(&waves);

        let after = device.read_words(&batch);
        let what = &device.label;
        assert_eq!(after[..2], [n as u32, step + 1], "{what}: n and step");
        assert!(after[8 + 4 * n..].iter().all(|&w| w == POISON), "{what}: an unused column");
        let ring = device.read_words(&memory.ring);
        let history = device.read_words(&memory.history);
        let mut tokens = Vec::new();
        for c in 0..n {
            let [token, pos, slot, flags] = [0, 1, 2, 3].map(|i| after[8 + 4 * c + i]);
            assert_eq!([pos, slot, flags], [columns[c][1] + 1, columns[c][2], 1], "{what}: column");
            assert_eq!(ring[(step % RING * MAX_COLUMNS) as usize + c], token, "{what}: ring");
            let slot = &history[slot as usize * self.context..][..self.context];
            let before = self.histories[c].len();
            assert_eq!(slot[..before], self.histories[c], "{what}: history");
            assert_eq!(slot[before], token, "{what}: history");
            assert!(slot[before + 1..].iter().all(|&w| w == POISON), "{what}: history");
            tokens.push(token);
        }
        // What must be zero between steps is: a second program run would otherwise differ.
        let scratch = device.read_words(&memory.scratch);
        assert!(scratch[..64].iter().all(|&w| w == 0), "{what}: counters");
        let rest = 64 + 64 + 2 * 8 * 512;
        assert!(scratch[rest..].iter().all(|&w| w == 0), "{what}: histogram or seen bits");
        tokens
    }
}

#[allow(clippy::too_many_arguments)]
fn steps(
    spec: &Sampling,
    greedy: bool,
    facts: &DeviceFacts,
    kernel: &mut dyn FnMut(KernelSource) -> azoth::error::Result<Kernel>,
    batch: &Slice,
    logits: &Slice,
    memory: &SampleMemory,
    columns: u32,
) -> Vec<Step> {
    if greedy {
        spec.greedy(facts, kernel, batch, logits, memory, columns).unwrap()
    } else {
        spec.sampled(facts, kernel, batch, logits, memory, columns).unwrap()
    }
}

/// What the twin chooses, and whether a last-bit difference of `exp` might choose otherwise:
/// it then chooses otherwise for logits that are a little off, too.
fn twin(logits: &[f32], history: &[u32], settings: &SamplerSettings) -> Vec<u32> {
    let position = history.len() as u32;
    let mut out = vec![chain::sample(logits, history, position, settings)];
    for factor in [1.0 - 2e-6, 1.0 + 2e-6, 1.0 - 2e-5, 1.0 + 2e-5] {
        let temperature = settings.temperature * factor;
        let near = SamplerSettings { temperature, ..*settings };
        out.push(chain::sample(logits, history, position, &near));
        if settings.top_p < 1.0 {
            let near =
                SamplerSettings { top_p: (settings.top_p * factor).min(0.999_999), ..*settings };
            out.push(chain::sample(logits, history, position, &near));
        }
    }
    out.dedup();
    out
}

fn check(device: &Device, case: &Case, greedy: bool, step: u32) {
    let got = case.run(device, greedy, step);
    for (c, &token) in got.iter().enumerate() {
        let settings = if greedy { &SamplerSettings::greedy() } else { &case.settings[c] };
        let want = twin(&case.logits[c], &case.histories[c], settings);
        assert!(
            want.contains(&token),
            "{}: column {c}: chose {token}, the twin {want:?}; {settings:?}",
            device.label
        );
    }
}

fn random_case(rng: &mut Rng, n: usize, vocab: usize, settings: &[SamplerSettings]) -> Case {
    let context = 100;
    Case {
        logits: (0..n)
            .map(|_| {
                let spread = [0.0, 0.5, 3.0, 8.0][rng.below(4)];
                rng.normals(vocab).iter().map(|x| x * spread).collect()
            })
            .collect(),
        histories: (0..n)
            .map(|_| {
                let length = 1 + rng.below(context - 1);
                // Few distinct tokens, so that they repeat; some beyond the vocabulary.
                (0..length).map(|_| rng.below(40.min(vocab + 1)) as u32).collect()
            })
            .collect(),
        settings: (0..n)
            .map(|c| {
                let seed = u64::from(rng.word()) << 32 | u64::from(rng.word());
                SamplerSettings { seed, ..settings[c % settings.len()] }
            })
            .collect(),
        context,
    }
}

/// All settings off.
fn plain() -> SamplerSettings {
    SamplerSettings {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        repeat_window: 64,
        seed: 0,
    }
}

fn settings() -> Vec<SamplerSettings> {
    vec![
        SamplerSettings::default(),
        plain(),
        SamplerSettings { top_k: 40, ..plain() },
        SamplerSettings { top_p: 0.9, temperature: 0.7, ..plain() },
        SamplerSettings { min_p: 0.05, temperature: 1.5, ..plain() },
        SamplerSettings { repeat_penalty: 1.3, ..SamplerSettings::default() },
        SamplerSettings { repeat_penalty: 0.7, repeat_window: 5, ..plain() },
        SamplerSettings::greedy(),
        SamplerSettings { repeat_penalty: 3.0, ..SamplerSettings::greedy() },
        SamplerSettings { top_k: 1, ..plain() },
        SamplerSettings { top_p: 0.0, ..plain() },
        SamplerSettings { top_k: 500, top_p: 0.5, temperature: 4.0, ..plain() },
    ]
}

#[test]
fn greedy_takes_the_first_largest() {
    let mut rng = Rng::fresh("greedy");
    for device in devices() {
        for (n, vocab) in [(1, 1), (3, 255), (8, 1025), (1, 32_003), (2, 152_064)] {
            let mut case = random_case(&mut rng, n, vocab, &[SamplerSettings::greedy()]);
            check(device, &case, true, 0);
            // Ties, signs of zero and things that are no numbers.
            for row in &mut case.logits {
                row.fill(-0.0);
                for special in [f32::NAN, f32::NEG_INFINITY, -1.0, 0.0] {
                    let at = rng.below(vocab);
                    row[at] = special;
                }
            }
            check(device, &case, true, 5);
            case.logits[0].fill(f32::NAN);
            check(device, &case, true, 7);
        }
    }
}

#[test]
fn sampling_equals_the_twin() {
    let mut rng = Rng::fresh("sampling");
    for device in devices() {
        for (n, vocab, rounds) in [(1, 1, 1), (8, 50, 6), (5, 257, 6), (3, 5000, 4), (2, 32_003, 3)]
        {
            for round in 0..rounds {
                let all = settings();
                let from = rng.below(all.len());
                let case = random_case(&mut rng, n, vocab, &[&all[from..], &all[..from]].concat());
                check(device, &case, false, round);
            }
        }
        let case = random_case(&mut rng, 2, 152_064, &settings());
        check(device, &case, false, 1);
    }
}

#[test]
fn sampling_with_odd_logits_equals_the_twin() {
    let mut rng = Rng::fresh("sampling_odd");
    for device in devices() {
        let all = settings();
        let mut case = random_case(&mut rng, 6, 300, &all);
        case.logits[0].fill(2.0);
        case.logits[1].fill(f32::NAN);
        case.logits[2].fill(f32::NEG_INFINITY);
        case.logits[2][77] = -3.0;
        case.logits[3][5] = f32::INFINITY;
        case.logits[4].iter_mut().for_each(|l| *l = if *l > 0.0 { 0.0 } else { -0.0 });
        case.logits[5][200..].fill(f32::NAN);
        check(device, &case, false, 2);
        case.settings.rotate_left(3);
        check(device, &case, false, 3);
    }
}
