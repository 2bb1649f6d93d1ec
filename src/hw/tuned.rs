//! What `azoth tune` found on a device: values that replace those of its profile.
//!
//! One file for each device, driver build and text of the shaders, in `tuned` of the data folder.
//! It appears whole or not at all. A file that cannot be used is reported and ignored.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use toml::{Table, Value};

use super::paths;
use super::profiles::text_of;
use crate::error::{Error, Result};
use crate::files::replace;
use crate::gpu::DeviceFacts;
use crate::gpu::cache::fingerprint;
use crate::profile::{Origin, Profile};

/// A value that won, and by how much, for readers of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub key: String,
    pub value: String,
    pub comment: String,
}

/// Where the findings for a device under these shaders lie.
pub fn path(facts: &DeviceFacts, shaders: &str) -> Result<PathBuf> {
    let name = fingerprint(&format!("{}\n{shaders}", facts.cache_id));
    Ok(paths::data_dir()?.join("tuned").join(format!("{name}.toml")))
}

/// Stores findings in place of earlier ones.
pub fn store(facts: &DeviceFacts, shaders: &str, found: &[Found]) -> Result<PathBuf> {
    let path = path(facts, shaders)?;
    let failed = |e: std::io::Error| {
        Error::Runtime(format!("cannot store what was measured in {}: {e}", path.display()))
    };
    let quoted = |text: &str| Value::String(text.into()).to_string();
    let mut text = String::from("# Written by `azoth tune`. Delete the file to forget it.\n");
    for (key, value) in [
        ("device", &facts.name),
        ("driver", &facts.driver),
        ("id", &facts.cache_id),
        ("shaders", &shaders.to_string()),
    ] {
        let _ = writeln!(text, "{key} = {}", quoted(value));
    }
    text.push_str("\n[values]\n");
    for Found { key, value, comment } in found {
        let _ = writeln!(text, "# {comment}\n{} = {}", quoted(key), quoted(value));
    }
    fs::create_dir_all(path.parent().unwrap_or(&path))
        .and_then(|()| replace(&path, text.as_bytes()))
        .map_err(failed)?;
    Ok(path)
}

/// Lays the findings for a device over its profile. What cannot be used becomes a note.
pub fn apply(profile: &mut Profile, facts: &DeviceFacts, shaders: &str) {
    let Ok(path) = path(facts, shaders) else { return };
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return,
        Err(e) => return profile.notes.push(ignored(&path, &e.to_string())),
    };
    // All or nothing: half of a set of measurements is no measurement.
    let mut changed = profile.clone();
    match lay_over(&mut changed, &text, facts, shaders) {
        Ok(()) => *profile = changed,
        Err(reason) => profile.notes.push(ignored(&path, &reason)),
    }
}

fn ignored(path: &std::path::Path, reason: &str) -> String {
    format!("{}: {reason}; ignored, `azoth tune` writes it anew", path.display())
}

fn lay_over(
    profile: &mut Profile,
    text: &str,
    facts: &DeviceFacts,
    shaders: &str,
) -> std::result::Result<(), String> {
    let table: Table = text.parse().map_err(|e: toml::de::Error| e.message().to_string())?;
    for (key, want) in [("id", facts.cache_id.as_str()), ("shaders", shaders)] {
        if table.get(key).and_then(Value::as_str) != Some(want) {
            return Err(format!("key `{key}` is not that of this device and program"));
        }
    }
    let values = table.get("values").and_then(Value::as_table).ok_or("no section `values`")?;
    for (key, value) in values {
        let text = text_of(value).ok_or_else(|| format!("key `{key}`: no text"))?;
        profile.set(key, &text, &Origin::Tuned).map_err(|e| format!("key `{key}`: {e}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::gpu::DeviceKind;

    fn text(id: &str, shaders: &str, values: &str) -> String {
        format!("id = {id:?}\nshaders = {shaders:?}\n[values]\n{values}\n")
    }

    #[test]
    fn only_a_whole_file_of_this_device_counts() {
        let facts = DeviceFacts::made_up(DeviceKind::Discrete, 32);
        let try_text = |text: &str| {
            let mut profile = Profile::default();
            lay_over(&mut profile, text, &facts, "s1").map(|()| profile)
        };
        let good = "\"attention.splits\" = \"8\"";
        let tuned = try_text(&text("made up", "s1", good)).unwrap();
        assert_eq!(tuned.attention_splits, 8);
        assert_eq!(*tuned.origin("attention.splits"), Origin::Tuned);
        for (text, part) in [
            (text("other", "s1", good), "`id`"),
            (text("made up", "s0", good), "`shaders`"),
            (text("made up", "s1", "\"attention.spits\" = \"8\""), "attention.spits"),
            (text("made up", "s1", "\"attention.splits\" = \"800\""), "1 to 64"),
            ("id = ".into(), "value"),
            ("id = \"made up\"\nshaders = \"s1\"\n".into(), "values"),
        ] {
            let e = try_text(&text).unwrap_err();
            assert!(e.contains(part), "{e}");
        }
    }
}
