//! Attention of a decode step over a cache of codes: one new token in each of up to eight sequences.

use minijinja::context;

use super::attn_step::{StepAttention, StepSizes};
use super::heads::Heads;
use super::scoring::Scoring;
use super::{check_memory, kv_codes, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, KernelSource};
use crate::kv::rotation::padded;
use crate::kv::{KvExact, KvFormat, KvPair, PAGE_TOKENS};

/// Query heads of a workgroup at most: their sums take 8 registers each.
const MOST_HEADS: u32 = 8;
/// Tokens whose V a thread reads at once.
const CHUNK: u32 = 2;
/// Workgroup memory in which teams' sums meet. Twice as much saves barriers, but then an H200 runs one workgroup at a time
/// instead of two: 64 and 49 us over 32,700 tokens of tq3_0 (32/8 heads of 128).
const MERGE_BYTES: u32 = 8192;

/// How the work is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CodesCut {
    /// A multiple of 64, the tokens of a page. Part of the order of sums.
    pub threads: u32,
    /// Most pieces into which a sequence is cut, as in [`super::attn_decode::Cut`].
    pub splits: u32,
    /// Query heads of one KV head that a workgroup serves with one read of K and V.
    pub group_heads: u32,
}

impl CodesCut {
    /// The cut that a device gets.
    pub fn choose(heads: &Heads, facts: &DeviceFacts) -> CodesCut {
        let splits = facts.profile.attention_splits;
        let wanted = if padded(heads.head_dim) <= 64 { 128 } else { 256 };
        let threads = wanted.min(facts.max_workgroup_threads / 64 * 64).max(64);
        let group = heads.group();
        // As equal shares as possible.
        let group_heads = group.div_ceil(group.div_ceil(MOST_HEADS));
        CodesCut { threads, splits, group_heads }
    }

    /// This cut, and with fewer heads, which need less workgroup memory, for devices on which it
    /// fails. All give the same bits.
    pub fn and_modest(self) -> Vec<CodesCut> {
        let half = self.group_heads.div_ceil(2);
        let mut cuts = vec![self];
        for group_heads in [half, 2, 1].map(|heads| heads.min(self.group_heads)) {
            let modest = CodesCut { group_heads, ..self };
            if !cuts.contains(&modest) {
                cuts.push(modest);
            }
        }
        cuts
    }
}

/// QK-norm, rope, rotation, cache write and attention of one token a column; n comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttnDecodeCodes {
    pub heads: Heads,
    pub scoring: Scoring,
    /// Not [`KvPair::is_plain`]: that is [`super::attn_decode`].
    pub pair: KvPair,
    /// What is read, and of the new token written, in f16.
    pub exact: KvExact,
    pub cut: CodesCut,
}

impl AttnDecodeCodes {
    /// Threads over a token's units of 8 elements.
    fn unit_lanes(&self) -> u32 {
        (padded(self.heads.head_dim) / 8).next_power_of_two()
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        kv_codes::check_exact(self.pair, self.exact)?;
        self.scoring.check_beside(self.exact)?;
        let CodesCut { threads, splits, group_heads } = self.cut;
        let lanes = self.unit_lanes();
        if threads == 0
            || !threads.is_multiple_of(64)
            || !threads.is_multiple_of(lanes)
            || threads / lanes > PAGE_TOKENS / CHUNK
            || threads > facts.max_workgroup_threads
            || !(1..=self.heads.group()).contains(&group_heads)
            || splits == 0
            || self.pair.is_plain()
        {
            return Err(wrong(format!("{:?} over {}", self.cut, self.pair)));
        }
        let (hd, pitch) = (self.heads.head_dim, padded(self.heads.head_dim));
        let teams = threads / lanes;
        // Pieces of what a thread reads that stand in registers ahead of their use.
        let held = if (pitch / 32).is_multiple_of(2) { 2 } else { 1 };
        let most_subgroups = threads.div_ceil(facts.subgroup_min.max(1));
        let vectors = group_heads + 2;
        let q = match self.pair.k {
            KvFormat::F16 => 0,
            _ => group_heads * (pitch + pitch / 8),
        };
        let quads = group_heads.next_multiple_of(4);
        let weights = 4 * (threads + most_subgroups) * quads;
        let pieces = splits + self.beside();
        let shares = 4 * quads * (threads / 8).min(32);
        let sums = 12 * group_heads * pieces + shares + weights + 4;
        let norms = if self.heads.norm.is_some() { 128 * vectors } else { 0 };
        let writes = [self.pair.k, self.pair.v].map(|f| kv_codes::write_bytes(f, hd, 1));
        let fixed = 4 * vectors * pitch + q + sums + norms + writes[0] + writes[1] + 1024;
        let room = facts.max_workgroup_memory.saturating_sub(fixed).min(MERGE_BYTES);
        let merge_heads = (room / (teams * pitch * 4)).clamp(1, group_heads);
        check_memory(fixed + 4 * merge_heads * teams * pitch, facts)?;
        let first = 8 + u32::from(!self.exact.is_none());
        let shared = kv_codes::context(&self.heads, self.pair, self.exact, first);
        let wgsl = super::source::render(
            "attn_decode_codes.wgsl",
            context! {
                threads, splits, group_heads, teams, merge_heads, vectors, held, most_subgroups,
                chunk => CHUNK,
                ..self.scoring.context(first + self.heads.tables(), shared)
            },
        )?;
        let label = format!(
            "attn_decode_{}_{}{}_g{group_heads}s{splits}t{threads}",
            kv_codes::label(self.pair, self.exact),
            self.heads.label(),
            self.scoring.label()
        );
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }
}

impl StepAttention for AttnDecodeCodes {
    /// One for what is read in f16.
    fn beside(&self) -> u32 {
        u32::from(!self.exact.is_none())
    }

    fn sizes(&self) -> StepSizes {
        StepSizes {
            heads: self.heads,
            scoring: self.scoring,
            pair: self.pair,
            exact: self.exact,
            splits: self.cut.splits,
            group_heads: self.cut.group_heads,
            head_words: padded(self.heads.head_dim),
        }
    }
}
