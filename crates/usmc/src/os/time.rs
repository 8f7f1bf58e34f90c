//! Spans of time as programs hand them over. On 32-bit machines there are two of each: libc's own, and one with 64
//! bits of seconds for programs that were built to outlive 2038 (`-D_TIME_BITS=64`).

use libc::{timespec, timeval};

/// A timespec or a timeval.
pub trait Time: Copy {
    /// Nanoseconds of the smaller unit.
    const UNIT_NS: i64;

    /// Seconds, and the smaller unit.
    fn parts(&self) -> (i64, i64);

    /// The same made of its parts. Seconds that do not fit are as many as do.
    fn of(seconds: i64, rest: i64) -> Self;

    /// Whether the kernel takes it for a time.
    fn is_valid(&self) -> bool {
        let (seconds, rest) = self.parts();
        seconds >= 0 && (0..1_000_000_000 / Self::UNIT_NS).contains(&rest)
    }

    /// In nanoseconds, as many as fit; not negative.
    fn ns(&self) -> i64 {
        let (seconds, rest) = self.parts();
        let rest = rest.saturating_mul(Self::UNIT_NS);
        seconds.saturating_mul(1_000_000_000).saturating_add(rest).max(0)
    }

    /// So many nanoseconds.
    fn from_ns(ns: i64) -> Self {
        Self::of(ns / 1_000_000_000, ns % 1_000_000_000 / Self::UNIT_NS)
    }
}

macro_rules! time {
    ($name:ident, $rest:ident, $unit:literal, $second:ty $(, $pad:ident)?) => {
        impl Time for $name {
            const UNIT_NS: i64 = $unit;

            #[allow(clippy::unnecessary_cast, reason = "not where these have 32 bits")]
            fn parts(&self) -> (i64, i64) {
                (self.tv_sec as i64, self.$rest as i64)
            }

            fn of(seconds: i64, rest: i64) -> $name {
                let tv_sec = <$second>::try_from(seconds).unwrap_or(<$second>::MAX);
                $name { tv_sec, $rest: rest as _ $(, $pad: 0)? }
            }
        }
    };
}

time!(timespec, tv_nsec, 1, libc::time_t);
time!(timeval, tv_usec, 1000, libc::time_t);

/// glibc's and the kernel's `struct timespec` with 64 bits of seconds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Timespec64 {
    tv_sec: i64,
    // The order is that of little-endian machines.
    tv_nsec: i32,
    padding: i32,
}

/// glibc's `struct timeval` with 64 bits of seconds.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Timeval64 {
    tv_sec: i64,
    tv_usec: i64,
}

time!(Timespec64, tv_nsec, 1, i64, padding);
time!(Timeval64, tv_usec, 1000, i64);

const _: () = assert!(size_of::<Timespec64>() == 16 && size_of::<Timeval64>() == 16);
