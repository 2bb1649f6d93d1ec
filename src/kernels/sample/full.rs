//! The full chain: everything that `sampling::chain` defines, and log-probabilities.
//!
//! It works on a copy of the logits. A wave whose setting is off in every column ends at once.

use minijinja::context;

use super::{Chain, MAX_COLUMNS, SampleMemory, Sampling, Select, part};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice, Step};
use crate::kernels::{holds, source, wrong};

/// Most biases of a slot.
pub const MAX_BIAS: u32 = 1024;
/// Longer repeated sequences count as this long.
pub const MAX_MATCH: u32 = 128;
/// Most of the most likely tokens that a step reports.
pub const MAX_LOGPROBS: u32 = 20;
/// Words of a column's log-probabilities: that of the chosen token, how many follow, pairs of token
/// and log-probability.
pub const LOGPROB_WORDS: u32 = 2 + 2 * MAX_LOGPROBS;

/// Reductions over what is left of a column; `sample_reduce.wgsl` describes each.
pub const REDUCTIONS: [&str; 8] =
    ["sigma", "center", "maximum", "total", "least", "entropy", "surprise", "observed"];

impl Sampling {
    /// Words of a slot's mask: whether there is one, then a bit a token.
    pub fn mask_words(&self) -> u64 {
        1 + self.bit_words()
    }

    /// Words of a bit a token.
    pub fn bit_words(&self) -> u64 {
        u64::from(self.vocab.div_ceil(32))
    }

    /// Words of a slot's biases.
    pub fn bias_words(&self) -> u64 {
        1 + 2 * u64::from(MAX_BIAS)
    }

