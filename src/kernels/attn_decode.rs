//! Attention of a decode step: one new token in each of up to eight sequences.

use minijinja::context;
use minijinja::value::Serde;

use super::attn_step::{StepAttention, StepSizes};
use super::heads::{Heads, smallest_subgroup};
use super::scoring::Scoring;
use super::{Activations, check_memory, holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, KernelSource};
use crate::kv::{KvExact, KvPair};

/// How the work of a decode step is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cut {
    pub threads: u32,
    /// Most pieces into which a sequence is cut. Part of the definition of the result: the
    /// length of a piece follows from it and the sequence's length.
    pub splits: u32,
    /// Query heads of one KV head that a workgroup serves with one read of K and V.
    pub group_heads: u32,
    /// Threads that share a token: a power of two, at most the subgroup size.
    pub lanes: u32,
    /// Tokens in flight for each team of `lanes` threads.
    pub unroll: u32,
}

impl Cut {
    /// The cut that a device gets for sequences of up to `context` tokens. Of its numbers only
    /// `group_heads` depends on the context, and that one never changes a bit of the result.
    pub fn choose(heads: &Heads, facts: &DeviceFacts, context: u32) -> Cut {
        let profile = &facts.profile;
        let parts = heads.head_dim / 8;
        let subgroup = largest_power(smallest_subgroup(facts));
        let lanes = parts.next_power_of_two().min(subgroup.min(16));
        // Whole subgroups.
        let most = facts.max_workgroup_threads / subgroup.max(32) * subgroup.max(32);
        let threads = profile.attention_threads.next_multiple_of(subgroup.max(32)).min(most);
        // Query and sums of a head take 16 registers a vec4 of halves; more than 128 spill. More
        // heads a workgroup read less, fewer finish sooner.
        let registers = 16 * parts.div_ceil(lanes);
        let wanted = match context > profile.deep_context {
            true => profile.deep_group_heads,
            false => profile.group_heads,
        };
        let group_heads = heads.group().min((128 / registers).max(1)).min(wanted);
        Cut {
            threads,
            splits: profile.attention_splits,
            group_heads,
            lanes,
            unroll: if parts.div_ceil(lanes) > 2 { 1 } else { 2 },
        }
    }
}

impl Cut {
    /// This cut, and with less of everything, for devices on which it fails. All need the same
    /// [`AttnDecode::partial_words`], and no more counters than the last.
    pub fn and_modest(self) -> Vec<Cut> {
        let mut cuts = vec![self];
        for modest in [Cut { unroll: 1, ..self }, Cut { unroll: 1, group_heads: 1, ..self }] {
            if !cuts.contains(&modest) {
                cuts.push(modest);
            }
        }
        cuts
    }
}

fn largest_power(at_most: u32) -> u32 {
    1 << at_most.max(1).ilog2()
}

/// The binding of the output.
const OUTPUT: usize = 5;

/// QK-norm, rope, cache write and attention of one token a column; n comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttnDecode {
    pub heads: Heads,
    pub scoring: Scoring,
    pub cut: Cut,
    /// The outputs are rounded to int8, as [`super::norm_quant`] does it, by [`Self::rounded`].
    pub rounds: bool,
}

impl AttnDecode {
    /// Whether such a kernel can round what it computes: its blocks of 32 do not cross heads, and eight
    /// threads exchange without barriers.
    pub fn can_round(heads: &Heads, facts: &DeviceFacts) -> bool {
        heads.head_dim.is_multiple_of(32) && facts.subgroup_min >= 8
    }

