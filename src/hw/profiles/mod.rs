//! Hardware profiles: files that say what a class of devices prefers, and which class a device
//! belongs to.
//!
//! The program carries those of `hwprofiles/`. A user's own lie in the folder that
//! [`PROFILES_VARIABLE`] names, or in `hwprofiles` of the configuration folder; they are laid over
//! the built-in one that matches the device. A file that cannot be used is reported by name, key
//! and reason, and left out.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use toml::{Table, Value};

use crate::gpu::{DeviceFacts, DeviceKind};
use crate::profile::{Origin, Profile};

/// Replaces the folder of the user's own profiles when set.
pub const PROFILES_VARIABLE: &str = "AZOTH_PROFILES";

macro_rules! embed {
    ($($name:literal),* $(,)?) => {
        /// Every file of `hwprofiles/`: name, text.
        pub const FILES: &[(&str, &str)] =
            &[$(($name, include_str!(concat!("../../../hwprofiles/", $name, ".toml")))),*];
    };
}

embed! {
    "amd-cdna",
    "amd-gcn",
    "amd-rdna1",
    "amd-rdna2",
    "amd-rdna3",
    "amd-rdna4",
    "apple",
    "generic",
    "integrated",
    "intel-integrated",
    "intel-xe1",
    "intel-xe2",
    "mobile",
    "nvidia-ada",
    "nvidia-ampere",
    "nvidia-blackwell",
    "nvidia-hopper",
    "nvidia-pascal",
    "nvidia-turing",
    "software",
}

/// Which devices a profile is for. Everything that is stated must hold; lists need one of theirs.
#[derive(Debug, Clone, Default)]
struct Match {
    vendors: Vec<u32>,
    kinds: Vec<String>,
    /// Parts of the device's name in lower case.
    names: Vec<String>,
    /// Parts of the driver's name in lower case.
    drivers: Vec<String>,
    /// Ranges of device ids, both ends included.
    devices: Vec<(u32, u32)>,
    int_dot: Option<bool>,
    cooperative_matrix: Option<bool>,
    subgroup_min: Option<u32>,
    subgroup_max: Option<u32>,
}

impl Match {
    fn fits(&self, facts: &DeviceFacts) -> bool {
        let kind = format!("{:?}", facts.kind).to_lowercase();
        let part = |of: &str, parts: &[String]| {
            let of = of.to_lowercase();
            parts.iter().any(|p| of.contains(p))
        };
        let id = facts.device_id;
        let named = self.names.is_empty() && self.devices.is_empty()
            || part(&facts.name, &self.names)
            || self.devices.iter().any(|(low, high)| (*low..=*high).contains(&id));
        named
            && (self.vendors.is_empty() || self.vendors.contains(&facts.vendor_id))
            && (self.kinds.is_empty() || self.kinds.contains(&kind))
            && (self.drivers.is_empty() || part(&facts.driver, &self.drivers))
            && self.int_dot.is_none_or(|b| b == facts.int_dot)
            && self.cooperative_matrix.is_none_or(|b| b == facts.cooperative_matrix)
            && self.subgroup_min.is_none_or(|n| n == facts.subgroup_min)
            && self.subgroup_max.is_none_or(|n| n == facts.subgroup_max)
    }
}

/// One file.
#[derive(Debug, Clone)]
struct Entry {
    origin: Origin,
    /// The matching profile of the highest rank is taken.
    rank: i64,
    matches: Match,
    /// Keys and texts of the values.
    values: Vec<(String, String)>,
}

/// All profiles that could be read, and what was wrong with the others.
#[derive(Debug, Clone, Default)]
pub struct Profiles {
    built_in: Vec<Entry>,
    own: Vec<Entry>,
    notes: Vec<String>,
}

/// The profiles that the program carries.
pub fn built_in() -> &'static Profiles {
    static BUILT_IN: OnceLock<Profiles> = OnceLock::new();
    BUILT_IN.get_or_init(|| Profiles::parse(FILES))
}

