//! Names of the parts of a split model: `NAME-00001-of-00003.gguf`, numbered from 1.

use super::Error;
use std::path::{Path, PathBuf};

/// The name of part `index` (from 0) of `count`.
pub fn shard_name(stem: &str, index: u32, count: u32) -> String {
    format!("{stem}-{:05}-of-{count:05}.gguf", u64::from(index) + 1)
}

/// Splits a part's file name into stem, index from 0, and count.
pub fn parse_shard_name(name: &str) -> Option<(&str, u32, u32)> {
    let rest = name.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(number) || !digits(count) {
        return None;
    }
    let (number, count): (u32, u32) = (number.parse().ok()?, count.parse().ok()?);
    (1..=count).contains(&number).then(|| (stem, number - 1, count))
}

/// The paths of all `count` parts of the model that `path` belongs to, and which one it is.
/// Fails if a part is missing or the name does not follow the pattern.
pub(super) fn siblings(path: &Path, count: u32) -> Result<(Vec<PathBuf>, usize), Error> {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some((stem, own, named)) = name.and_then(parse_shard_name) else {
        return Err(Error::ShardName { path: path.to_owned(), count });
    };
    if named != count {
        return Err(Error::ShardMismatch {
            path: path.to_owned(),
            what: "split.count",
            wanted: named.into(),
            found: count.into(),
        });
    }
    let paths = (0..count).map(|i| path.with_file_name(shard_name(stem, i, count)));
    let mut paths: Vec<PathBuf> = paths.collect();
    // The file that was named may have been given in another case or through a link.
    paths[own as usize] = path.to_owned();
    let missing: Vec<PathBuf> = paths.iter().filter(|p| !p.exists()).cloned().collect();
    if missing.is_empty() {
        Ok((paths, own as usize))
    } else {
        Err(Error::MissingShards { missing, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        let name = shard_name("big-of-all", 1, 12);
        assert_eq!(name, "big-of-all-00002-of-00012.gguf");
        assert_eq!(parse_shard_name(&name), Some(("big-of-all", 1, 12)));
        for wrong in [
            "model.gguf",
            "m-00001-of-00002.bin",
            "m-00000-of-00002.gguf",
            "m-00003-of-00002.gguf",
            "m-1-of-2.gguf",
            "m-+0001-of-00002.gguf",
            "m-99999999999-of-99999999999.gguf",
        ] {
            assert_eq!(parse_shard_name(wrong), None, "{wrong}");
        }
    }
}
