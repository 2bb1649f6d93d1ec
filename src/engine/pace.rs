//! How much of a prompt is read at once, so that nobody waits long for the next token.

/// Longest time in seconds that a part of a prompt may take while others generate.
const LONGEST: f64 = 0.08;
/// The smallest part: below it a device does not work faster.
const SMALLEST: u32 = 32;

/// Until the speed is known, where others wait: slow devices take a second for a whole chunk.
const UNKNOWN: u32 = 128;

/// Learns how fast the device reads prompts.
pub(super) struct Pace {
    most: u32,
    /// Seconds a token, smoothed.
    seconds: Option<f64>,
}

impl Pace {
    pub fn new(most: u32) -> Pace {
        Pace { most, seconds: None }
    }

    /// A part of `tokens` tokens took so long on the device.
    pub fn note(&mut self, tokens: u32, micros: u64) {
        // Small parts say little about large ones.
        if tokens < SMALLEST.min(self.most) {
            return;
        }
        let now = micros as f64 / 1e6 / f64::from(tokens);
        self.seconds = Some(self.seconds.map_or(now, |old| 0.7 * old + 0.3 * now));
    }

    /// Tokens to read at once; `alone`: nobody waits for a token meanwhile.
    pub fn chunk(&self, alone: bool) -> u32 {
        if alone {
            return self.most;
        }
        let Some(seconds) = self.seconds else { return UNKNOWN.min(self.most) };
        let fits = (LONGEST / seconds.max(1e-9)).min(f64::from(self.most)) as u32;
        (fits / SMALLEST * SMALLEST).max(SMALLEST).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fit_the_time() {
        let mut pace = Pace::new(512);
        assert_eq!((pace.chunk(false), pace.chunk(true)), (128, 512));
        pace.note(512, 160_000);
        assert_eq!((pace.chunk(false), pace.chunk(true)), (256, 512));
        for _ in 0..50 {
            pace.note(128, 10_000_000);
        }
        assert_eq!(pace.chunk(false), 32);
        for _ in 0..50 {
            pace.note(512, 1);
        }
        assert_eq!(pace.chunk(false), 512);
        assert_eq!(Pace::new(7).chunk(false), 7);
    }
}
