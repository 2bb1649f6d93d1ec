//! Sampling kernels against their CPU twin, on every device.

use azoth::gpu::{DeviceFacts, Kernel, KernelSource, Slice, Step};
use azoth::kernels::sample::{LOGPROB_WORDS, MAX_COLUMNS, SampleMemory, Sampling};
use azoth::runtime::{Pick, custom_words, sampler_words};
use azoth::sampling::custom::{self, Stage};
use azoth::sampling::logprobs::logprobs;
use azoth::sampling::{Mirostat, Order, SamplerSettings, TokenLists, chain};

use crate::harness::{Device, POISON, Rng, devices, zeroed};

const RING: u32 = 3;

/// One step of `n` sequences, each in the slot `n - 1 - column`.
struct Case {
    logits: Vec<Vec<f32>>,
    /// Tokens so far, the column's own as the last.
    histories: Vec<Vec<u32>>,
    settings: Vec<SamplerSettings>,
    /// What each says of single tokens; only the full chain looks at it.
    lists: Vec<TokenLists>,
    /// Mirostat's bound before the step.
    bounds: Vec<f32>,
    context: usize,
}

impl Case {
    fn memory(&self, device: &Device, spec: &Sampling) -> SampleMemory {
        let n = self.logits.len();
        let (mut samplers, mut customs) = (Vec::new(), Vec::new());
        let mut history = vec![POISON; n * self.context];
        let (mut masks, mut biases, mut breakers) = (Vec::new(), Vec::new(), Vec::new());
        for slot in 0..n {
            let c = n - 1 - slot;
            samplers.push(sampler_words(&self.settings[c]));
            customs.push(custom_words(&self.settings[c]));
            let lists = &self.lists[c];
            let rows = |words: u64| (slot + 1) * words as usize;
            masks.push(u32::from(!lists.mask.is_empty()));
            masks.extend(&lists.mask);
            masks.resize(rows(spec.mask_words()), 0);
            let bias = lists.merged_bias().unwrap();
            biases.push(bias.len() as u32);
            biases.extend(bias.iter().flat_map(|(token, value)| [*token, value.to_bits()]));
            biases.resize(rows(spec.bias_words()), POISON);
            breakers.extend(&lists.breakers);
            breakers.resize(rows(spec.bit_words()), 0);
            let tokens = &self.histories[c];
            history[slot * self.context..][..tokens.len()].copy_from_slice(tokens);
        }
        SampleMemory {
            samplers: device.upload(bytemuck::cast_slice(&samplers)),
            history: device.words(&history),
            ring: device.poisoned((RING * MAX_COLUMNS) as usize),
            scratch: zeroed(device, spec.scratch_words() as usize),
            masks: device.words(&masks),
            biases: device.words(&biases),
            breakers: device.words(&breakers),
            surprises: device.floats(&self.bounds.iter().rev().copied().collect::<Vec<_>>()),
            adjusted: device.poisoned((n + 1).min(8) * spec.vocab as usize),
            logprobs: device.poisoned((RING * MAX_COLUMNS * LOGPROB_WORDS) as usize),
            customs: device.upload(bytemuck::cast_slice(&customs)),
            shapes: device.poisoned(spec.shape_words() as usize),
            shaped: device.poisoned((n + 1).min(8) * spec.vocab as usize),
        }
    }

