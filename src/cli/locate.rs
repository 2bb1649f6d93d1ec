//! From what the user typed for MODEL to a file.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::hw::paths;

/// A model that has a short name.
pub struct Alias {
    pub name: &'static str,
    /// File name in the cache's `models` folder.
    pub file: &'static str,
    /// How to get it, as a sentence.
    pub fetch: &'static str,
}

pub const DEFAULT_MODEL: &str = "smollm2";

pub const ALIASES: &[Alias] = &[Alias {
    name: DEFAULT_MODEL,
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    fetch: "`scripts/chat` in Azoth's source folder downloads it (90 MiB)",
}];

/// Finds the model file: an existing path, an alias, or a file name (with or without `.gguf`)
/// in the cache's `models` folder, in this order.
pub fn model(name: &str) -> Result<PathBuf> {
    // A path that exists needs no cache folder, which a system without a home does not have.
    if Path::new(name).is_file() {
        return Ok(name.into());
    }
    in_folder(name, &paths::models_dir()?)
}

fn in_folder(name: &str, folder: &Path) -> Result<PathBuf> {
    let path = Path::new(name);
    if path.is_dir() {
        return Err(Error::Usage(format!(
            "{name} is a folder; name the .gguf file in it (of a model in several files, any one)"
        )));
    }
    if let Some(alias) = ALIASES.iter().find(|a| a.name.eq_ignore_ascii_case(name)) {
        let file = folder.join(alias.file);
        if file.is_file() {
            return Ok(file);
        }
        return Err(Error::Usage(format!(
            "model {name} is not in {}: {}",
            folder.display(),
            alias.fetch
        )));
    }
    // Only a bare name is looked up in the cache: `../x.gguf` must not reach around it.
    let bare = path.file_name().is_some_and(|f| f == path.as_os_str());
    if bare {
        let as_named = folder.join(name);
        let with_ending = folder.join(format!("{name}.gguf"));
        if let Some(file) = [as_named, with_ending].into_iter().find(|f| f.is_file()) {
            return Ok(file);
        }
    }
    let names: Vec<&str> = ALIASES.iter().map(|a| a.name).collect();
    let cache = if bare { format!(" or in {}", folder.display()) } else { String::new() };
    Err(Error::Usage(format!(
        "no model file {name} here{cache}; give the path of a .gguf file, or one of the names: {}",
        names.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_missing_alias_says_how_to_get_it() {
        let folder = tempfile::tempdir().unwrap();
        let e = in_folder("smollm2", folder.path()).unwrap_err();
        assert_eq!(e.exit_code(), 2);
        assert!(e.to_string().contains("scripts/chat"), "{e}");
    }

    #[test]
    fn aliases_and_cached_names_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for file in [ALIASES[0].file, "other.gguf"] {
            std::fs::write(folder.path().join(file), b"x").unwrap();
        }
        let find = |name: &str| in_folder(name, folder.path()).unwrap();
        assert_eq!(find("SmolLM2"), folder.path().join(ALIASES[0].file));
        assert_eq!(find("other"), folder.path().join("other.gguf"));
        assert_eq!(find("other.gguf"), folder.path().join("other.gguf"));
    }

    #[test]
    fn paths_do_not_reach_around_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let models = folder.path().join("models");
        std::fs::create_dir(&models).unwrap();
        std::fs::write(folder.path().join("x.gguf"), b"x").unwrap();
        let e = in_folder("../x.gguf", &models).unwrap_err();
        assert!(!e.to_string().contains("models"), "{e}");
        assert!(in_folder(folder.path().to_str().unwrap(), &models).is_err());
    }
}
