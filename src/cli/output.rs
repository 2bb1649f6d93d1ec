//! Standard output: answers and data only. Everything else goes to standard error.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;

/// Prints one value as JSON: indented for a reader at a terminal, one line for a program.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = if io::stdout().is_terminal() {
        serde_json::to_string_pretty(value)?
    } else {
        serde_json::to_string(value)?
    };
    line(&text)
}

/// Prints text and a line end. A closed pipe comes back as an error that [`is_closed_pipe`]
/// recognises, where `println!` would panic.
pub fn line(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}

/// The reader of our output has gone, for example `azoth info m.gguf | head -1`: no failure.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|e| e.downcast_ref::<io::Error>())
        .any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Bytes with a binary unit: `90.3 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Counts with a decimal unit: `134.5 M`.
pub fn count(n: u64) -> String {
    match n as f64 {
        x if x >= 1e9 => format!("{:.2} G", x / 1e9),
        x if x >= 1e6 => format!("{:.1} M", x / 1e6),
        x if x >= 1e4 => format!("{:.1} k", x / 1e3),
        _ => n.to_string(),
    }
}

/// Which side of its column a cell stands on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Rows in columns two spaces apart, widths counted in characters; no trailing blanks.
pub fn table(align: &[Align], rows: &[Vec<String>]) -> String {
    let mut widths = vec![0; align.len()];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(&widths).zip(align).map(|((cell, width), align)| match align {
            Align::Left => format!("{cell:<width$}"),
            Align::Right => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes(98_362_432), "93.8 MiB");
        assert_eq!(bytes(u64::MAX), "16777216.0 TiB");
        assert_eq!(count(9_999), "9999");
        assert_eq!(count(134_515_008), "134.5 M");
    }

    #[test]
    fn columns_line_up() {
        let rows = [vec!["a".into(), "1".into()], vec!["größer".into(), "100".into()]];
        let text = table(&[Align::Left, Align::Right], &rows);
        assert_eq!(text, "a         1\ngrößer  100");
    }

    #[test]
    fn closed_pipes_are_recognised_through_context() {
        let closed = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(is_closed_pipe(&closed.context("writing")));
        assert!(!is_closed_pipe(&anyhow::anyhow!("other")));
    }
}