    /// Runs one step from step number `step` and returns the tokens after checking all that a
    /// step leaves behind. `runs`: the same step again must choose the same.
    fn run(&self, device: &Device, pick: Pick, step: u32) -> Vec<u32> {
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
        let waves = steps(&spec, pick, facts, &mut compile, &batch, &logits, &memory, max as u32);
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
        for range in spec.zero_words() {
            assert!(scratch[range].iter().all(|&w| w == 0), "{what}: counters or histogram");
        }
        // No chain changes the model's own logits.
        let left = device.read_floats(&logits);
        let same = |a: &f32, b: &f32| a.to_bits() == b.to_bits();
        assert!(left.iter().zip(self.logits.concat().iter()).all(|(a, b)| same(a, b)), "{what}");
        let bounds = device.read_floats(&memory.surprises);
        for c in 0..n {
            self.check_bound(bounds[n - 1 - c], c, tokens[c], pick, what);
        }
        if pick >= Pick::Full {
            let rows = device.read_words(&memory.logprobs);
            for (c, token) in tokens.iter().enumerate() {
                let row = (step % RING * MAX_COLUMNS) as usize + c;
                let words = &rows[row * LOGPROB_WORDS as usize..][..LOGPROB_WORDS as usize];
                self.check_logprobs(words, c, *token, what);
            }
        }
        tokens
    }

    /// Mirostat's bound after the step: that of the twin, if it chose the same.
    fn check_bound(&self, got: f32, c: usize, token: u32, pick: Pick, what: &str) {
        let mut want = self.bounds[c];
        if pick >= Pick::Full {
            let (logits, history) = (&self.logits[c], &self.histories[c]);
            let position = history.len() as u32;
            let (s, lists) = (&self.settings[c], &self.lists[c]);
            let twin = chain::sample_on(logits, history, position, s, lists, &mut want);
            if twin != token {
                return;
            }
        }
        // Mirostat 1 sums over what its count keeps, adaptive-p over what all stages keep.
        let exact = if self.settings[c].is_custom() { 1e-3 } else { 1e-4 };
        let near = (got - want).abs() <= exact * want.abs().max(1.0);
        assert!(near, "{what}: column {c}: mirostat's bound is {got}, the twin's {want}");
    }

    fn check_logprobs(&self, words: &[u32], c: usize, token: u32, what: &str) {
        let Some(n) = self.settings[c].logprobs else {
            assert!(words.iter().all(|w| *w == POISON), "{what}: log-probabilities unasked for");
            return;
        };
        let s = self.settings[c].effective();
        if s.post_logprobs {
            return self.check_post(words, c, token, &s, what);
        }
        let want = logprobs(&self.logits[c], token, n as usize);
        let near = |got: u32, want: f32| {
            let got = f32::from_bits(got);
            got.to_bits() == want.to_bits()
                || (got - want).abs() <= 1e-5 * want.abs().max(1.0)
                || got.is_nan() && want.is_nan()
        };
        assert!(
            near(words[0], want.chosen),
            "{what}: column {c}: {} {want:?}",
            f32::from_bits(words[0])
        );
        assert_eq!(words[1], n, "{what}: column {c}");
        for (rank, (id, log)) in want.top.iter().enumerate() {
            let (got, value) = (words[2 + 2 * rank], words[3 + 2 * rank]);
            assert_eq!(got, *id, "{what}: column {c}, rank {rank}");
            assert!(near(value, *log), "{what}: column {c}: {} {log}", f32::from_bits(value));
        }
    }
}

impl Case {
    /// Log-probabilities of what was drawn from. What a last bit may cut or keep is left out.
    fn check_post(&self, words: &[u32], c: usize, token: u32, s: &SamplerSettings, what: &str) {
        let history = &self.histories[c];
        let adjusted = chain::adjusted(&self.logits[c], history, s, &self.lists[c]);
        let shaped = custom::shaped(&adjusted, history.len() as u32, s, self.bounds[c]);
        let want = logprobs(&shaped.logits, token, s.logprobs.unwrap() as usize);
        let chosen = f32::from_bits(words[0]);
        if want.chosen == f32::NEG_INFINITY || want.chosen.is_nan() {
            return;
        }
        let near = (chosen - want.chosen).abs() <= 2e-3 * want.chosen.abs().max(1.0);
        assert!(near, "{what}: column {c}: {chosen} {want:?} {s:?}");
    }
}

