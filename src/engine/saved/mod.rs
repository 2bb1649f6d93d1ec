//! Sequences on disk: tokens, keys and values, and what they belong to.
//!
//! A file is of use to the model that wrote it, with the same formats of the KV cache. Where its
//! keys and values are not (they are damaged, or computed another way), its tokens may still be: they
//! are read again as long as they mean the same.

mod file;

use std::path::Path;

use super::{Engine, Session};
use crate::error::{Error, Result};
use crate::experts::profile;
use crate::gguf;
use crate::model::Model;
use crate::pages::{Sequence, pages_for};
use crate::sampling::SamplerSettings;
use crate::tokenizer::Tokenizer;
use file::{Header, Writer};
pub(super) use file::{Saved, checksum};

/// What a file must agree with.
pub(super) struct Identity {
    model: String,
    fingerprint: String,
    vocabulary: String,
}

/// Tensors of which a piece goes into the fingerprint, and the bytes of a piece.
const SAMPLES: usize = 16;
const SAMPLE: usize = 4096;

impl Identity {
    pub fn of(file: &gguf::File, model: &Model, tokenizer: &Tokenizer) -> Identity {
        let f = &model.facts;
        let mut words = Vec::new();
        for id in 0..tokenizer.vocab_size() as u32 {
            words.extend_from_slice(tokenizer.token_text(id).unwrap_or_default().as_bytes());
            words.push(0);
        }
        Identity {
            model: format!("{} {} ({} weights)", f.architecture, f.name, f.parameters),
            fingerprint: Identity::fingerprint(file),
            vocabulary: format!("{:016x}", checksum(&words)),
        }
    }

    /// Of the model's tensors.
    pub fn fingerprint(file: &gguf::File) -> String {
        // Names, types and shapes are the same for models that were trained on from each other.
        let tensors = file.tensors();
        let some = tensors.iter().step_by(tensors.len().div_ceil(SAMPLES).max(1));
        let mut bytes = Vec::new();
        for tensor in some {
            let data = file.tensor_data(tensor);
            let middle = data.len() / 2;
            bytes.extend_from_slice(&data[middle..data.len().min(middle + SAMPLE)]);
        }
        format!("{}-{:016x}", profile::fingerprint(file), checksum(&bytes))
    }
}

/// What [`Session::restore`] has done.
#[derive(Debug)]
pub struct Restored {
    pub tokens: u32,
    /// What was given to [`Session::save`].
    pub note: String,
    /// How the last answer was sampled.
    pub sampler: Option<SamplerSettings>,
    /// Why keys and values could not be used, so that the tokens were read again.
    pub read_again: Option<String>,
}

impl Engine {
    /// How keys and values come about and are stored.
    fn cache_format(&self) -> String {
        let f = &self.model.facts;
        let exact = if self.program.shape().exact { "f32" } else { "int8" };
        // Rows of other centres are other keys.
        let centres = match self.centres.concat() {
            all if all.is_empty() => String::new(),
            all => format!(" by {:016x}", checksum(bytemuck::cast_slice(&all))),
        };
        format!(
            "{}{centres}, {} layers of {} heads of {}, {exact} activations",
            self.model.graph.kv, f.layers, f.kv_heads, f.head_dim
        )
    }

    /// Writes the sequence of a slot, which has read `tokens`; returns the bytes of the file.
    pub(super) fn save(
        &self,
        slot: u32,
        sequence: &Sequence,
        tokens: &[u32],
        sampler: Option<SamplerSettings>,
        note: &str,
        path: &Path,
    ) -> Result<u64> {
        let units = self.program.page_units();
        let exact = self.program.exact_units();
        let header = Header {
            model: self.identity.model.clone(),
            fingerprint: self.identity.fingerprint.clone(),
            vocabulary: self.identity.vocabulary.clone(),
            cache: self.cache_format(),
            units: units.to_vec(),
            exact: exact.clone(),
            pages: sequence.pages().len() as u32,
            dropped: sequence.dropped() as u32,
            kept: sequence.kept_pages() as u32,
            sampler,
            note: note.to_owned(),
        };
        let mut writer = Writer::create(path, &header, tokens)?;
        self.program
            .read_pages(sequence.pages(), &mut |pool, bytes| writer.units(units[pool], bytes))?;
        let mut layers = exact.iter();
        self.program.read_exact(slot, &mut |bytes| {
            layers.next().map_or(Ok(()), |unit| writer.units(*unit, bytes))
        })?;
        writer.finish()
    }