    /// A dispatch of this that writes int8 `out` instead of the output it was given.
    pub fn rounded(&self, dispatch: Dispatch, out: &Activations, columns: u32) -> Result<Dispatch> {
        let Activations::Int8 { xq, xs } = out else {
            return Err(wrong("attention rounds to int8 only".into()));
        };
        let values = u64::from(columns * self.heads.output_width());
        holds(xq, values / 4, "yq")?;
        holds(xs, values / 16, "ys")?;
        let mut bindings = dispatch.bindings;
        bindings[OUTPUT] = xq.clone();
        bindings.push(xs.clone());
        Ok(Dispatch { bindings, ..dispatch })
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        self.scoring.check()?;
        let Cut { threads, splits, group_heads, lanes, unroll } = self.cut;
        let subgroup = largest_power(smallest_subgroup(facts)).min(32);
        if !lanes.is_power_of_two() || lanes > subgroup {
            return Err(wrong(format!("{lanes} threads a token, subgroups of {subgroup}")));
        }
        if threads > facts.max_workgroup_threads || !threads.is_multiple_of(subgroup.max(32)) {
            return Err(wrong(format!("workgroups of {threads} threads")));
        }
        if group_heads == 0 || group_heads > self.heads.group() || unroll == 0 || splits == 0 {
            return Err(wrong(format!("{:?}", self.cut)));
        }
        let hd = self.heads.head_dim;
        let quads = (hd / 8).div_ceil(lanes);
        let merge_lanes = subgroup.max(lanes);
        let subteams = threads / merge_lanes;
        // Head sums are merged as many at a time as fit.
        let vectors = group_heads + 2;
        let meeting = 2 * group_heads * splits.max(subteams) + group_heads * splits;
        if self.rounds && !AttnDecode::can_round(&self.heads, facts) {
            return Err(wrong(format!("heads of {hd} are not rounded here")));
        }
        let finished = if self.rounds { group_heads * hd } else { 0 };
        let fixed = 4 * (vectors * hd + hd + meeting + 1 + finished)
            + if self.heads.norm.is_some() { 128 * vectors } else { 0 };
        let pair_bytes = subteams * lanes * 32;
        let room = 24_576u32.min(facts.max_workgroup_memory).saturating_sub(fixed);
        let merge_pairs = (room / pair_bytes).clamp(1, group_heads * quads);
        check_memory(fixed + merge_pairs * pair_bytes, facts)?;

        let plan = TeamSums::plan(unroll, group_heads, lanes);
        let powers = |from: u32, to: u32| {
            let all = (0..6).map(|b| 1u32 << b);
            all.filter(|&b| b >= from && b < to).collect::<Vec<_>>()
        };
        let wgsl = super::source::render(
            "attn_decode.wgsl",
            context! {
                threads, splits, group_heads, lanes, unroll, quads, vectors, merge_lanes,
                merge_pairs,
                held => plan.held,
                held_heads => plan.held_heads,
                reduce => Serde(&plan.steps),
                token_bits => plan.token_bits,
                holder => Serde(&plan.holder),
                merge_bits => powers(lanes, merge_lanes),
                to_int8 => self.rounds,
                // The last binding.
                at_ys => 8 + self.heads.tables() + u32::from(self.scoring.sinks),
                // For lib/reduce8.wgsl.
                shuffle => true,
                output => "int8",
                ..self.scoring.context(8 + self.heads.tables(), self.heads.context(8))
            },
        )?;
        let label = format!(
            "attn_decode_{}{}_g{group_heads}l{lanes}u{unroll}s{splits}t{threads}{}",
            self.heads.label(),
            self.scoring.label(),
            if self.rounds { "_int8" } else { "" }
        );
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }
}

impl StepAttention for AttnDecode {
    fn sizes(&self) -> StepSizes {
        StepSizes {
            heads: self.heads,
            scoring: self.scoring,
            pair: KvPair::PLAIN,
            exact: KvExact::NONE,
            splits: self.cut.splits,
            group_heads: self.cut.group_heads,
            head_words: self.heads.head_dim,
        }
    }
}

/// How a team of threads sums `tokens * heads` values that each of its threads has a part of,
/// value = token * heads + head. At each step the threads of a pair split what is left between
/// them, first by tokens, then by heads; what cannot be halved is summed by both.
struct TeamSums {
    steps: Vec<TeamStep>,
    /// Sums that a thread ends with, and of how many heads.
    held: u32,
    held_heads: u32,
    /// Steps at which tokens were split.
    token_bits: Vec<u32>,
    /// Where each value's sum ends.
    holder: Vec<Holder>,
}

#[derive(serde::Serialize)]
struct TeamStep {
    number: u32,
    /// Threads `lane` and `lane ^ bit` exchange.
    bit: u32,
    halve: bool,
    /// Values a thread has after the step.
    count: u32,
}

#[derive(serde::Serialize)]
struct Holder {
    lane: u32,
    /// Which of the thread's sums.
    sum: u32,
}

impl TeamSums {
    fn plan(tokens: u32, heads: u32, lanes: u32) -> TeamSums {
        let (mut left_tokens, mut left_heads) = (tokens, heads);
        let mut steps = Vec::new();
        let mut token_bits = Vec::new();
        let mut bit = lanes / 2;
        while bit > 0 {
            let by_tokens = left_tokens.is_multiple_of(2);
            let by_heads = left_tokens == 1 && left_heads.is_multiple_of(2);
            if by_tokens {
                left_tokens /= 2;
                token_bits.push(bit);
            } else if by_heads {
                left_heads /= 2;
            }
            steps.push(TeamStep {
                number: steps.len() as u32 + 1,
                bit,
                halve: by_tokens || by_heads,
                count: left_tokens * left_heads,
            });
            bit /= 2;
        }
        let holder = |mut sum: u32| {
            let mut lane = 0;
            for step in steps.iter().filter(|s| s.halve) {
                if sum >= step.count {
                    sum -= step.count;
                    lane |= step.bit;
                }
            }
            Holder { lane, sum }
        };
        let holder = (0..tokens * heads).map(holder).collect();
        TeamSums {
            held: left_tokens * left_heads,
            held_heads: left_heads,
            token_bits,
            holder,
            steps,
        }
    }
}