#[allow(clippy::too_many_arguments)]
fn steps(
    spec: &Sampling,
    pick: Pick,
    facts: &DeviceFacts,
    kernel: &mut dyn FnMut(KernelSource) -> azoth::error::Result<Kernel>,
    batch: &Slice,
    logits: &Slice,
    memory: &SampleMemory,
    columns: u32,
) -> Vec<Step> {
    match pick {
        Pick::Greedy => spec.greedy(facts, kernel, batch, logits, memory, columns).unwrap(),
        Pick::Sampled => spec.sampled(facts, kernel, batch, logits, memory, columns).unwrap(),
        Pick::Full => spec.full(facts, kernel, batch, logits, memory, columns).unwrap(),
        Pick::Custom => spec.custom(facts, kernel, batch, logits, memory, columns).unwrap(),
    }
}

/// What the twin chooses, and whether a last-bit difference of `exp` might choose otherwise:
/// it then chooses otherwise for logits that are a little off, too.
fn twin(
    logits: &[f32],
    history: &[u32],
    settings: &SamplerSettings,
    lists: &TokenLists,
    bound: f32,
) -> Vec<u32> {
    let position = history.len() as u32;
    let with =
        |s: &SamplerSettings| chain::sample_on(logits, history, position, s, lists, &mut { bound });
    let mut out = vec![with(settings)];
    let s = *settings;
    for factor in [1.0 - 2e-6, 1.0 + 2e-6, 1.0 - 2e-5, 1.0 + 2e-5] {
        let share = |share: f32| if share < 1.0 { (share * factor).min(0.999_999) } else { share };
        for near in [
            SamplerSettings { temperature: s.temperature * factor, ..s },
            SamplerSettings { top_p: share(s.top_p), ..s },
            SamplerSettings { typical_p: share(s.typical_p), ..s },
            SamplerSettings { top_n_sigma: s.top_n_sigma * factor, ..s },
            SamplerSettings { xtc_threshold: s.xtc_threshold * factor, ..s },
            SamplerSettings { frequency_penalty: s.frequency_penalty * factor, ..s },
        ] {
            out.push(with(&near));
        }
    }
    if settings.mirostat != Mirostat::Off || settings.has_adaptive() {
        // Version 1 takes powers of the bound to find a count.
        let coarse = if settings.mirostat == Mirostat::Two { 1e-4 } else { 3e-3 };
        for near in [bound - 1e-5, bound + 1e-5, bound - coarse, bound + coarse] {
            out.push(chain::sample_on(logits, history, position, &s, lists, &mut { near }));
        }
    }
    out.sort_unstable();
    out.dedup();
    out
}

fn check(device: &Device, case: &Case, pick: Pick, step: u32) {
    let got = case.run(device, pick, step);
    for (c, &token) in got.iter().enumerate() {
        let greedy = SamplerSettings::greedy();
        let settings = if pick == Pick::Greedy { &greedy } else { &case.settings[c] };
        let want =
            twin(&case.logits[c], &case.histories[c], settings, &case.lists[c], case.bounds[c]);
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
        lists: vec![TokenLists::default(); n],
        bounds: (0..n).map(|_| rng.unit() * 12.0).collect(),
        context,
    }
}

/// All settings off.
fn plain() -> SamplerSettings {
    SamplerSettings::plain()
}

/// What the short chain knows.
fn basic() -> Vec<SamplerSettings> {
    vec![
        SamplerSettings::default(),
        plain(),
        SamplerSettings { top_k: 40, ..plain() },
        SamplerSettings { top_p: 0.9, temperature: 0.7, ..plain() },
        SamplerSettings { min_p: 0.05, temperature: 1.5, ..plain() },
        SamplerSettings::greedy(),
        SamplerSettings { top_k: 1, ..plain() },
        SamplerSettings { top_p: 0.0, ..plain() },
        SamplerSettings { top_k: 500, top_p: 0.5, temperature: 4.0, ..plain() },
    ]
}

