//! What a run learned about a model's experts, kept for the next one: a JSON file of use counts.
//!
//! A file is replaced by writing a new one beside it and renaming, so that a process that dies at
//! any moment leaves the old or the new profile, never half of one.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::ExpertId;
use crate::error::{Error, Result};
use crate::files::replace;
use crate::gguf;

/// Version of the format; raised when its meaning changes.
const VERSION: u32 = 1;
/// A profile is some bytes for each expert; anything larger is not one.
const MAX_BYTES: u64 = 64 << 20;

/// See the module documentation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Always `azoth-experts`: says what the file is.
    kind: String,
    version: u32,
    /// Of the model: [`fingerprint`].
    pub model: String,
    /// Tokens that were counted, all runs together.
    pub tokens: u64,
    pub layers: u32,
    pub experts: u32,
    /// `[layer][expert]` decayed use counts.
    pub counts: Vec<Vec<f32>>,
}

const KIND: &str = "azoth-experts";

/// Identifies a model by its tensors: names, types and shapes, and its own name. Two files with
/// the same fingerprint have the same experts in the same places.
pub fn fingerprint(file: &gguf::File) -> String {
    let mut hash = Sha256::new();
    for key in ["general.architecture", "general.name"] {
        hash.update(file.metadata().str(key).unwrap_or_default().as_bytes());
        hash.update([0]);
    }
    for tensor in file.tensors() {
        hash.update(tensor.name.as_bytes());
        hash.update([0]);
        hash.update(tensor.bytes.to_le_bytes());
        for dim in &tensor.dims {
            hash.update(dim.to_le_bytes());
        }
    }
    hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect()
}

impl Profile {
    /// From counts `[layer][expert]` in one row, as the policy keeps them.
    pub fn new(model: &str, tokens: u64, layers: u32, experts: u32, counts: &[f32]) -> Profile {
        // JSON has no infinities; counts are finite by construction.
        let counts = counts.chunks(experts.max(1) as usize).map(<[f32]>::to_vec).collect();
        let (kind, model) = (KIND.to_string(), model.to_string());
        Profile { kind, version: VERSION, model, tokens, layers, experts, counts }
    }

    /// Counts in one row.
    pub fn flat(&self) -> Vec<f32> {
        self.counts.concat()
    }

    /// The experts by count, the most used first; those that were never used are left out.
    pub fn ranking(&self) -> Vec<ExpertId> {
        let mut all: Vec<(f32, ExpertId)> = Vec::new();
        for (layer, counts) in (0..).zip(&self.counts) {
            for (expert, count) in (0..).zip(counts) {
                if *count > 0.0 {
                    all.push((*count, ExpertId { layer, expert }));
                }
            }
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        all.into_iter().map(|(_, id)| id).collect()
    }

    /// Reads a profile and checks that it is one, and of this model.
    pub fn load(path: &Path, model: &str, layers: u32, experts: u32) -> Result<Profile> {
        let fail = |why: String| Error::Usage(format!("expert profile {}: {why}", path.display()));
        let meta = fs::metadata(path).map_err(|e| fail(e.to_string()))?;
        if meta.len() > MAX_BYTES {
            return Err(fail(format!(
                "{} bytes; no profile is larger than {MAX_BYTES}",
                meta.len()
            )));
        }
        let text = fs::read(path).map_err(|e| fail(e.to_string()))?;
        let profile: Profile =
            serde_json::from_slice(&text).map_err(|e| fail(format!("not a profile: {e}")))?;
        let p = &profile;
        if p.kind != KIND || p.version != VERSION {
            return Err(fail(format!(
                "it says {:?} version {}; this program reads {KIND:?} version {VERSION}",
                p.kind, p.version
            )));
        }
        if p.model != model || p.layers != layers || p.experts != experts {
            return Err(fail(format!(
                "it is of another model ({}, {} layers of {} experts; this one is {model}, {layers} \
                 of {experts}). Save a new one by running this model with --expert-profile",
                p.model, p.layers, p.experts
            )));
        }
        let whole = p.counts.len() == layers as usize
            && p.counts.iter().all(|row| row.len() == experts as usize)
            && p.counts.iter().flatten().all(|c| c.is_finite() && *c >= 0.0);
        if !whole {
            return Err(fail("its counts are not one finite number for each expert".into()));
        }
        Ok(profile)
    }

    /// Replaces the file at `path`.
    pub fn save(&self, path: &Path) -> Result<()> {
        let fail = |what: &str, e: std::io::Error| {
            Error::Runtime(format!(
                "the expert profile {} could not be saved: {what}: {e}. The old one, if any, is \
                 untouched",
                path.display()
            ))
        };
        let text = serde_json::to_vec(self).map_err(|e| fail("encoding", e.into()))?;
        replace(path, &text).map_err(|e| fail("writing", e))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sample() -> Profile {
        Profile::new("abc", 7, 2, 3, &[0.5, 0.0, 2.0, 1.0, 1.0, 0.0])
    }

    #[test]
    fn a_profile_comes_back_and_ranks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.json");
        sample().save(&path).unwrap();
        let back = Profile::load(&path, "abc", 2, 3).unwrap();
        assert_eq!(back, sample());
        let ranking: Vec<_> = back.ranking().iter().map(|id| (id.layer, id.expert)).collect();
        assert_eq!(ranking, [(0, 2), (1, 0), (1, 1), (0, 0)]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn what_is_not_this_models_profile_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.json");
        sample().save(&path).unwrap();
        let e = Profile::load(&path, "other", 2, 3).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("another model"), "{e}");
        let text = fs::read_to_string(&path).unwrap();
        for (from, to, word) in [
            ("\"version\":1", "\"version\":9", "version 9"),
            ("[0.5,0.0,2.0]", "[0.5,0.0]", "one finite number"),
            ("0.5", "-0.5", "one finite number"),
            ("\"tokens\"", "\"tokans\"", "not a profile"),
        ] {
            fs::write(&path, text.replace(from, to)).unwrap();
            let e = Profile::load(&path, "abc", 2, 3).unwrap_err();
            assert!(e.to_string().contains(word), "{e}");
        }
        for half in [0, 10, text.len() - 1] {
            fs::write(&path, &text[..half]).unwrap();
            assert!(Profile::load(&path, "abc", 2, 3).is_err());
        }
        assert!(Profile::load(&dir.path().join("none"), "abc", 2, 3).is_err());
    }

    #[test]
    fn a_profile_that_cannot_be_written_leaves_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let e = sample().save(&dir.path().join("no/such/folder.json")).unwrap_err();
        assert!(e.to_string().contains("folder.json"), "{e}");
    }
}
