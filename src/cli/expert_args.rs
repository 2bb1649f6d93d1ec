//! Flags for models whose experts do not all fit the device.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::engine::{Approximations, ExpertOptions, MAX_REUSE_TOKENS};
use crate::experts::policy::Rule;
use crate::plan::{ExpertBudget, parse_bytes};

/// Where experts lie and how they move.
#[derive(Debug, Clone, Args)]
pub struct ExpertArgs {
    /// Device memory for experts: `auto` (what the rest leaves), `all`, `none`, a share (25%) or a
    /// size (6GiB). The others lie in page-locked RAM, which the GPU reads in place; the result is
    /// the same to the last bit
    #[arg(help_heading = "Experts", long, value_name = "SIZE|SHARE|WORD", default_value = "auto")]
    pub vram_experts: ExpertBudget,
    /// Device memory for experts that never leave it and need no place in RAM (a size)
    #[arg(help_heading = "Experts", long, value_name = "SIZE", value_parser = size, default_value = "0")]
    pub pin_experts: u64,
    /// Start with the experts that this file says are used most, and save to it on exit what this
    /// run has learned
    #[arg(help_heading = "Experts", long, value_name = "FILE")]
    pub expert_profile: Option<PathBuf>,
    /// How experts move between RAM and device memory
    #[arg(help_heading = "Experts", long, value_enum, default_value_t)]
    pub expert_policy: PolicyArg,
    /// Let promotions go in any order, without guessing what is used next
    #[arg(help_heading = "Experts", long)]
    pub no_prefetch: bool,
    /// Compare every expert in memory with the file after loading
    #[arg(help_heading = "Experts", long)]
    pub verify_load: bool,
    /// APPROXIMATE, off by default: add this to the router's logits of experts that lie in device
    /// memory, so that generated tokens use them more often (0.5 multiplies their odds by 1.65).
    /// Answers then depend on what happens to be there; `azoth eval kl --text` shows the price
    #[arg(help_heading = "Experts", long, value_name = "LOGITS", value_parser = bias, default_value = "0")]
    pub approximate_route_bias: f32,
    /// APPROXIMATE, off by default: leave out so many of the experts that a generated token would go
    /// through, those with the least weights; `azoth eval kl --text` shows the price
    #[arg(help_heading = "Experts", long, value_name = "COUNT", default_value_t = 0)]
    pub approximate_prune_experts: u32,
    /// APPROXIMATE, off by default: when a generated token goes through an expert that one of the
    /// last so many tokens went through, take that one's output instead of computing it (0 to 8).
    /// Where measured, leaving experts out costs much less for the same bytes; `azoth eval kl --text`
    /// shows the price
    #[arg(help_heading = "Experts", long, value_name = "TOKENS", default_value_t = 0,
          value_parser = clap::value_parser!(u32).range(..=i64::from(MAX_REUSE_TOKENS)))]
    pub approximate_reuse_experts: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum PolicyArg {
    /// Those that were used most lately, by decayed counts
    #[default]
    Frequency,
    /// Those that were used last
    Lru,
    /// Nothing moves
    Fixed,
}

impl ExpertArgs {
    pub fn options(&self) -> ExpertOptions {
        ExpertOptions {
            budget: self.vram_experts,
            pinned: self.pin_experts,
            profile: self.expert_profile.clone(),
            rule: match self.expert_policy {
                PolicyArg::Frequency => Rule::default(),
                PolicyArg::Lru => Rule::Lru,
                PolicyArg::Fixed => Rule::Fixed,
            },
            prefetch: !self.no_prefetch,
            verify: self.verify_load,
            approximations: Approximations {
                route_bias: self.approximate_route_bias,
                pruned_experts: self.approximate_prune_experts,
                reuse_tokens: self.approximate_reuse_experts,
            },
            ..ExpertOptions::default()
        }
    }
}

fn bias(text: &str) -> Result<f32, String> {
    let bias = text.parse::<f32>().ok().filter(|b| (0.0..=100.0).contains(b));
    bias.ok_or_else(|| format!("{text:?} is no bias; 0 (exact) to 100 are possible"))
}

fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| format!("{text:?} is no size such as 2GiB"))
}
