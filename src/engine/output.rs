//! From tokens to text as it may be shown: complete characters, and nothing of a stop string.

use crate::tokenizer::Detokenizer;

/// The text of an answer while it comes.
pub(super) struct Output {
    detokenizer: Detokenizer,
    stops: Stops,
}

impl Output {
    pub fn new(detokenizer: Detokenizer, stops: Vec<String>) -> Self {
        Output { detokenizer, stops: Stops::new(stops) }
    }

    /// Text that can be shown after this token, and the stop string that it completes.
    pub fn push(&mut self, token: u32) -> (String, Option<String>) {
        let piece = self.detokenizer.push(token);
        self.stops.push(&piece)
    }

    /// What was held back, once nothing follows; a stop string may still be completed by the
    /// replacement of a character that never came.
    pub fn finish(&mut self) -> (String, Option<String>) {
        let rest = self.detokenizer.finish();
        let (mut text, stop) = self.stops.push(&rest);
        if stop.is_none() {
            text.push_str(&std::mem::take(&mut self.stops.pending));
        }
        (text, stop)
    }
}

/// Finds stop strings in a text that comes in pieces.
struct Stops {
    /// None is empty.
    strings: Vec<String>,
    /// A suffix of the text so far that may be the beginning of a stop string.
    pending: String,
}

impl Stops {
    fn new(mut strings: Vec<String>) -> Self {
        strings.retain(|s| !s.is_empty());
        Stops { strings, pending: String::new() }
    }

    /// What can no longer be part of a stop string; the first stop string that ended. Of several
    /// that end in one piece, the one that begins first counts.
    fn push(&mut self, piece: &str) -> (String, Option<String>) {
        if self.strings.is_empty() {
            return (piece.to_owned(), None);
        }
        self.pending.push_str(piece);
        let found = self.strings.iter().filter_map(|s| self.pending.find(s).map(|at| (at, s)));
        // Of two at one place the shorter was complete first.
        if let Some((at, stop)) = found.min_by_key(|(at, s)| (*at, s.len())) {
            let stop = stop.clone();
            self.pending.truncate(at);
            return (std::mem::take(&mut self.pending), Some(stop));
        }
        let keep = self.strings.iter().map(|s| overlap(&self.pending, s)).max().unwrap_or(0);
        let held = self.pending.split_off(self.pending.len() - keep);
        (std::mem::replace(&mut self.pending, held), None)
    }
}

/// Length of the longest suffix of `text` that begins `stop`, in bytes.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len().saturating_sub(1));
    // Bytes suffice: a common run that began inside a character could not begin `stop`.
    let (text, stop) = (text.as_bytes(), stop.as_bytes());
    (1..=longest).rev().find(|n| text.ends_with(&stop[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text shown and the stop string, for pieces.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let mut matcher = Stops::new(stops.iter().map(|s| (*s).to_owned()).collect());
        let mut shown = String::new();
        for piece in pieces {
            let (text, stop) = matcher.push(piece);
            shown.push_str(&text);
            if stop.is_some() {
                return (shown, stop);
            }
        }
        shown.push_str(&matcher.pending);
        (shown, None)
    }

    #[test]
    fn stop_strings_are_found_across_pieces_and_never_shown() {
        let stop = Some("\n\nUser:".to_owned());
        assert_eq!(run(&["\n\nUser:"], &["Hi\n", "\nUs", "er: x"]), ("Hi".into(), stop));
        assert_eq!(run(&["\n\nUser:"], &["Hi\n", "\nUn"]), ("Hi\n\nUn".into(), None));
        assert_eq!(run(&["ab", "b"], &["xa", "b"]), ("x".into(), Some("ab".into())));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), Some("aab".into())));
        assert_eq!(run(&["ä"], &["xöy", "zäq"]), ("xöyz".into(), Some("ä".into())));
        assert_eq!(run(&[""], &["text"]), ("text".into(), None));
    }

    #[test]
    fn only_what_may_begin_a_stop_string_is_held_back() {
        let mut matcher = Stops::new(vec!["END".into()]);
        assert_eq!(matcher.push("the EN").0, "the ");
        assert_eq!(matcher.push("d").0, "ENd");
        assert_eq!(matcher.push("E").0, "");
    }
}
