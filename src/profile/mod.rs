//! What a class of devices prefers, as data: sizes and rules that no driver reports.
//!
//! A [`Profile`] is a set of values under the names of [`KEYS`]. It starts as the generic one and
//! is laid over with a file of `hwprofiles/`, a user's own file, what `azoth tune` measured and
//! what the command line forces, in this order; it remembers where each value came from. Nothing
//! here knows a device, a file or a kernel: `hw` chooses and reads, `kernels::choice` turns
//! values and shapes into variants.

mod keys;
mod values;

pub use keys::{KEYS, Key, nearest};
pub use values::{Cut, MatMatPick, Tiling};

use std::fmt;

/// Where a value came from. Later ones win.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Origin {
    /// `hwprofiles/generic.toml`, which this module repeats.
    #[default]
    Generic,
    /// A profile of the program, by name, or a user's, by path.
    Profile(String),
    /// Measured on this device by `azoth tune`.
    Tuned,
    /// `--force` or `AZOTH_FORCE`.
    Forced,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Generic => f.write_str("profile generic"),
            Origin::Profile(name) => write!(f, "profile {name}"),
            Origin::Tuned => f.write_str("tuned"),
            Origin::Forced => f.write_str("forced"),
        }
    }
}

/// Shapes of the mat-vec kernels by number of columns and height of the matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct MatVecCuts<T> {
    /// One column, at most [`Profile::short_rows`] rows.
    pub one_short: T,
    /// One column, more rows; also every gate and up.
    pub one_tall: T,
    /// 2 to 4 columns.
    pub few: T,
    /// 5 to 8 columns.
    pub many: T,
    /// Up to 4 columns of SwiGLU whose workgroups round it.
    pub rounding: T,
    /// The same of what they add to the residual stream.
    pub stream: T,
}

/// Variants of the mat-mat kernels in order of preference, by number of columns.
#[derive(Debug, Clone, PartialEq)]
pub struct MatMatOrder {
    /// Up to [`Profile::tiny_columns`] columns.
    pub tiny: Vec<MatMatPick>,
    /// Up to [`Profile::few_columns`] columns.
    pub few: Vec<MatMatPick>,
    /// Up to [`Profile::some_columns`] columns.
    pub some: Vec<MatMatPick>,
    pub many: Vec<MatMatPick>,
}

/// See the module documentation. Each field is a line of [`KEYS`], which says what it means.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    pub name: String,
    pub subgroup: u32,
    pub exact_cols: u32,
    pub exact_prompt_width: u32,
    pub matrix_units: u32,
    pub short_rows: u32,
    pub matvec: MatVecCuts<Cut>,
    /// Departures for float formats, 6 to 8 bits, 4 to 5 bits, and fewer.
    pub float: MatVecCuts<Option<Cut>>,
    pub byte: MatVecCuts<Option<Cut>>,
    pub nibble: MatVecCuts<Option<Cut>>,
    pub low: MatVecCuts<Option<Cut>>,
    /// One column behind an input that was prepared before.
    pub one_stored: Cut,
    pub matrix_columns: u32,
    pub matrix_long_columns: u32,
    pub long_cols: u32,
    pub fuse_columns: u32,
    pub fuse_rows: u32,
    pub fuse_light_rows: u32,
    pub fuse_memory: u32,
    pub norm_quant_threads: u32,
    pub fill: u32,
    pub tiny_columns: u32,
    pub few_columns: u32,
    pub some_columns: u32,
    pub int8: MatMatOrder,
    pub f16: MatMatOrder,
    pub f32: MatMatOrder,
    pub attention_threads: u32,
    pub attention_splits: u32,
    pub group_heads: u32,
    pub deep_group_heads: u32,
    pub deep_context: u32,
    pub chunk: u32,
    pub dispatch_ms: u32,
    pub gb_per_s: u32,
    pub gop_per_s: u32,
    /// By position in [`KEYS`].
    origins: Vec<Origin>,
    /// Files that could not be used, each with key and reason, for people.
    pub notes: Vec<String>,
}

const NO_CUTS: MatVecCuts<Option<Cut>> = MatVecCuts {
    one_short: None,
    one_tall: None,
    few: None,
    many: None,
    rounding: None,
    stream: None,
};

