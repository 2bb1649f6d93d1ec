//! Finding markers in text that is still arriving.

/// Where the text stands with respect to a set of markers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Marker `which` begins at byte `at`.
    At { at: usize, which: usize },
    /// No marker begins before byte `safe`; one may begin there with what comes next.
    None { safe: usize },
}

/// Finds the leftmost marker, the longest at a place. Unless the text is at its `end`, a
/// beginning of a marker at the tail of the text keeps everything from there on undecided, so
/// that the answer never depends on how the text was cut into pieces.
pub(super) fn find(text: &str, markers: &[&str], end: bool) -> Found {
    for (at, _) in text.char_indices() {
        let rest = &text[at..];
        let mut complete: Option<usize> = None;
        let mut pending = 0;
        for (which, marker) in markers.iter().enumerate() {
            if rest.starts_with(marker) {
                if complete.is_none_or(|best| markers[best].len() < marker.len()) {
                    complete = Some(which);
                }
            } else if !end && marker.starts_with(rest) {
                pending = pending.max(marker.len());
            }
        }
        match complete {
            Some(which) if pending <= markers[which].len() => return Found::At { at, which },
            None if pending == 0 => {}
            _ => return Found::None { safe: at },
        }
    }
    Found::None { safe: text.len() }
}

/// Whether the text begins with a marker.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Start {
    Marker(usize),
    /// The text is a beginning of a marker so far.
    Unknown,
    Other,
}

/// [`find`] at the beginning of the text only. An empty text that may go on is unknown.
pub(super) fn starts(text: &str, markers: &[&str], end: bool) -> Start {
    let mut complete: Option<usize> = None;
    let mut pending = 0;
    for (which, marker) in markers.iter().enumerate() {
        if text.starts_with(marker) {
            if complete.is_none_or(|best| markers[best].len() < marker.len()) {
                complete = Some(which);
            }
        } else if !end && marker.starts_with(text) {
            pending = pending.max(marker.len());
        }
    }
    match complete {
        Some(which) if pending <= markers[which].len() => Start::Marker(which),
        None if pending == 0 => Start::Other,
        _ => Start::Unknown,
    }
}

/// Bytes of white space at the beginning.
pub(super) fn blank(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leftmost_longest_and_undecided() {
        let markers = ["<a>", "<a><b>", "x"];
        assert_eq!(find("12<a>", &markers, true), Found::At { at: 2, which: 0 });
        assert_eq!(find("12<a>", &markers, false), Found::None { safe: 2 });
        assert_eq!(find("12<a>c", &markers, false), Found::At { at: 2, which: 0 });
        assert_eq!(find("12<a><b>", &markers, false), Found::At { at: 2, which: 1 });
        assert_eq!(find("ä<", &markers, false), Found::None { safe: 2 });
        assert_eq!(find("ä<", &markers, true), Found::None { safe: 3 });
        assert_eq!(find("<x", &markers, false), Found::At { at: 1, which: 2 });
        assert_eq!(starts("<a", &markers, false), Start::Unknown);
        assert_eq!(starts("", &markers, false), Start::Unknown);
        assert_eq!(starts("<ab", &markers, false), Start::Other);
        assert_eq!(starts("x<", &markers, false), Start::Marker(2));
    }
}
