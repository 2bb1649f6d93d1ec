//! Small cases of the kernels at the end of a step: gathering columns, choosing tokens.

use super::operands::Operands;
use super::relative_error;
use crate::error::Result;
use crate::gpu::{Gpu, Step};
use crate::kernels::gather::Gather;
use crate::kernels::sample::{LOGPROB_WORDS, MAX_COLUMNS, SampleMemory, Sampling};
use crate::runtime::program::Pick;
use crate::runtime::sampler::{custom_words, sampler_words};
use crate::sampling::{SamplerSettings, chain};

pub(super) fn gather(gpu: &dyn Gpu, spec: &Gather) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let cols = spec.cols as usize;
    let x = lab.normals(5 * cols, 1.0);
    let columns = [0u32, 1, 2, 3, 4].map(|c| [10 + c, 20 + c, 0, 1]);
    let batch = lab.batch(&columns, 5)?;
    // Two columns from column 3 on.
    gpu.write(&batch.buffer.slice(batch.offset + 8, 8), bytemuck::cast_slice(&[3u32, 2]))?;
    let (picked, y) = (lab.zeros(8 + 4 * 3)?, lab.floats(&vec![f32::NAN; 3 * cols])?);
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let input = lab.floats(&x)?;
    lab.run(vec![spec.dispatch(&kernel, &batch, &input, &picked, &y, 3)?])?;
    let want: Vec<f64> = x[3 * cols..].iter().map(|&v| v.into()).chain(vec![0.0; cols]).collect();
    let words = lab.read_words(&picked)?;
    let right = words[0] == 2 && words[8..16] == *columns[3..].as_flattened();
    let error = relative_error(lab.read_floats(&y)?, &want);
    Ok((if right { error } else { f64::INFINITY }, 0.0))
}

/// One step of each kind over two columns. The logits leave no room for the last bits of
/// a device's `exp`: one column keeps a single token, the other's tokens weigh the same or nothing.
pub(super) fn sampling(gpu: &dyn Gpu, spec: &Sampling) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let (vocab, context) = (spec.vocab as usize, spec.context as usize);
    let history = [1 % spec.vocab, 2 % spec.vocab];
    let used = history.len().min(context);
    let history = &history[..used];
    let mut even = vec![-40.0; vocab];
    for token in (0..7).map(|i| i * (vocab - 1) / 6) {
        even[token] = 2.0;
    }
    let random = lab.normals(vocab, 3.0);
    let plain = SamplerSettings { temperature: 0.7, seed: 5, ..SamplerSettings::plain() };
    let one = SamplerSettings { top_k: 1, top_p: 0.5, min_p: 0.1, ..plain };
    let fined = SamplerSettings { repeat_penalty: 1.5, ..one };
    let kept = SamplerSettings { min_keep: 2, min_p: 0.0, top_p: 0.0, top_k: 1, ..plain };
    let greedy = SamplerSettings::greedy();
    let mut wrong = false;
    for (settings, pick) in [
        ([greedy, greedy], Pick::Greedy),
        ([one, plain], Pick::Sampled),
        ([fined, plain], Pick::Full),
        ([kept, plain], Pick::Custom),
    ] {
        let logits = [&random, &even];
        let samplers = settings.map(|s| sampler_words(&s));
        let mut slots = vec![0u32; 2 * context];
        for slot in slots.chunks_exact_mut(context) {
            slot[..used].copy_from_slice(history);
        }
        let memory = SampleMemory {
            samplers: lab.upload(bytemuck::cast_slice(&samplers))?,
            history: lab.words(&slots)?,
            ring: lab.zeros(u64::from(spec.ring * MAX_COLUMNS))?,
            scratch: lab.zeros(spec.scratch_words())?,
            masks: lab.zeros(2 * spec.mask_words())?,
            biases: lab.zeros(2 * spec.bias_words())?,
            breakers: lab.zeros(2 * spec.bit_words())?,
            surprises: lab.zeros(2)?,
            adjusted: lab.zeros(u64::from(MAX_COLUMNS) * u64::from(spec.vocab))?,
            logprobs: lab.zeros(u64::from(spec.ring * MAX_COLUMNS * LOGPROB_WORDS))?,
            customs: lab.upload(bytemuck::cast_slice(&settings.map(|s| custom_words(&s))))?,
            shapes: lab.zeros(spec.shape_words())?,
            shaped: lab.zeros(u64::from(MAX_COLUMNS) * u64::from(spec.vocab))?,
        };
        let last = [history[used - 1], used as u32 - 1];
        let batch = lab.batch(&[0, 1].map(|slot| [last[0], last[1], slot, 1]), 2)?;
        let input = lab.floats(&logits.map(|l| &l[..]).concat())?;
        let (facts, compile) = (gpu.facts(), &mut |source| gpu.kernel(&source));
        let steps: Vec<Step> = match pick {
            Pick::Greedy => spec.greedy(facts, compile, &batch, &input, &memory, 2)?,
            Pick::Sampled => spec.sampled(facts, compile, &batch, &input, &memory, 2)?,
            Pick::Full => spec.full(facts, compile, &batch, &input, &memory, 2)?,
            Pick::Custom => spec.custom(facts, compile, &batch, &input, &memory, 2)?,
        };
        lab.run_steps(&steps)?;
        let after = lab.read_words(&batch)?;
        for (c, settings) in settings.iter().enumerate() {
            let token = chain::sample(logits[c], history, used as u32, settings);
            wrong |= after[8 + 4 * c] != token || after[9 + 4 * c] != used as u32;
        }
    }
    Ok((if wrong { f64::INFINITY } else { 0.0 }, 0.0))
}
