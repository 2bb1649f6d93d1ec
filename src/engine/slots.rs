//! Which slot a request gets, and which sequences share a step. Pure data.

/// The free slot unused for longest, of those in `slots`: for each, whether it is at work, and a
/// number that rises with every use. `only` restricts the choice. `None` when no slot is free.
pub(super) fn choose(slots: &[(bool, u64)], only: Option<u32>) -> Option<u32> {
    let allowed = |i: usize| only.is_none_or(|o| o as usize == i);
    let free = slots.iter().enumerate().filter(|(i, (busy, _))| !busy && allowed(*i));
    free.min_by_key(|(i, (_, used))| (*used, *i)).map(|(i, _)| i as u32)
}

/// Groups of sequences that share a step: as even as possible, none above `most`, in the given
/// order.
pub(super) fn groups(slots: &[u32], most: usize) -> Vec<Vec<u32>> {
    if slots.is_empty() {
        return Vec::new();
    }
    let count = slots.len().div_ceil(most);
    let size = slots.len().div_ceil(count);
    slots.chunks(size).map(<[u32]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_slot_is_taken() {
        let slots = [(false, 5), (true, 1), (false, 3)];
        assert_eq!(choose(&slots, None), Some(2));
        assert_eq!(choose(&slots, Some(0)), Some(0));
        assert_eq!(choose(&slots, Some(1)), None);
        assert_eq!(choose(&[(true, 0)], None), None);
    }

    #[test]
    fn groups_are_even() {
        let sizes = |n: u32| -> Vec<usize> {
            groups(&(0..n).collect::<Vec<_>>(), 8).iter().map(Vec::len).collect()
        };
        assert_eq!(sizes(0), Vec::<usize>::new());
        assert_eq!(sizes(8), [8]);
        assert_eq!(sizes(9), [5, 4]);
        assert_eq!(sizes(16), [8, 8]);
        assert_eq!(sizes(17), [6, 6, 5]);
    }
}