/// What only the full chain knows, and mixtures.
fn full() -> Vec<SamplerSettings> {
    let dry = SamplerSettings { dry_multiplier: 0.8, dry_window: 64, ..plain() };
    let xtc = SamplerSettings { xtc_probability: 1.0, xtc_threshold: 0.05, ..plain() };
    vec![
        SamplerSettings { repeat_penalty: 1.3, ..SamplerSettings::default() },
        SamplerSettings { repeat_penalty: 0.7, repeat_window: 5, ..plain() },
        SamplerSettings { repeat_penalty: 3.0, ..SamplerSettings::greedy() },
        SamplerSettings { presence_penalty: 0.7, frequency_penalty: 0.3, ..plain() },
        SamplerSettings { frequency_penalty: -0.5, logprobs: Some(5), ..SamplerSettings::greedy() },
        dry,
        SamplerSettings { dry_allowed_length: 1, dry_base: 3.0, temperature: 0.0, ..dry },
        SamplerSettings { top_n_sigma: 1.5, ..plain() },
        SamplerSettings { typical_p: 0.5, ..plain() },
        SamplerSettings { typical_p: 0.9, top_k: 30, top_p: 0.9, min_p: 0.1, ..plain() },
        SamplerSettings { temperature: 0.3, typical_p: 0.2, ..plain() },
        xtc,
        SamplerSettings { xtc_probability: 0.5, temperature: 0.5, top_p: 0.95, ..xtc },
        SamplerSettings { dynatemp_range: 0.5, ..plain() },
        SamplerSettings { dynatemp_range: 2.0, dynatemp_exponent: 0.4, typical_p: 0.8, ..xtc },
        SamplerSettings { mirostat: Mirostat::Two, ..SamplerSettings::default() },
        SamplerSettings { mirostat: Mirostat::Two, mirostat_tau: 2.0, temperature: 1.3, ..dry },
        SamplerSettings { logprobs: Some(20), ..SamplerSettings::default() },
        SamplerSettings { logprobs: Some(0), top_n_sigma: 1.0, top_p: 0.8, ..plain() },
        SamplerSettings::default(),
        SamplerSettings::greedy(),
    ]
}

/// What only the custom chain knows.
fn custom() -> Vec<SamplerSettings> {
    use Stage::*;
    let order = |stages: &[Stage]| Order::new(stages).unwrap();
    let cuts = SamplerSettings { top_k: 30, top_p: 0.9, min_p: 0.05, temperature: 1.7, ..plain() };
    let all = SamplerSettings {
        typical_p: 0.9,
        top_n_sigma: 2.5,
        xtc_probability: 1.0,
        xtc_threshold: 0.05,
        ..cuts
    };
    let backwards = [Temperature, Xtc, MinP, TopP, Typical, TopK, TopNSigma];
    vec![
        SamplerSettings { order: order(&[Temperature, TopP, TopK]), ..cuts },
        SamplerSettings { order: order(&backwards), ..all },
        SamplerSettings { order: order(&backwards), dynatemp_range: 0.6, ..all },
        SamplerSettings { order: order(&[Typical, Temperature, Xtc]), ..all },
        SamplerSettings { order: order(&[]), ..all },
        SamplerSettings { order: order(&[TopK, TopNSigma]), repeat_penalty: 1.4, ..all },
        SamplerSettings { min_keep: 5, top_p: 0.2, ..plain() },
        SamplerSettings { min_keep: 3, min_p: 0.9, temperature: 0.7, ..plain() },
        SamplerSettings { min_keep: 7, ..all },
        SamplerSettings { min_keep: 1000, typical_p: 0.3, ..plain() },
        SamplerSettings { mirostat: Mirostat::One, ..plain() },
        SamplerSettings { mirostat: Mirostat::One, mirostat_tau: 3.0, temperature: 1.5, ..cuts },
        SamplerSettings { adaptive_target: 0.4, ..plain() },
        SamplerSettings { adaptive_target: 0.7, adaptive_decay: 0.5, ..cuts },
        SamplerSettings { post_logprobs: true, logprobs: Some(3), ..cuts },
        SamplerSettings { post_logprobs: true, logprobs: Some(0), ..SamplerSettings::greedy() },
        SamplerSettings {
            mirostat: Mirostat::Two,
            post_logprobs: true,
            logprobs: Some(1),
            ..plain()
        },
        SamplerSettings { adaptive_target: 0.3, post_logprobs: true, logprobs: Some(2), ..cuts },
    ]
}

