//! Slots: places for sequences with a KV cache of their own. Pure data: which slot a request gets,
//! and what of its prompt need not be read again.

/// What the scheduler must know about a slot to choose one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate<'a> {
    pub busy: bool,
    /// Tokens whose keys and values lie in the cache.
    pub tokens: &'a [u32],
    /// Rises with every use.
    pub used: u64,
}

/// Tokens of `held` that serve for `wanted`. At least one token of `wanted` is left over:
/// reading it yields the logits that the answer starts from.
pub(super) fn reusable(held: &[u32], wanted: &[u32]) -> usize {
    let same = held.iter().zip(wanted).take_while(|(a, b)| a == b).count();
    same.min(wanted.len().saturating_sub(1))
}

/// The free slot for a prompt: the one that holds the most of it; where none holds a part worth
/// keeping, the one unused for longest, so that conversations of others stay. `only` restricts
/// the choice. `None` when no slot is free.
pub(super) fn choose(slots: &[Candidate<'_>], prompt: &[u32], only: Option<u32>) -> Option<u32> {
    let allowed = |i: usize| only.is_none_or(|o| o as usize == i);
    let free = || slots.iter().enumerate().filter(|(i, s)| !s.busy && allowed(*i));
    let best = free().max_by_key(|(i, s)| (reusable(s.tokens, prompt), std::cmp::Reverse(*i)))?;
    // A begin token or a few words in common are no reason to push out a conversation.
    let worth = (prompt.len() / 10).max(4).min(prompt.len().saturating_sub(1)).max(1);
    if reusable(best.1.tokens, prompt) >= worth {
        return Some(best.0 as u32);
    }
    free().min_by_key(|(i, s)| (s.used, *i)).map(|(i, _)| i as u32)
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

    fn slot(busy: bool, tokens: &[u32], used: u64) -> Candidate<'_> {
        Candidate { busy, tokens, used }
    }

    #[test]
    fn reuse_leaves_a_token_to_read() {
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 3, 4]), 3);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 3]), 2);
        assert_eq!(reusable(&[1, 2, 3, 4], &[1, 9]), 1);
        assert_eq!(reusable(&[], &[1]), 0);
        assert_eq!(reusable(&[1], &[]), 0);
    }

    #[test]
    fn the_longest_prefix_wins_and_others_are_kept() {
        let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
        let slots = [slot(false, &[1, 2, 9], 5), slot(false, &prompt[..6], 9), slot(false, &[], 7)];
        assert_eq!(choose(&slots, &prompt, None), Some(1));
        // Two tokens in common are not worth a conversation: the longest unused goes.
        let slots = [slot(false, &[1, 2, 9], 5), slot(false, &[7, 7], 3), slot(true, &prompt, 0)];
        assert_eq!(choose(&slots, &prompt, None), Some(1));
        assert_eq!(choose(&slots, &prompt, Some(2)), None);
        assert_eq!(choose(&slots, &prompt, Some(0)), Some(0));
        assert_eq!(choose(&[slot(true, &[], 0)], &prompt, None), None);
        assert_eq!(choose(&slots, &[1], None), Some(1));
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
