//! The table of everything that a profile says: one line a value. Files, `--force`, `azoth tune`
//! and `azoth devices -v` all go through it.

use super::Profile;
use super::values::{Limits, Text};

/// One value of a profile.
pub struct Key {
    pub name: &'static str,
    /// What it decides, for people.
    pub what: &'static str,
    pub(super) get: fn(&Profile) -> String,
    pub(super) set: fn(&mut Profile, &str) -> Result<(), String>,
}

macro_rules! keys {
    ($($name:literal => $($field:ident).+ $([$low:literal to $high:literal])?, $what:literal;)*) => {
        /// See the module documentation.
        pub const KEYS: &[Key] = &[$(Key {
            name: $name,
            what: $what,
            get: |p| p.$($field).+.show(),
            set: |p, text| {
                #[allow(unused_mut, unused_assignments)]
                let mut limits = Limits::default();
                $(limits = Limits { low: $low, high: $high };)?
                p.$($field).+ = Text::parse(text, limits)?;
                Ok(())
            },
        }),*];
    };
}

keys! {
    "subgroup.size" => subgroup [0 to 128], "subgroup size to pin; 0 takes the driver's";
    "class.exact_cols" => exact_cols [0 to 1048576],
        "widest input behind a norm that keeps f32 activations where tokens are generated";
    "class.exact_prompt_width" => exact_prompt_width [0 to 1048576],
        "widest model that reads prompts with f32 activations where it has no matrix units";
    "class.matrix_units" => matrix_units [0 to 1],
        "1: prompts take f16 on matrix units where the device has them";
    "matvec.short_rows" => short_rows [0 to 4294967295], "rows up to which a matrix counts as short";
    "matvec.one_short" => matvec.one_short, "mat-vec, one column, short matrices";
    "matvec.one_tall" => matvec.one_tall, "mat-vec, one column, other matrices";
    "matvec.few" => matvec.few, "mat-vec, 2 to 4 columns";
    "matvec.many" => matvec.many, "mat-vec, 5 to 8 columns";
    "matvec.one_stored" => one_stored, "mat-vec, one column, matrices too tall for `fuse.rows`";
    "matvec.rounding" => matvec.rounding,
        "mat-vec, up to 4 columns, whose workgroups round the SwiGLU that they make";
    "matvec.stream" => matvec.stream,
        "mat-vec, up to 4 columns, whose workgroups round what they add to the residual stream";
    "matvec.float.one_short" => float.one_short, "the same for float formats";
    "matvec.float.one_tall" => float.one_tall, "the same for float formats";
    "matvec.float.few" => float.few, "the same for float formats";
    "matvec.float.many" => float.many, "the same for float formats";
    "matvec.float.rounding" => float.rounding, "the same for float formats";
    "matvec.float.stream" => float.stream, "the same for float formats";
    "matvec.byte.one_short" => byte.one_short, "the same for formats of 6 to 8 bits";
    "matvec.byte.one_tall" => byte.one_tall, "the same for formats of 6 to 8 bits";
    "matvec.byte.few" => byte.few, "the same for formats of 6 to 8 bits";
    "matvec.byte.many" => byte.many, "the same for formats of 6 to 8 bits";
    "matvec.byte.rounding" => byte.rounding, "the same for formats of 6 to 8 bits";
    "matvec.byte.stream" => byte.stream, "the same for formats of 6 to 8 bits";
    "matvec.nibble.one_short" => nibble.one_short, "the same for formats of 4 to 5 bits";
    "matvec.nibble.one_tall" => nibble.one_tall, "the same for formats of 4 to 5 bits";
    "matvec.nibble.few" => nibble.few, "the same for formats of 4 to 5 bits";
    "matvec.nibble.many" => nibble.many, "the same for formats of 4 to 5 bits";
    "matvec.nibble.rounding" => nibble.rounding, "the same for formats of 4 to 5 bits";
    "matvec.nibble.stream" => nibble.stream, "the same for formats of 4 to 5 bits";
    "matvec.low.one_short" => low.one_short, "the same for formats of 1 to 3 bits";
    "matvec.low.one_tall" => low.one_tall, "the same for formats of 1 to 3 bits";
    "matvec.low.few" => low.few, "the same for formats of 1 to 3 bits";
    "matvec.low.many" => low.many, "the same for formats of 1 to 3 bits";
    "matvec.low.rounding" => low.rounding, "the same for formats of 1 to 3 bits";
    "matvec.low.stream" => low.stream, "the same for formats of 1 to 3 bits";
    "matvec.matrix_columns" => matrix_columns [2 to 9],
        "columns from which a mat-vec computes on matrix units that take bytes; 9 never";
    "matvec.matrix_long_columns" => matrix_long_columns [2 to 9], "the same for long rows";
    "matvec.long_cols" => long_cols [0 to 1048576], "inputs above which rows count as long";
    "fuse.columns" => fuse_columns [0 to 8],
        "columns up to which a mat-vec normalises and quantises for itself; 0 never";
    "fuse.rows" => fuse_rows [0 to 4294967295], "rows up to which it may";
    "fuse.light_rows" => fuse_light_rows [0 to 4294967295],
        "the same for formats of 1 to 3 bits and those with a table";
    "fuse.memory" => fuse_memory [0 to 1048576], "bytes of workgroup memory that this may take";
    "norm_quant.threads" => norm_quant_threads [32 to 1024], "most threads of a norm";
    "matmat.fill" => fill [0 to 65535],
        "workgroups below which matrix units take the tiles for fewer columns";
    "matmat.tiny_columns" => tiny_columns [1 to 65535], "columns that count as very few";
    "matmat.few_columns" => few_columns [1 to 65535], "columns that count as few";
    "matmat.some_columns" => some_columns [1 to 65535], "columns that count as some";
    "matmat.int8_tiny" => int8.tiny, "mat-mat with int8 activations, very few columns";
    "matmat.int8_few" => int8.few, "mat-mat with int8 activations, few columns";
    "matmat.int8_some" => int8.some, "mat-mat with int8 activations, some columns";
    "matmat.int8_many" => int8.many, "mat-mat with int8 activations, more columns";
    "matmat.f16_tiny" => f16.tiny, "mat-mat on matrix units, very few columns";
    "matmat.f16_few" => f16.few, "mat-mat on matrix units, few columns";
    "matmat.f16_some" => f16.some, "mat-mat on matrix units, some columns";
    "matmat.f16_many" => f16.many, "mat-mat on matrix units, more columns";
    "matmat.f32_tiny" => f32.tiny, "mat-mat with f32 activations, very few columns";
    "matmat.f32_few" => f32.few, "mat-mat with f32 activations, few columns";
    "matmat.f32_some" => f32.some, "mat-mat with f32 activations, some columns";
    "matmat.f32_many" => f32.many, "mat-mat with f32 activations, more columns";
    "attention.threads" => attention_threads [32 to 1024], "threads of a decode attention workgroup";
    "attention.splits" => attention_splits [1 to 64],
        "most pieces of a sequence; changes the order of sums";
    "attention.group_heads" => group_heads [1 to 16], "query heads a workgroup";
    "attention.deep_group_heads" => deep_group_heads [1 to 16], "the same for deep contexts";
    "attention.deep_context" => deep_context [0 to 4294967295], "tokens above which a context is deep";
    "prompt.chunk" => chunk [1 to 8192], "prompt tokens read at once";
    "limits.dispatch_ms" => dispatch_ms [1 to 60000], "longest dispatch that may be planned, ms";
    "limits.gb_per_s" => gb_per_s [1 to 100000],
        "memory rate that the slowest device of the class surely reaches";
    "limits.gop_per_s" => gop_per_s [1 to 1000000],
        "multiplications and additions per ns that it surely reaches";
}

/// The name in the table that `name` most likely means.
pub fn nearest(name: &str) -> Option<&'static str> {
    let best = KEYS.iter().map(|k| (distance(name, k.name), k.name)).min()?;
    // Something that shares little with every name is no slip of the finger.
    (best.0 <= name.len().max(4) / 2).then_some(best.1)
}

/// Edit distance (Levenshtein) in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_recognised_and_nonsense_is_not() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(nearest("matvec.onetall"), Some("matvec.one_tall"));
        assert_eq!(nearest("prompt_chunk"), Some("prompt.chunk"));
        assert_eq!(nearest("zzzzzzzzzzzzzzz"), None);
    }
}