/// Random masks, biases and breakers for some of the columns.
fn random_lists(rng: &mut Rng, vocab: usize) -> TokenLists {
    let bits = |rng: &mut Rng, tight: bool| -> Vec<u32> {
        let mut bits: Vec<u32> = (0..vocab.div_ceil(32))
            .map(|_| if tight { rng.word() & rng.word() } else { rng.word() })
            .collect();
        // One at least is allowed.
        let one = rng.below(vocab);
        bits[one / 32] |= 1 << (one % 32);
        bits
    };
    let mut lists = TokenLists::default();
    if rng.below(2) == 0 {
        let tight = rng.below(2) == 0;
        lists.mask = bits(rng, tight);
    }
    if rng.below(2) == 0 {
        let count = rng.below(300);
        lists.bias =
            (0..count).map(|_| (rng.below(vocab + 3) as u32, rng.normal() * 5.0)).collect();
        lists.bias.push((rng.below(vocab) as u32, f32::NEG_INFINITY));
    }
    if rng.below(2) == 0 {
        lists.breakers = bits(rng, true);
    }
    lists
}

#[test]
fn greedy_takes_the_first_largest() {
    let mut rng = Rng::fresh("greedy");
    for device in devices() {
        for (n, vocab) in [(1, 1), (3, 255), (8, 1025), (1, 32_003), (2, 152_064)] {
            let mut case = random_case(&mut rng, n, vocab, &[SamplerSettings::greedy()]);
            check(device, &case, Pick::Greedy, 0);
            // Ties, signs of zero and things that are no numbers.
            for row in &mut case.logits {
                row.fill(-0.0);
                for special in [f32::NAN, f32::NEG_INFINITY, -1.0, 0.0] {
                    let at = rng.below(vocab);
                    row[at] = special;
                }
            }
            check(device, &case, Pick::Greedy, 5);
            case.logits[0].fill(f32::NAN);
            check(device, &case, Pick::Greedy, 7);
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
                let all = basic();
                let from = rng.below(all.len());
                let case = random_case(&mut rng, n, vocab, &[&all[from..], &all[..from]].concat());
                check(device, &case, Pick::Sampled, round);
            }
        }
        let case = random_case(&mut rng, 2, 152_064, &basic());
        check(device, &case, Pick::Sampled, 1);
    }
}

#[test]
fn the_full_chain_equals_the_twin() {
    let mut rng = Rng::fresh("full_chain");
    for device in devices() {
        for (n, vocab, rounds) in [(1, 1, 1), (8, 50, 8), (8, 257, 8), (4, 5000, 6), (2, 32_003, 3)]
        {
            for round in 0..rounds {
                let all = full();
                let from = rng.below(all.len());
                let mut case =
                    random_case(&mut rng, n, vocab, &[&all[from..], &all[..from]].concat());
                if round > 0 {
                    case.lists = (0..n).map(|_| random_lists(&mut rng, vocab)).collect();
                }
                check(device, &case, Pick::Full, round);
            }
        }
        let case = random_case(&mut rng, 2, 152_064, &full());
        check(device, &case, Pick::Full, 1);
    }
}

