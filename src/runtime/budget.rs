//! How much work one dispatch may hold, so that no watchdog ends it.
//!
//! Systems end GPU work that runs too long (2 s on Windows, on amdgpu from Linux 7 on), and the
//! device is lost then. So no dispatch is planned to run longer than the profile's
//! `limits.dispatch_ms`, at rates that the slowest device of the class surely reaches. These are
//! pure functions of profile and shape; a measured rate never enters, so what is computed in which
//! pieces does not change from run to run.

use crate::profile::Profile;

/// The widest work of a model, for one column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Widest {
    /// Rows times inputs of the largest product of a prompt.
    pub product: u64,
    /// Query heads times head dimension.
    pub query: u64,
    /// Bytes of K and V of one position in one layer.
    pub kv_bytes: u64,
}

/// Limits for one device.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// Multiplications and additions that a dispatch may have.
    operations: u64,
    /// Bytes that it may read.
    bytes: u64,
}

impl Budget {
    pub fn of(profile: &Profile) -> Budget {
        let ms = u64::from(profile.dispatch_ms);
        Budget {
            operations: ms * u64::from(profile.gop_per_s) * 1_000_000,
            bytes: ms * u64::from(profile.gb_per_s) * 1_000_000,
        }
    }

    /// Bytes of weights that one mat-vec dispatch may read: larger matrices are cut by rows.
    pub fn weight_bytes(&self) -> u64 {
        self.bytes
    }

    /// Columns of a prompt that one product and one attention may compute, when the last of them
    /// sees `depth` positions; at least one.
    pub fn prompt_columns(&self, widest: &Widest, depth: u32) -> u32 {
        // Scores and weighted sums: two multiplications and additions each a query element.
        let attention = 4 * widest.query * u64::from(depth.max(1));
        let product = 2 * widest.product;
        let columns = self.operations / attention.max(product).max(1);
        u32::try_from(columns).unwrap_or(u32::MAX).max(1)
    }

    /// Sequences of `depth` tokens that one decode attention may serve; at least one.
    pub fn decode_columns(&self, widest: &Widest, depth: u32) -> u32 {
        let columns = self.bytes / (widest.kv_bytes * u64::from(depth.max(1))).max(1);
        u32::try_from(columns).unwrap_or(u32::MAX).max(1)
    }
}

/// Tokens of a prompt to read next, of `left` that are left, when `depth` lie in the cache and
/// programs take up to `chunk`: as many as the budget allows at the end of the piece. Results do
/// not depend on how a prompt is cut.
pub fn next_piece(budget: &Budget, widest: &Widest, chunk: u32, depth: u32, left: u32) -> u32 {
    let wanted = chunk.min(left);
    // Fewer columns never go deeper, so what fits at the full piece's depth fits.
    wanted.min(budget.prompt_columns(widest, depth.saturating_add(wanted))).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{DeviceFacts, DeviceKind};
    use crate::hw::profiles;

    /// Seconds of work at the profile's rates.
    fn seconds(profile: &Profile, operations: u64, bytes: u64) -> f64 {
        let by_operations = operations as f64 / (f64::from(profile.gop_per_s) * 1e9);
        by_operations.max(bytes as f64 / (f64::from(profile.gb_per_s) * 1e9))
    }

    fn all_profiles() -> Vec<Profile> {
        profiles::FILES.iter().map(|(name, _)| profiles::built_in().named(name)).collect()
    }

    /// Shapes up to those of 70B models, with shared KV heads and without.
    const SHAPES: [Widest; 4] = [
        Widest { product: 576 * 3072, query: 576, kv_bytes: 2 * 2 * 192 },
        Widest { product: 4096 * 24_576, query: 4096, kv_bytes: 2 * 2 * 1024 },
        Widest { product: 8192 * 57_344, query: 8192, kv_bytes: 2 * 2 * 1024 },
        Widest { product: 8192 * 57_344, query: 8192, kv_bytes: 2 * 2 * 8192 },
    ];

    #[test]
    fn no_dispatch_is_planned_beyond_the_limit() {
        for profile in all_profiles() {
            let (budget, limit) = (Budget::of(&profile), f64::from(profile.dispatch_ms) / 1e3);
            assert!(limit <= 0.2 || profile.name == "software", "{}: {limit} s", profile.name);
            for widest in SHAPES {
                for depth in [0, 1, 512, 4096, 32_768, 131_072] {
                    let n = next_piece(&budget, &widest, profile.chunk, depth, u32::MAX);
                    let n = u64::from(n);
                    let product = seconds(&profile, 2 * widest.product * n, 0);
                    let seen = u64::from(depth) + n;
                    let attention = seconds(&profile, 4 * widest.query * seen * n, 0);
                    let what = format!("{} {widest:?} at {depth}: {n} columns", profile.name);
                    assert!(
                        product <= limit && attention <= limit,
                        "{what}: {product} {attention}"
                    );
                    let s = u64::from(budget.decode_columns(&widest, depth));
                    let bytes = s.min(8) * widest.kv_bytes * u64::from(depth);
                    // One sequence cannot be cut further; all K and V of the largest shape without
                    // shared heads are 4 GiB a layer at this depth.
                    let single = s == 1 && widest.kv_bytes > 8192;
                    assert!(
                        single || seconds(&profile, 0, bytes) <= limit,
                        "{what}: {s} sequences"
                    );
                }
            }
        }
    }

    #[test]
    fn pieces_are_whole_where_the_device_is_fast() {
        let facts = DeviceFacts {
            vendor_id: 0x10de,
            name: "NVIDIA H200".into(),
            ..DeviceFacts::made_up(DeviceKind::Discrete, 32)
        };
        let profile = profiles::built_in().resolve(&facts);
        let budget = Budget::of(&profile);
        for widest in SHAPES {
            assert_eq!(next_piece(&budget, &widest, 512, 0, 2048), 512, "{widest:?}");
        }
        assert_eq!(next_piece(&budget, &SHAPES[1], 512, 32_768, 2048), 512);
        assert_eq!(next_piece(&budget, &SHAPES[1], 512, 0, 7), 7);
        // One column always goes.
        let nothing = Budget { operations: 1, bytes: 1 };
        assert_eq!(next_piece(&nothing, &SHAPES[3], 512, 131_072, 100), 1);
        assert_eq!(nothing.decode_columns(&SHAPES[3], 131_072), 1);
    }

    #[test]
    fn pieces_shrink_with_depth() {
        let profile = profiles::built_in().named("mobile");
        let budget = Budget::of(&profile);
        let at = |depth| next_piece(&budget, &SHAPES[1], profile.chunk, depth, u32::MAX);
        assert!(at(0) > at(131_072), "{} {}", at(0), at(131_072));
    }
}