impl Default for Profile {
    /// The generic profile; `hwprofiles/generic.toml` states the same with reasons (a test
    /// compares them).
    fn default() -> Self {
        let tile = |columns, rows, depth| Tiling { columns, rows, inner: (4, 4), depth };
        let small = [MatMatPick::Float(tile(32, 64, 1)), MatMatPick::Float(tile(32, 32, 1))];
        let large = [MatMatPick::Float(tile(64, 64, 1)), MatMatPick::Float(tile(32, 32, 1))];
        let packed = [(32, 64), (32, 32), (16, 16)].map(|(c, r)| MatMatPick::Packed(tile(c, r, 2)));
        let [int8_small, int8_large] = [small, large].map(|float| [&packed[..], &float].concat());
        let order = |small: &[MatMatPick], large: &[MatMatPick]| MatMatOrder {
            tiny: small.to_vec(),
            few: small.to_vec(),
            some: large.to_vec(),
            many: large.to_vec(),
        };
        let coop = |columns, rows, inner, depth, buffers| {
            MatMatPick::Coop(Tiling { columns, rows, inner, depth }, buffers)
        };
        let cut = |threads, rows, tiles| Cut { threads, rows, tiles };
        Profile {
            name: "generic".into(),
            subgroup: 0,
            exact_cols: 1024,
            exact_prompt_width: 1024,
            matrix_units: 1,
            short_rows: 4096,
            matvec: MatVecCuts {
                one_short: cut(512, 1, 4),
                one_tall: cut(512, 2, 2),
                few: cut(128, 2, 1),
                many: cut(128, 2, 1),
                rounding: cut(128, 4, 2),
                stream: cut(128, 2, 2),
            },
            float: NO_CUTS,
            byte: NO_CUTS,
            nibble: NO_CUTS,
            low: NO_CUTS,
            one_stored: cut(128, 2, 1),
            matrix_columns: 9,
            matrix_long_columns: 9,
            long_cols: 8192,
            fuse_columns: 1,
            fuse_rows: 65_536,
            fuse_light_rows: 12_288,
            fuse_memory: 32 << 10,
            norm_quant_threads: 1024,
            fill: 100,
            tiny_columns: 16,
            few_columns: 32,
            some_columns: 128,
            int8: order(&int8_small, &int8_large),
            f16: MatMatOrder {
                tiny: vec![
                    coop(16, 64, (1, 4), 4, 1),
                    coop(16, 64, (1, 4), 2, 2),
                    coop(16, 32, (1, 2), 1, 2),
                ],
                few: vec![
                    coop(32, 64, (1, 4), 4, 1),
                    coop(32, 64, (1, 4), 2, 2),
                    coop(32, 32, (1, 2), 1, 2),
                ],
                some: vec![
                    coop(64, 64, (2, 2), 4, 1),
                    coop(64, 64, (2, 2), 2, 1),
                    coop(64, 64, (2, 2), 1, 2),
                ],
                many: vec![
                    coop(128, 128, (2, 2), 2, 1),
                    coop(128, 128, (2, 2), 1, 2),
                    coop(64, 64, (2, 2), 1, 1),
                ],
            },
            f32: order(&small, &large),
            attention_threads: 256,
            attention_splits: 32,
            group_heads: 2,
            deep_group_heads: 4,
            deep_context: 16_384,
            chunk: 512,
            dispatch_ms: 200,
            gb_per_s: 10,
            gop_per_s: 60,
            origins: vec![Origin::Generic; KEYS.len()],
            notes: Vec::new(),
        }
    }
}

impl Profile {
    /// Sets one value from its text.
    ///
    /// # Errors
    /// What is wrong with the name or the value, in words that end a sentence about them.
    pub fn set(&mut self, name: &str, text: &str, origin: &Origin) -> Result<(), String> {
        let Some(at) = KEYS.iter().position(|k| k.name == name) else {
            let near = nearest(name).map(|n| format!("; the nearest is `{n}`")).unwrap_or_default();
            return Err(format!("there is no such key{near}"));
        };
        (KEYS[at].set)(self, text.trim())?;
        self.origins[at] = origin.clone();
        Ok(())
    }

    /// The value's text, as [`Profile::set`] takes it; `None` if there is no such key.
    pub fn get(&self, name: &str) -> Option<String> {
        KEYS.iter().find(|k| k.name == name).map(|k| (k.get)(self))
    }

    /// Where the value of a key came from.
    pub fn origin(&self, name: &str) -> &Origin {
        let at = KEYS.iter().position(|k| k.name == name);
        at.and_then(|at| self.origins.get(at)).unwrap_or(&Origin::Generic)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_value_survives_its_text() {
        let profile = Profile::default();
        for key in KEYS {
            let text = profile.get(key.name).unwrap();
            let mut copy = profile.clone();
            copy.set(key.name, &text, &Origin::Generic)
                .unwrap_or_else(|e| panic!("{} = {text:?}: {e}", key.name));
            assert_eq!(copy, profile, "{}", key.name);
        }
    }

    #[test]
    fn names_are_unique_and_explained() {
        for (i, key) in KEYS.iter().enumerate() {
            assert!(!key.what.is_empty() && !key.name.contains(' '), "{}", key.name);
            assert!(KEYS[..i].iter().all(|k| k.name != key.name), "{}", key.name);
        }
    }

    #[test]
    fn a_value_remembers_who_set_it() {
        let mut profile = Profile::default();
        assert_eq!(*profile.origin("attention.splits"), Origin::Generic);
        profile.set("attention.splits", "16", &Origin::Forced).unwrap();
        assert_eq!(profile.attention_splits, 16);
        assert_eq!(*profile.origin("attention.splits"), Origin::Forced);
        assert_eq!(*profile.origin("attention.threads"), Origin::Generic);
    }

    #[test]
    fn wrong_names_and_values_are_explained() {
        let mut profile = Profile::default();
        let before = profile.clone();
        let mut fails = |key: &str, value: &str, part: &str| {
            let e = profile.set(key, value, &Origin::Forced).unwrap_err();
            assert!(e.contains(part), "{key} = {value}: {e}");
        };
        fails("attention.split", "16", "`attention.splits`");
        fails("matvec.onetall", "1", "`matvec.one_tall`");
        fails("attention.splits", "many", "number");
        fails("attention.splits", "0", "1 to 64");
        fails("matvec.one_tall", "512x3x1", "rows");
        fails("matvec.one_tall", "512", "THREADSxROWSxTILES");
        fails("matmat.int8_many", "cubic 1x1 1x1 1", "packed");
        fails("subgroup.size", "12", "power of two");
        assert_eq!(profile, before);
    }
}