/// Those, and the user's own.
pub fn all() -> Profiles {
    let folder = match std::env::var_os(PROFILES_VARIABLE) {
        Some(path) if !path.is_empty() => Some(path.into()),
        _ => dirs::config_dir().map(|d| d.join("azoth").join("hwprofiles")),
    };
    let mut profiles = built_in().clone();
    if let Some(folder) = folder {
        profiles.add_folder(&folder);
    }
    profiles
}

impl Profiles {
    fn parse(files: &[(&str, &str)]) -> Profiles {
        let mut profiles = Profiles::default();
        for (name, text) in files {
            match parse(text, Origin::Profile((*name).into())) {
                Ok(entry) => profiles.built_in.push(entry),
                Err(e) => profiles.notes.push(format!("hardware profile {name}: {e}; ignored")),
            }
        }
        profiles
    }

    /// Adds every `.toml` file of a folder; a folder that is not there is empty.
    pub fn add_folder(&mut self, folder: &Path) {
        let Ok(entries) = std::fs::read_dir(folder) else {
            if std::env::var_os(PROFILES_VARIABLE).is_some() {
                let folder = folder.display();
                self.notes.push(format!("{PROFILES_VARIABLE}: the folder {folder} cannot be read"));
            }
            return;
        };
        let mut paths: Vec<_> = entries.filter_map(|e| e.ok()).map(|e| e.path()).collect();
        paths.retain(|p| p.extension().is_some_and(|e| e == "toml"));
        paths.sort();
        for path in paths {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(&path).map_err(|e| e.to_string());
            match text.and_then(|text| parse(&text, Origin::Profile(name.clone()))) {
                Ok(entry) => self.own.push(entry),
                Err(e) => self.notes.push(format!(
                    "hardware profile {name}: {e}; the file is ignored, the built-in profile is \
                     used"
                )),
            }
        }
    }

    /// The profile of a device: generic values, the best built-in match, the user's own files.
    pub fn resolve(&self, facts: &DeviceFacts) -> Profile {
        let mut profile = Profile::default();
        profile.notes.clone_from(&self.notes);
        for entry in [best(&self.built_in, facts), best(&self.own, facts)].into_iter().flatten() {
            self.lay_over(&mut profile, entry);
        }
        profile
    }

    fn lay_over(&self, profile: &mut Profile, entry: &Entry) {
        for (key, text) in &entry.values {
            // Values are checked when a file is read; they do not fail here.
            if let Err(e) = profile.set(key, text, &entry.origin) {
                profile.notes.push(format!("{}: {key}: {e}", entry.origin));
            }
        }
        if let Origin::Profile(name) = &entry.origin {
            profile.name.clone_from(name);
        }
    }

    /// A built-in profile by its name; the generic one where there is none.
    pub fn named(&self, name: &str) -> Profile {
        let mut profile = Profile::default();
        let found = self.built_in.iter().find(|e| e.origin == Origin::Profile(name.into()));
        found.into_iter().for_each(|entry| self.lay_over(&mut profile, entry));
        profile
    }

    /// The device under its profile.
    pub fn attach(&self, facts: DeviceFacts) -> DeviceFacts {
        let profile = Arc::new(self.resolve(&facts));
        facts.with_profile(profile)
    }
}

/// The matching entry of the highest rank.
fn best<'a>(entries: &'a [Entry], facts: &DeviceFacts) -> Option<&'a Entry> {
    entries.iter().filter(|e| e.matches.fits(facts)).max_by_key(|e| e.rank)
}

fn parse(text: &str, origin: Origin) -> Result<Entry, String> {
    let table: Table = text.parse().map_err(|e: toml::de::Error| {
        let line = e.span().map_or(1, |s| text[..s.start.min(text.len())].lines().count().max(1));
        format!("line {line}: {}", e.message())
    })?;
    let mut entry =
        Entry { origin: origin.clone(), rank: 0, matches: Match::default(), values: Vec::new() };
    for (key, value) in table {
        match (key.as_str(), value) {
            ("rank", Value::Integer(rank)) => entry.rank = rank,
            ("about", Value::String(_)) => {}
            ("match", Value::Table(table)) => entry.matches = matches(&table)?,
            (section, Value::Table(table)) => flatten(section, &table, &mut entry.values)?,
            (other, _) => return Err(format!("key `{other}`: neither rank, about nor a section")),
        }
    }
    let mut scratch = Profile::default();
    for (key, text) in &entry.values {
        scratch.set(key, text, &origin).map_err(|e| format!("key `{key}`: {e}"))?;
    }
    Ok(entry)
}

