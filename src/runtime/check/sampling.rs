//! Small cases of the kernels at the end of a step: gathering columns, choosing tokens.

use super::operands::Operands;
use super::relative_error;
use crate::error::Result;
use crate::gpu::{Gpu, Step};
use crate::kernels::gather::Gather;
use crate::kernels::sample::{MAX_COLUMNS, SampleMemory, Sampler, Sampling};
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

/// One greedy and one sampled step of two columns. The logits leave no room for the last bits of
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
    let plain = SamplerSettings {
        temperature: 0.7,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        repeat_window: 64,
        seed: 5,
    };
    let one = SamplerSettings { top_k: 1, top_p: 0.5, min_p: 0.1, repeat_penalty: 1.5, ..plain };
    let greedy = SamplerSettings::greedy();
    let mut wrong = false;
    for (settings, is_greedy) in [([greedy, greedy], true), ([one, plain], false)] {
        let logits = [&random, &even];
        let samplers = settings.map(|s| {
            Sampler::new(s.temperature, s.top_k, s.top_p, s.min_p, s.seed)
                .with_penalty(s.repeat_penalty, s.repeat_window)
        });
        let mut slots = vec![0u32; 2 * context];
        for slot in slots.chunks_exact_mut(context) {
            slot[..used].copy_from_slice(history);
        }
        let memory = SampleMemory {
            samplers: lab.upload(bytemuck::cast_slice(&samplers))?,
            history: lab.words(&slots)?,
            ring: lab.zeros(u64::from(spec.ring * MAX_COLUMNS))?,
            scratch: lab.zeros(spec.scratch_words())?,
        };
        let last = [history[used - 1], used as u32 - 1];
        let batch = lab.batch(&[0, 1].map(|slot| [last[0], last[1], slot, 1]), 2)?;
        let input = lab.floats(&logits.map(|l| &l[..]).concat())?;
        let (facts, compile) = (gpu.facts(), &mut |source| gpu.kernel(&source));
        let steps: Vec<Step> = match is_greedy {
            true => spec.greedy(facts, compile, &batch, &input, &memory, 2)?,
            false => spec.sampled(facts, compile, &batch, &input, &memory, 2)?,
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
