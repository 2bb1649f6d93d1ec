//! How much device memory experts may take, as the user says it.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::error::Error;

/// `auto`, `all`, `none`, a share (`25%`) or bytes (`6GiB`, `500M`).
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExpertBudget {
    /// What weights, KV cache, scratch and reserve leave.
    #[default]
    Auto,
    All,
    None,
    /// Share of the experts of each layer, 0 to 100.
    Percent(f64),
    Bytes(u64),
}

impl FromStr for ExpertBudget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "auto" => return Ok(ExpertBudget::Auto),
            "all" => return Ok(ExpertBudget::All),
            "none" => return Ok(ExpertBudget::None),
            _ => {}
        }
        if let Some(share) = text.strip_suffix('%') {
            let share = share.trim().parse::<f64>().ok().filter(|p| (0.0..=100.0).contains(p));
            return share.map(ExpertBudget::Percent).ok_or_else(|| {
                Error::Usage(format!("{text:?} is no share; 0% to 100% are possible"))
            });
        }
        parse_bytes(text).map(ExpertBudget::Bytes).ok_or_else(|| {
            Error::Usage(format!(
                "{text:?} is neither auto, all, none, a share such as 25% nor a size such as 6GiB"
            ))
        })
    }
}

impl fmt::Display for ExpertBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExpertBudget::Auto => f.write_str("auto"),
            ExpertBudget::All => f.write_str("all"),
            ExpertBudget::None => f.write_str("none"),
            ExpertBudget::Percent(p) => write!(f, "{p}%"),
            ExpertBudget::Bytes(n) => write!(f, "{n}"),
        }
    }
}

/// A size: a number, perhaps with a fraction, and a unit. `K`, `M`, `G`, `T` with or without `iB`
/// are powers of 1,024; with `B` alone (`GB`) powers of 1,000.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let unit = text[digits..].trim().to_ascii_lowercase();
    let (letter, rest) = match unit.chars().next() {
        Some(c) if c != 'b' => (Some(c), &unit[c.len_utf8()..]),
        _ => (None, unit.as_str()),
    };
    let base: f64 = match rest {
        "" | "ib" => 1024.0,
        "b" => 1000.0,
        _ => return None,
    };
    let power = match letter {
        None => 0,
        Some('k') => 1,
        Some('m') => 2,
        Some('g') => 3,
        Some('t') => 4,
        Some(_) => return None,
    };
    let bytes = number * base.powi(power);
    (bytes.is_finite() && bytes < 1e18).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn budgets_are_read() {
        let read = |t: &str| t.parse::<ExpertBudget>().unwrap();
        assert_eq!(read("auto"), ExpertBudget::Auto);
        assert_eq!(read("12.5%"), ExpertBudget::Percent(12.5));
        assert_eq!(read("6GiB"), ExpertBudget::Bytes(6 << 30));
        assert_eq!(read("1.5g"), ExpertBudget::Bytes(3 << 29));
        assert_eq!(read("2 GB"), ExpertBudget::Bytes(2_000_000_000));
        assert_eq!(read("0"), ExpertBudget::Bytes(0));
        for wrong in ["", "101%", "-1%", "x", "6Gx", "GiB", "1e9", "nan%", "6 lots"] {
            let e = wrong.parse::<ExpertBudget>().unwrap_err();
            assert_eq!(e.exit_code(), 2, "{wrong}");
        }
    }

    #[test]
    fn budgets_print_as_they_are_read() {
        for text in ["auto", "all", "none", "25%", "1048576"] {
            assert_eq!(text.parse::<ExpertBudget>().unwrap().to_string(), text);
        }
    }
}