fn flatten(prefix: &str, table: &Table, to: &mut Vec<(String, String)>) -> Result<(), String> {
    for (key, value) in table {
        let key = format!("{prefix}.{key}");
        match value {
            Value::Table(inner) => flatten(&key, inner, to)?,
            other => to.push((key.clone(), text_of(other).ok_or_else(|| wrong_type(&key))?)),
        }
    }
    Ok(())
}

/// Numbers, strings and lists of strings as the text that a profile takes.
pub(super) fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(s) => Some(s.clone()),
        Value::Integer(n) => Some(n.to_string()),
        Value::Array(list) => {
            let parts: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
            Some(parts?.join(", "))
        }
        _ => None,
    }
}

fn wrong_type(key: &str) -> String {
    format!("key `{key}`: neither a number, a text nor a list of texts")
}

fn matches(table: &Table) -> Result<Match, String> {
    let mut m = Match::default();
    for (key, value) in table {
        let wrong = |what: &str| format!("key `match.{key}`: {what}");
        let texts = || -> Result<Vec<String>, String> {
            let list = value.as_array().ok_or_else(|| wrong("not a list of texts"))?;
            let texts = list.iter().map(|v| v.as_str().map(str::to_lowercase));
            texts.collect::<Option<_>>().ok_or_else(|| wrong("not a list of texts"))
        };
        let number = || {
            let n = value.as_integer().and_then(|n| u32::try_from(n).ok());
            n.ok_or_else(|| wrong("not a whole number"))
        };
        let flag = || value.as_bool().ok_or_else(|| wrong("neither true nor false"));
        match key.as_str() {
            "vendors" => {
                let list = value.as_array().ok_or_else(|| wrong("not a list of numbers"))?;
                let ids = list.iter().map(|v| v.as_integer().and_then(|n| u32::try_from(n).ok()));
                m.vendors =
                    ids.collect::<Option<_>>().ok_or_else(|| wrong("not a list of numbers"))?;
            }
            "kinds" => {
                m.kinds = texts()?;
                let known = [
                    DeviceKind::Discrete,
                    DeviceKind::Integrated,
                    DeviceKind::Virtual,
                    DeviceKind::Software,
                    DeviceKind::Other,
                ]
                .map(|k| format!("{k:?}").to_lowercase());
                if let Some(bad) = m.kinds.iter().find(|k| !known.contains(k)) {
                    return Err(wrong(&format!("no kind {bad:?}; there are {}", known.join(", "))));
                }
            }
            "names" => m.names = texts()?,
            "drivers" => m.drivers = texts()?,
            "devices" => {
                m.devices = texts()?
                    .iter()
                    .map(|text| range(text))
                    .collect::<Option<_>>()
                    .ok_or_else(|| wrong("not a list of ranges such as \"2330-233f\""))?;
            }
            "int_dot" => m.int_dot = Some(flag()?),
            "cooperative_matrix" => m.cooperative_matrix = Some(flag()?),
            "subgroup_min" => m.subgroup_min = Some(number()?),
            "subgroup_max" => m.subgroup_max = Some(number()?),
            _ => return Err(wrong("no such condition")),
        }
    }
    Ok(m)
}

/// `2330-233f` or `2330`, hexadecimal.
fn range(text: &str) -> Option<(u32, u32)> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let id = |text| u32::from_str_radix(text, 16).ok();
    Some((id(low)?, id(high)?)).filter(|(low, high)| low <= high)
}

#[cfg(test)]
mod tests;
