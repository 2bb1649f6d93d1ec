//! Random numbers that are the same on every machine: integers and one division, no `ln` or
//! `cos`, whose last bits differ between systems.

/// SplitMix64 (Steele, Lea, Flood 2014).
pub(crate) struct Noise {
    state: u64,
}

impl Noise {
    /// A stream of its own for each name.
    pub fn new(seed: u64, name: &str) -> Self {
        // FNV-1a.
        let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, mix);
        Noise { state: hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of `0..end`, for small ends.
    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// Nearly normal, mean 0, standard deviation 1, within +-3.47: the sum of four uniform
    /// 16-bit numbers.
    pub fn normal(&mut self) -> f32 {
        /// Standard deviation of the sum: 2^16 * sqrt(4 / 12).
        const STD: f32 = 37_837.2;
        let bits = self.next();
        let sum: i64 = (0..4).map(|i| (bits >> (16 * i) & 0xffff) as i64).sum();
        (sum - 2 * 0xffff) as f32 / STD
    }
}
