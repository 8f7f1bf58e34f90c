//! Random numbers that a seed repeats.

use std::time::{SystemTime, UNIX_EPOCH};

/// A small generator of our own: what a seed does must not depend on a library's version.
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// From a seed; close seeds give unlike numbers.
    pub fn from_seed(seed: u64) -> Draw {
        // SplitMix64's increment and first multiplier.
        Draw((seed.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9))
    }

    /// From the environment variable `name`, or the clock; printed, so that a failure can be repeated.
    pub fn announced(name: &str) -> Draw {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
        let seed = crate::number(name, now);
        println!("{name}={seed}");
        Draw::from_seed(seed)
    }

    /// A number from 0 to `limit` - 1.
    ///
    /// # Panics
    /// When `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, cases: u64) -> bool {
        self.below(100) < cases
    }

    /// One of them; nothing of none.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() { None } else { Some(from[self.below(from.len() as u64) as usize]) }
    }

    /// One of at least one.
    ///
    /// # Panics
    /// When there is none.
    pub fn one<T: Copy>(&mut self, from: &[T]) -> T {
        self.pick(from).expect("something to pick from")
    }

    /// One of them by weight.
    ///
    /// # Panics
    /// When there is none, or no weight.
    pub fn weighted<T: Copy>(&mut self, from: &[(u64, T)]) -> T {
        let mut left = self.below(from.iter().map(|(weight, _)| weight).sum());
        for &(weight, item) in from {
            if left < weight {
                return item;
            }
            left -= weight;
        }
        unreachable!("the weights' sum was wrong")
    }
}
