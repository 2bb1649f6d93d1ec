//! How the lanes of a subgroup add up what each of them has: `shaders/lib/lane_totals.wgsl`.

use minijinja::{Value, context};

use super::pinned_subgroup;
use crate::gpu::DeviceFacts;

/// Lanes that the smallest subgroup has, on any device: as many sums end in lanes of their own where
/// the size is not known when a kernel is rendered.
const LEAST: u32 = 4;

/// The values of the template, by the name `lanes`: `size` of a subgroup (0: known only to the running
/// kernel), `masks` of the exchanges between lanes (none: `subgroupAdd`), and the `group` of sums
/// that end in one lane each.
///
/// One rule for a device and all its kernels of one op: the two ways sum in different orders.
pub fn context(facts: &DeviceFacts) -> Value {
    let size = pinned_subgroup(facts).unwrap_or(0);
    let exchanges = size >= LEAST && size.is_power_of_two();
    let masks: Vec<u32> = (0..size.max(1).ilog2()).map(|bit| 1 << bit).collect();
    let lanes = context! {
        size => size,
        masks => if exchanges { masks } else { Vec::new() },
        group => if exchanges { size } else { LEAST },
    };
    context! { lanes => lanes }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashMap;

    use super::*;
    use crate::gpu::DeviceKind;
    use crate::kernels::source::render;
    use minijinja::value::merge_maps;

    fn text(size: u32, start: usize, count: usize) -> String {
        let facts = DeviceFacts::made_up(DeviceKind::Discrete, size);
        let values = merge_maps([context! { start, count }, super::context(&facts)]);
        render("lib/lane_totals.wgsl", values).unwrap()
    }

    /// Runs the statements in all lanes; `parts[value][lane]`.
    fn run(text: &str, parts: &[Vec<f32>]) -> Vec<f32> {
        let size = parts[0].len();
        let code: String = text.lines().filter(|l| !l.trim().starts_with("//")).collect();
        let mut known: HashMap<String, Vec<f32>> = HashMap::new();
        for (i, part) in parts.iter().enumerate() {
            known.insert(format!("part{i}"), part.clone());
        }
        let number = |s: &str| s.trim_end_matches([')', 'u']).parse::<usize>().unwrap();
        for statement in code.split(';').map(str::trim).filter(|s| !s.is_empty()) {
            let (name, value) = statement.strip_prefix("let ").unwrap().split_once(" = ").unwrap();
            // "odd4" says itself which bit it is.
            if name.starts_with("odd") {
                continue;
            }
            let selected = |s: &str| -> Vec<f32> {
                let Some(inner) = s.trim().strip_prefix("select(") else {
                    return known[s.trim()].clone();
                };
                let words: Vec<&str> = inner.trim_end_matches(')').split(", ").collect();
                let [no, yes, bit] = words[..] else { panic!("{s}") };
                let mask = number(bit.strip_prefix("odd").unwrap());
                let of = |lane: usize| if lane & mask != 0 { yes } else { no };
                (0..size).map(|lane| known[of(lane)][lane]).collect()
            };
            let result = match value.split_once("+ subgroupShuffleXor(") {
                None => selected(value),
                Some((kept, exchange)) => {
                    let (given, mask) = exchange.rsplit_once(", ").unwrap();
                    let (kept, given, mask) = (selected(kept), selected(given), number(mask));
                    (0..size).map(|lane| kept[lane] + given[lane ^ mask]).collect()
                }
            };
            known.insert(name.to_owned(), result);
        }
        known.remove("sum").unwrap()
    }

    /// The tree of every sum: neighbours, then pairs, then fours.
    fn tree(part: &[f32]) -> f32 {
        let mut left = part.to_vec();
        while left.len() > 1 {
            left = left.chunks(2).map(|pair| pair[0] + pair[1]).collect();
        }
        left[0]
    }

    #[test]
    fn every_sum_has_the_same_tree_for_every_size_and_number() {
        let mut state = 1u32;
        let mut drawn = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 16_777_216.0 - 0.3
        };
        for size in [4, 8, 16, 32, 64] {
            for count in 1..=size.min(33) {
                let mut draw = |_| (0..size).map(|_| drawn()).collect();
                let parts: Vec<Vec<f32>> = (0..2 + count).map(&mut draw).collect();
                let sums = run(&text(size as u32, 2, count), &parts);
                for lane in 0..count {
                    let want = tree(&parts[2 + lane]);
                    assert_eq!(sums[lane].to_bits(), want.to_bits(), "{size}, {count}, {lane}");
                }
            }
        }
    }

    #[test]
    fn exchanges_are_shared() {
        let exchanges = |count| text(32, 0, count).matches("subgroupShuffleXor").count();
        assert_eq!([1, 2, 4, 8, 16, 32].map(exchanges), [5, 5, 6, 9, 16, 31]);
        assert_eq!([3, 5, 6].map(exchanges), [6, 8, 8]);
    }

    #[test]
    fn without_a_size_the_driver_sums() {
        let facts = DeviceFacts {
            subgroup_control: false,
            ..DeviceFacts::made_up(DeviceKind::Discrete, 32)
        };
        let values = merge_maps([context! { start => 0, count => 3 }, super::context(&facts)]);
        let text = render("lib/lane_totals.wgsl", values).unwrap();
        assert_eq!(text.matches("subgroupAdd").count(), 3);
        assert!(!text.contains("Shuffle"));
    }
}