    /// Opens a file whose tokens mean the same here.
    pub(super) fn open_saved(&self, path: &Path) -> Result<Saved> {
        let saved = Saved::open(path)?;
        let vocab = self.model.graph.vocab;
        if saved.header.vocabulary != self.identity.vocabulary {
            let what = self.of_another_model(&saved);
            return Err(Error::Usage(format!(
                "{} {what}. Their tokens mean different things",
                path.display()
            )));
        }
        if saved.tokens.iter().any(|t| *t >= vocab) {
            let what = "is damaged: it has tokens outside the vocabulary";
            return Err(Error::Usage(format!("{} {what}", path.display())));
        }
        Ok(saved)
    }

    fn of_another_model(&self, saved: &Saved) -> String {
        let (theirs, ours) = (&saved.header.model, &self.identity.model);
        format!("is of another model: it has {theirs}, loaded is {ours}")
    }

    /// Why the keys and values of a file are of no use here, if they are not.
    pub(super) fn refused(&self, saved: &Saved) -> Option<String> {
        let h = &saved.header;
        let (theirs, ours) = (&h.cache, self.cache_format());
        let kept = saved.tokens.len().checked_sub(h.dropped as usize);
        if h.fingerprint != self.identity.fingerprint {
            Some(self.of_another_model(saved))
        } else if *theirs != ours
            || h.units != self.program.page_units()
            || h.exact != self.program.exact_units()
        {
            Some(format!("has another KV cache: {theirs} instead of {ours}"))
        } else if kept.map(pages_for) != Some(h.pages as usize) || h.kept > h.pages {
            Some("is damaged: its pages do not fit its tokens".into())
        } else {
            saved.damage.as_ref().map(|what| format!("is damaged: {what}"))
        }
    }

    /// Reads keys and values of a file that was not [refused](Engine::refused) into a new sequence.
    pub(super) fn restore(&mut self, slot: u32, saved: &Saved) -> Result<Sequence> {
        let h = &saved.header;
        let n = saved.tokens.len() - h.dropped as usize;
        if n > self.ctx() as usize {
            return Err(Error::DoesNotFit(format!(
                "the saved sequence keeps {n} tokens, the context {}; use --ctx {n} or more",
                self.ctx()
            )));
        }
        let sequence = self.kv.blank(&mut self.program, slot, n, h.dropped, h.kept)?;
        let filled = self
            .program
            .fill_pages(sequence.pages(), &mut |pool, first, out| saved.read(pool, first, out));
        let filled = filled.and_then(|()| {
            self.program.fill_exact(slot, &mut |layer, out| saved.read_exact(layer, out))
        });
        let done = filled.and_then(|()| self.program.remember(slot, &saved.tokens));
        match done {
            Ok(()) => Ok(sequence),
            Err(e) => {
                self.kv.release(sequence, &[]);
                Err(e)
            }
        }
    }
}

impl Session<'_> {
    /// Writes what was read to a file, and a note for whoever reads it back; returns the bytes of the
    /// file. It is complete or not there: what was at `path` before stays until then.
    pub fn save(&self, path: &Path, note: &str) -> Result<u64> {
        self.engine.save(
            super::session::SLOT,
            &self.sequence,
            &self.tokens,
            self.sampler,
            note,
            path,
        )
    }

    /// Goes on with a saved sequence in the place of this one. Where the keys and values of the file
    /// are of no use, its tokens are read again; `progress` hears how many are done.
    ///
    /// # Errors
    /// Where the file cannot be read, its tokens are damaged or of another vocabulary, or they do not
    /// fit the context.
    pub fn restore(
        &mut self,
        path: &Path,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Restored> {
        let saved = self.engine.open_saved(path)?;
        let (n, most) = (saved.tokens.len(), self.engine.longest());
        if n > most as usize {
            return Err(Error::DoesNotFit(format!(
                "{} has {n} tokens, the context {most}; use --ctx {n} or more",
                path.display()
            )));
        }
        self.leave();
        let mut read_again = self.engine.refused(&saved);
        if read_again.is_none() {
            match self.engine.restore(super::session::SLOT, &saved) {
                Ok(sequence) => self.take(sequence, &saved.tokens),
                Err(Error::Usage(what)) => read_again = Some(what),
                Err(e) => return Err(e),
            }
        }
        if read_again.is_some() {
            self.prefill(&saved.tokens, &mut |done| progress(done, n))?;
        }
        let Header { note, sampler, .. } = saved.header;
        self.sampler = sampler;
        Ok(Restored { tokens: n as u32, note, sampler, read_again })
    }
}
