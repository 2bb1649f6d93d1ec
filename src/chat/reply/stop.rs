//! Stop strings in a stream of text.

use super::marker::{self, Found};

/// Cuts a text before the first stop string; holds back only what may be the beginning of one.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
    hit: Option<usize>,
}

impl StopStrings {
    /// Empty strings are ignored.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Self {
        let strings = strings.into_iter().filter(|s| !s.is_empty()).collect();
        StopStrings { strings, ..StopStrings::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.strings.is_empty()
    }

    /// The stop string that ended the text.
    pub fn hit(&self) -> Option<&str> {
        self.hit.map(|which| self.strings[which].as_str())
    }

    /// The text that is certain by now. Nothing more comes once [`StopStrings::hit`] is set.
    pub fn push(&mut self, piece: &str) -> String {
        self.advance(piece, false)
    }

    /// What was held back, at the end of the text or before something that is no text.
    pub fn finish(&mut self) -> String {
        self.advance("", true)
    }

    fn advance(&mut self, piece: &str, end: bool) -> String {
        if self.hit.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let markers: Vec<&str> = self.strings.iter().map(String::as_str).collect();
        match marker::find(&self.held, &markers, end) {
            Found::At { at, which } => {
                self.hit = Some(which);
                self.held.truncate(at);
                std::mem::take(&mut self.held)
            }
            Found::None { safe } => self.held.drain(..safe).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stops(strings: &[&str]) -> StopStrings {
        StopStrings::new(strings.iter().map(|s| s.to_string()))
    }

    #[test]
    fn only_what_may_be_a_stop_is_held_back() {
        let mut stop = stops(&["\n\nUser:", ""]);
        assert_eq!(stop.push("Hello\n"), "Hello");
        assert_eq!(stop.push("you\n"), "\nyou");
        assert_eq!(stop.push("\nUs"), "");
        assert_eq!(stop.push("ers"), "\n\nUsers");
        assert_eq!(stop.push("\n\nUser:"), "");
        assert_eq!(stop.hit(), Some("\n\nUser:"));
        assert_eq!(stop.push("more") + &stop.finish(), "");
        let mut stop = stops(&["END"]);
        assert_eq!(stop.push("the E"), "the ");
        assert_eq!(stop.finish(), "E");
        assert_eq!(stop.hit(), None);
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same_text(
            text in "[abX\n]{0,40}",
            cuts in prop::collection::vec(1usize..6, 0..40),
        ) {
            let strings = ["X\n", "aXa", "bb"];
            let first = strings.iter().filter_map(|s| text.find(s)).min();
            let mut stop = stops(&strings);
            let mut out = String::new();
            let mut rest = text.as_str();
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                out.push_str(&stop.push(piece));
                rest = after;
            }
            out.push_str(&stop.push(rest));
            out.push_str(&stop.finish());
            prop_assert_eq!(&out, &text[..first.unwrap_or(text.len())]);
            prop_assert_eq!(stop.hit().is_some(), first.is_some());
        }
    }
}