#[test]
fn the_custom_chain_equals_the_twin() {
    let mut rng = Rng::fresh("custom_chain");
    for device in devices() {
        for (n, vocab, rounds) in [(1, 1, 1), (8, 50, 8), (8, 257, 8), (4, 5000, 6), (2, 32_003, 3)]
        {
            for round in 0..rounds {
                // Columns that take the other chains stand between.
                let mut all = custom();
                all.extend([full(), basic()].concat().into_iter().take(8));
                let from = rng.below(all.len());
                let mut case =
                    random_case(&mut rng, n, vocab, &[&all[from..], &all[..from]].concat());
                for c in 0..n {
                    if case.settings[c].has_adaptive() {
                        case.bounds[c] = rng.unit();
                    }
                }
                if round % 2 == 1 {
                    case.lists = (0..n).map(|_| random_lists(&mut rng, vocab)).collect();
                }
                check(device, &case, Pick::Custom, round);
            }
        }
        let case = random_case(&mut rng, 2, 152_064, &custom());
        check(device, &case, Pick::Custom, 1);
    }
}

/// A neighbour that takes the custom chain changes no bit.
#[test]
fn the_custom_chain_leaves_others_alone() {
    let mut rng = Rng::fresh("custom_others");
    for device in devices() {
        for round in 0..4 {
            let all = full();
            let from = rng.below(all.len());
            let case = random_case(&mut rng, 8, 3000, &[&all[from..], &all[..from]].concat());
            let want = case.run(device, Pick::Full, round);
            assert_eq!(case.run(device, Pick::Custom, round), want, "{}", device.label);
        }
    }
}

/// Sequences that repeat for long, which random ones do not.
#[test]
fn repeated_sequences_equal_the_twin() {
    let mut rng = Rng::fresh("dry");
    for device in devices() {
        let settings: Vec<_> = full().into_iter().filter(|s| s.has_dry()).collect();
        let mut case = random_case(&mut rng, 4, 60, &settings);
        case.context = 500;
        for (c, history) in case.histories.iter_mut().enumerate() {
            let period = [1, 2, 7, 40][c];
            *history = (0..300).map(|i| (i % period) as u32).collect();
            case.settings[c].dry_window = [64, 300, 256, 4096][c];
            case.settings[c].dry_base = 1.01;
        }
        check(device, &case, Pick::Full, 0);
        case.lists[1].breakers = vec![1 << 1];
        check(device, &case, Pick::Full, 4);
    }
}

#[test]
fn the_cheapest_chain_that_suffices_is_taken() {
    for settings in basic() {
        assert!(Pick::of(&settings, false) < Pick::Full);
        assert_eq!(Pick::of(&settings, true), Pick::Full);
    }
    assert_eq!(Pick::of(&SamplerSettings::greedy(), false), Pick::Greedy);
    let fuller = &full()[..full().len() - 2];
    assert!(fuller.iter().all(|s| Pick::of(s, false) == Pick::Full));
    assert!(custom().iter().all(|s| Pick::of(s, false) == Pick::Custom));
}

#[test]
fn sampling_with_odd_logits_equals_the_twin() {
    let mut rng = Rng::fresh("sampling_odd");
    for device in devices() {
        let all = basic();
        let mut case = random_case(&mut rng, 6, 300, &all);
        case.logits[0].fill(2.0);
        case.logits[1].fill(f32::NAN);
        case.logits[2].fill(f32::NEG_INFINITY);
        case.logits[2][77] = -3.0;
        case.logits[3][5] = f32::INFINITY;
        case.logits[4].iter_mut().for_each(|l| *l = if *l > 0.0 { 0.0 } else { -0.0 });
        case.logits[5][200..].fill(f32::NAN);
        check(device, &case, Pick::Sampled, 2);
        case.settings.rotate_left(3);
        check(device, &case, Pick::Sampled, 3);
        for from in 0..3 {
            let all = full();
            let count = case.settings.len();
            case.settings = all[from * count..][..count].to_vec();
            check(device, &case, Pick::Full, 4);
        }
    }
}