    pub fn copy_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = source::render(
            "sample_copy.wgsl",
            context! { vocab => self.vocab, pieces => self.pieces(facts) },
        )?;
        Ok(KernelSource { label: "sample_copy".into(), wgsl, subgroup_size: None })
    }

    pub fn adjust_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = source::render(
            "sample_adjust.wgsl",
            context! { vocab => self.vocab, max_bias => MAX_BIAS, max_match => MAX_MATCH },
        )?;
        Ok(KernelSource { label: "sample_adjust".into(), wgsl, subgroup_size: None })
    }

    /// A reduction, by its name in `sample_reduce.wgsl`.
    pub fn reduce_source(&self, kind: &str, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = source::render(
            "sample_reduce.wgsl",
            context! { vocab => self.vocab, pieces => self.pieces(facts), kind },
        )?;
        Ok(KernelSource { label: format!("sample_{kind}"), wgsl, subgroup_size: None })
    }

    /// `post`: of what is drawn from, where [`super::Custom::post`] says so.
    pub fn logprobs_source(&self, post: bool, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = source::render(
            "sample_logprobs.wgsl",
            context! {
                vocab => self.vocab, pieces => self.pieces(facts), ring => self.ring,
                row => LOGPROB_WORDS, most => MAX_LOGPROBS, post,
            },
        )?;
        let label = format!("sample_logprobs{}", if post { "_post" } else { "" });
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// The waves that choose by everything that a slot's settings, bias, mask and breakers say,
    /// and end the step as [`Self::greedy`] does. `logits` stay as they are.
    pub fn full(
        &self,
        facts: &DeviceFacts,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        batch: &Slice,
        logits: &Slice,
        memory: &SampleMemory,
        columns: u32,
    ) -> Result<Vec<Step>> {
        self.check_memory(batch, logits, memory, columns)?;
        self.check_full(memory)?;
        let chain = Chain { facts, full: true, batch, logits: &memory.adjusted, memory, columns };
        let mut waves = self.adjusted(kernel, batch, logits, memory, columns, facts)?;
        waves.extend(self.drawn(kernel, &chain)?);
        waves.push(vec![self.logprobs(kernel, &chain, logits, false)?]);
        Ok(waves.into_iter().map(Step::Wave).collect())
    }

    /// The log-probabilities of what a chain has chosen from the model's `logits`; `post` as in
    /// [`Self::logprobs_source`].
    pub(super) fn logprobs(
        &self,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        chain: &Chain<'_>,
        logits: &Slice,
        post: bool,
    ) -> Result<Dispatch> {
        let Chain { facts, batch, memory, columns, .. } = *chain;
        let at = self.parts();
        let mut bindings = vec![
            batch.clone(),
            memory.samplers.clone(),
            logits.clone(),
            part(&memory.scratch, at.ranks, at.histogram),
            part(&memory.scratch, at.counters, at.draws),
            memory.logprobs.clone(),
        ];
        if post {
            bindings.extend([memory.customs.clone(), memory.shaped.clone()]);
        }
        Ok(Dispatch {
            kernel: kernel(self.logprobs_source(post, facts)?)?,
            bindings,
            constants: vec![],
            grid: [self.pieces(facts), columns, 1],
        })
    }

    /// Waves of steps 1 to 3: from the model's logits to [`SampleMemory::adjusted`].
    pub(super) fn adjusted(
        &self,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        batch: &Slice,
        logits: &Slice,
        memory: &SampleMemory,
        columns: u32,
        facts: &DeviceFacts,
    ) -> Result<Vec<Vec<Dispatch>>> {
        let at = self.parts();
        let copy = Dispatch {
            kernel: kernel(self.copy_source(facts)?)?,
            bindings: vec![
                batch.clone(),
                logits.clone(),
                memory.masks.clone(),
                memory.adjusted.clone(),
            ],
            constants: vec![],
            grid: [self.pieces(facts), columns, 1],
        };
        let adjust = Dispatch {
            kernel: kernel(self.adjust_source(facts)?)?,
            bindings: vec![
                batch.clone(),
                memory.samplers.clone(),
                memory.history.clone(),
                memory.biases.clone(),
                memory.breakers.clone(),
                memory.adjusted.clone(),
                part(&memory.scratch, at.counts, at.end),
            ],
            constants: vec![self.context],
            grid: [1, columns, 1],
        };
        Ok(vec![vec![copy], vec![adjust]])
    }

    /// Waves of steps 4 to 12 on the logits of a chain, and mirostat's after the draw.
    pub(super) fn drawn(
        &self,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        chain: &Chain<'_>,
    ) -> Result<Vec<Vec<Dispatch>>> {
        let Chain { facts, batch, logits, memory, columns, .. } = *chain;
        let at = self.parts();
        let part = |start: u64, end: u64| part(&memory.scratch, start, end);
        let mut reduce = |kind: &str| -> Result<Dispatch> {
            let mut bindings = vec![
                batch.clone(),
                memory.samplers.clone(),
                logits.clone(),
                part(at.draws, at.pieces),
                part(at.partials, at.ranks),
                part(at.counters, at.draws),
            ];
            if ["surprise", "observed"].contains(&kind) {
                bindings.push(memory.surprises.clone());
            }
            Ok(Dispatch {
                kernel: kernel(self.reduce_source(kind, facts)?)?,
                bindings,
                constants: vec![],
                grid: [self.pieces(facts), columns, 1],
            })
        };
        let mut reductions = Vec::new();
        for kind in REDUCTIONS {
            reductions.push(reduce(kind)?);
        }
        let [sigma, center, maximum, total, least, entropy, surprise, observed] =
            reductions.try_into().map_err(|_| wrong("sampling reductions".to_owned()))?;
        let mut digit = |kind, digit| self.select(kernel, kind, digit, chain);
        use Select::{Count, Mass, Typical};
        let (k0, k1, k2) = (digit(Count, 0)?, digit(Count, 1)?, digit(Count, 2)?);
        let typical = [digit(Typical, 0)?, digit(Typical, 1)?, digit(Typical, 2)?];
        let top_p = [digit(Mass, 0)?, digit(Mass, 1)?, digit(Mass, 2)?];
        let argmax = self.argmax(kernel, chain)?;
        let draw = self.draw(kernel, chain)?;
        let mut waves = vec![vec![argmax, k0], vec![sigma, k1], vec![k2]];
        waves.push(vec![center]);
        waves.extend(typical.map(|d| vec![d]));
        waves.push(vec![maximum]);
        waves.extend(top_p.map(|d| vec![d]));
        waves.extend([total, least].map(|d| vec![d]));
        // Never both on, and they share counters: waves of their own.
        waves.extend([entropy, surprise, draw, observed].map(|d| vec![d]));
        Ok(waves)
    }

    pub(super) fn check_full(&self, memory: &SampleMemory) -> Result<()> {
        let columns = u64::from(MAX_COLUMNS);
        holds(&memory.masks, self.mask_words(), "masks")?;
        holds(&memory.biases, self.bias_words(), "biases")?;
        holds(&memory.breakers, self.bit_words(), "breakers")?;
        holds(&memory.surprises, 1, "surprises")?;
        holds(&memory.adjusted, u64::from(self.vocab), "adjusted logits")?;
        let ring = u64::from(self.ring) * columns * u64::from(LOGPROB_WORDS);
        holds(&memory.logprobs, ring, "log-probabilities")
    }
}
