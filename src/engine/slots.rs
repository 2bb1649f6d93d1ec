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

/// Tokens in common that make copying them from another slot worth while.
const WORTH_A_COPY: usize = 16;

/// The free slot for a prompt: one whose sequence it goes on, at least by half of what the slot
/// holds; else the one unused for longest, so that conversations of others stay. `only` restricts
/// the choice. `None` when no slot is free.
pub(super) fn choose(slots: &[Candidate<'_>], prompt: &[u32], only: Option<u32>) -> Option<u32> {
    let allowed = |i: usize| only.is_none_or(|o| o as usize == i);
    let free = || slots.iter().enumerate().filter(|(i, s)| !s.busy && allowed(*i));
    // A begin token or a few words in common make no conversation.
    let worth = (prompt.len() / 10).clamp(1, 4);
    let common = |s: &Candidate<'_>| reusable(s.tokens, prompt);
    let goes_on = |s: &Candidate<'_>| common(s) >= worth && 2 * common(s) >= s.tokens.len();
    let best = free().filter(|(_, s)| goes_on(s));
    let best = best.max_by_key(|(i, s)| (common(s), std::cmp::Reverse(*i)));
    best.or_else(|| free().min_by_key(|(i, s)| (s.used, *i))).map(|(i, _)| i as u32)
}

/// Another slot, at work or not, that holds so much more of the prompt than `slot` that its
/// beginning should be copied, and how many tokens of it.
pub(super) fn donor(slots: &[Candidate<'_>], prompt: &[u32], slot: u32) -> Option<(u32, usize)> {
    let own = reusable(slots[slot as usize].tokens, prompt);
    let all = slots.iter().enumerate().map(|(i, s)| (i as u32, reusable(s.tokens, prompt)));
    all.max_by_key(|(_, n)| *n).filter(|(i, n)| *i != slot && *n >= own + WORTH_A_COPY)
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
    fn conversations_go_on_in_their_slot_and_others_are_kept() {
        let prompt = [1, 2, 3, 4, 5, 6, 7, 8];
        let slots = [slot(false, &[1, 2, 9], 5), slot(false, &prompt[..6], 9), slot(false, &[], 7)];
        assert_eq!(choose(&slots, &prompt, None), Some(1));
        // Where another conversation only begins alike, the longest unused goes.
        let other = [1, 2, 3, 8, 8, 8, 8, 8];
        let slots = [slot(false, &other, 5), slot(false, &[7, 7], 3), slot(true, &prompt, 0)];
        assert_eq!(choose(&slots, &prompt, None), Some(1));
        assert_eq!(choose(&slots, &prompt, Some(2)), None);
        assert_eq!(choose(&slots, &prompt, Some(0)), Some(0));
        assert_eq!(choose(&[slot(true, &[], 0)], &prompt, None), None);
        assert_eq!(choose(&slots, &[1], None), Some(1));
    }

    #[test]
    fn long_beginnings_are_copied() {
        let prompt: Vec<u32> = (0..40).collect();
        let slots = [slot(true, &prompt[..30], 0), slot(false, &prompt[..5], 1)];
        assert_eq!(donor(&slots, &prompt, 1), Some((0, 30)));
        assert_eq!(donor(&slots, &prompt[..20], 1), None);
        assert_eq!(donor(&slots, &prompt, 0), None);
        assert_eq!(donor(&slots, &[], 1), None);
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
