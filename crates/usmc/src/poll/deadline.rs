//! How long a wait may take.

use crate::os::clock;

/// The time a wait may take.
#[derive(Clone, Copy)]
pub struct Deadline(Option<u64>);

impl Deadline {
    /// `timeout_ns` from now; negative = for ever.
    pub fn after(timeout_ns: i64) -> Deadline {
        Deadline::from(clock::now_ns(), timeout_ns)
    }

    /// `timeout_ns` from `now_ns` ([`clock::now_ns`]) on; negative = for ever.
    pub fn from(now_ns: u64, timeout_ns: i64) -> Deadline {
        Deadline((timeout_ns >= 0).then(|| now_ns.saturating_add(timeout_ns as u64)))
    }

    /// Nanoseconds left, `None` = for ever.
    pub fn left(self) -> Option<u64> {
        self.0.map(|at| if at == 0 { 0 } else { at.saturating_sub(clock::now_ns()) })
    }
}

/// The shorter one of two times; `None` = for ever.
pub fn at_most(time: Option<u64>, limit: Option<u64>) -> Option<u64> {
    match (time, limit) {
        (Some(time), Some(limit)) => Some(time.min(limit)),
        (time, limit) => time.or(limit),
    }
}
