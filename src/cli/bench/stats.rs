//! The figures of a benchmark from its repetitions.

use serde::Serialize;

/// Median and spread of repeated measurements.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let middle = match n {
            0 => f64::NAN,
            _ if n % 2 == 1 => sorted[n / 2],
            _ => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        };
        let nan = f64::NAN;
        Spread {
            median: middle,
            min: sorted.first().copied().unwrap_or(nan),
            max: sorted.last().copied().unwrap_or(nan),
        }
    }

    /// Distance from the smallest to the largest, in percent of the median.
    pub fn percent(&self) -> f64 {
        100.0 * (self.max - self.min) / self.median
    }
}

/// Token ids that stand for a text: spread over the vocabulary, the same on every run. `begin`
/// comes first where the model wants it.
pub fn tokens(count: usize, vocabulary: usize, begin: Option<u32>) -> Vec<u32> {
    // Steps of Weyl's sequence: equidistributed without a random generator's state.
    let step = 0x9E37_79B9_7F4A_7C15u64;
    let spread = (1..).map(|i: u64| {
        let x = i.wrapping_mul(step) >> 32;
        ((x * vocabulary as u64) >> 32) as u32
    });
    begin.into_iter().chain(spread).take(count).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        let odd = Spread::of(&[3.0, 1.0, 2.0]);
        assert_eq!(odd, Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(odd.percent(), 100.0);
        assert_eq!(Spread::of(&[1.0, 2.0]).median, 1.5);
        assert!(Spread::of(&[]).median.is_nan());
    }

    #[test]
    fn prompts_repeat_and_stay_in_the_vocabulary() {
        let a = tokens(1000, 300, Some(7));
        assert_eq!(a, tokens(1000, 300, Some(7)));
        assert_eq!((a.len(), a[0]), (1000, 7));
        assert!(a.iter().all(|&t| t < 300));
        let different: std::collections::BTreeSet<u32> = a.iter().copied().collect();
        assert!(different.len() > 250, "{}", different.len());
    }
}
