//! What is counted for a connection or a program, and the rates that two counts make.

use serde::Serialize;

use crate::observed::Totals;
use crate::sockets::Seen;

/// Sent, received.
pub type Pair<T> = [Option<T>; 2];

/// Counts at one moment; `None` is unknown.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Counts {
    /// Bytes of the application.
    pub bytes: Pair<u64>,
    /// Calls in a ring, segments with data on TCP.
    pub messages: Pair<u64>,
    /// Sleeps in the kernel.
    pub sleeps: Option<u64>,
    /// Spins that made a sleep unnecessary.
    pub spins: Option<u64>,
    /// Whether messages are calls.
    pub is_in_ring: bool,
}

/// The same for each second between two moments.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize)]
pub struct Rates {
    /// Bytes a second.
    pub bytes: Pair<f64>,
    /// Messages a second.
    pub messages: Pair<f64>,
    /// Sleeps a second.
    pub sleeps: Option<f64>,
    /// Spins that paid, a second.
    pub spins: Option<f64>,
}

impl Counts {
    /// Of a connection.
    pub fn of(seen: &Seen) -> Counts {
        let is_in_ring = seen.socket.mode != usmc::observe::Mode::Tcp;
        let [_, _, _, _, _, sleeps, spins, ..] = seen.socket.counters;
        Counts {
            bytes: seen.bytes(),
            messages: seen.messages(),
            sleeps: is_in_ring.then_some(sleeps),
            spins: is_in_ring.then_some(spins),
            is_in_ring,
        }
    }

    /// Of the connections of a program that were in a ring and are closed, and its sleeps over several.
    pub fn closed(totals: &[Totals]) -> Counts {
        let sum =
            |of: &dyn Fn(&Totals) -> u64| Some(totals.iter().map(of).fold(0, u64::wrapping_add));
        let closed = |i: usize| sum(&|t| t.closed[i]);
        Counts {
            bytes: [closed(0), closed(1)],
            messages: [closed(2), closed(3)],
            sleeps: sum(&|t| t.closed[5].wrapping_add(t.set_sleeps)),
            spins: sum(&|t| t.closed[6].wrapping_add(t.set_spins)),
            is_in_ring: true,
        }
    }

    /// What was counted from `before` on. What was unknown then, or has gone back, is unknown.
    pub fn since(&self, before: &Counts) -> Counts {
        let less = |now: Option<u64>, then: Option<u64>| now?.checked_sub(then?);
        let both = |now: Pair<u64>, then: Pair<u64>| [less(now[0], then[0]), less(now[1], then[1])];
        // Calls and segments are not one count.
        let is_one = self.is_in_ring == before.is_in_ring;
        Counts {
            bytes: both(self.bytes, before.bytes),
            messages: if is_one { both(self.messages, before.messages) } else { [None; 2] },
            sleeps: less(self.sleeps, before.sleeps),
            spins: less(self.spins, before.spins),
            is_in_ring: self.is_in_ring,
        }
    }

    /// The sum; what one of both does not know is the other's.
    pub fn add(&mut self, more: &Counts) {
        self.each(more, u64::saturating_add);
    }

    /// The difference, at least 0.
    pub fn subtract(&mut self, less: &Counts) {
        self.each(less, u64::saturating_sub);
    }

    fn each(&mut self, other: &Counts, by: fn(u64, u64) -> u64) {
        let places = self.bytes.iter_mut().chain(&mut self.messages);
        let places = places.chain([&mut self.sleeps, &mut self.spins]);
        let others = other.bytes.iter().chain(&other.messages).chain([&other.sleeps, &other.spins]);
        for (place, other) in places.zip(others) {
            if let Some(other) = other {
                *place = Some(by(place.unwrap_or(0), *other));
            }
        }
    }

    /// What was counted in so many seconds, for each of them.
    pub fn rates(&self, seconds: f64) -> Rates {
        let rate = |n: Option<u64>| n.filter(|_| seconds > 0.0).map(|n| n as f64 / seconds);
        Rates {
            bytes: self.bytes.map(rate),
            messages: self.messages.map(rate),
            sleeps: rate(self.sleeps),
            spins: rate(self.spins),
        }
    }
}

impl Rates {
    /// Bytes in both directions; unknown where both are.
    pub fn all_bytes(&self) -> Option<f64> {
        sum(self.bytes)
    }

    /// Messages in both directions.
    pub fn all_messages(&self) -> Option<f64> {
        sum(self.messages)
    }

    /// The sum; what one of both does not know is the other's.
    pub fn add(&mut self, more: &Rates) {
        let places = self.bytes.iter_mut().chain(&mut self.messages);
        let places = places.chain([&mut self.sleeps, &mut self.spins]);
        let others = more.bytes.iter().chain(&more.messages).chain([&more.sleeps, &more.spins]);
        for (place, other) in places.zip(others) {
            *place = sum([*place, *other]);
        }
    }
}

/// The sum of what is known.
pub fn sum(parts: [Option<f64>; 2]) -> Option<f64> {
    match parts {
        [Some(one), Some(other)] => Some(one + other),
        [one, other] => one.or(other),
    }
}

/// A rate in few characters: 0, 0.5, 999, 1.23k, 45.6M, 7.8G.
pub fn short(rate: Option<f64>) -> String {
    let Some(rate) = rate else { return "-".to_owned() };
    let (mut value, mut unit) = (rate, "");
    for larger in ["k", "M", "G", "T", "P", "E"] {
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    match (value, unit) {
        (value, "") if value >= 9.95 || value == value.trunc() => format!("{value:.0}"),
        (value, "") => format!("{value:.1}"),
        (value, unit) if value < 9.995 => format!("{value:.2}{unit}"),
        (value, unit) if value < 99.95 => format!("{value:.1}{unit}"),
        (value, unit) => format!("{value:.0}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_at_most_five_characters() {
        for (rate, text) in [
            (0.0, "0"),
            (0.04, "0.0"),
            (0.5, "0.5"),
            (9.96, "10"),
            (999.0, "999"),
            (999.6, "1.00k"),
            (1234.0, "1.23k"),
            (9_996.0, "10.0k"),
            (99_960.0, "100k"),
            (999_600.0, "1.00M"),
            (1.5e9, "1.50G"),
            (9.9e20, "990E"),
        ] {
            assert_eq!(short(Some(rate)), text);
        }
        assert_eq!(short(None), "-");
    }

    #[test]
    fn what_goes_back_or_was_unknown_has_no_rate() {
        let counts = |tx, rx| Counts { bytes: [tx, rx], is_in_ring: true, ..Counts::default() };
        let rates = counts(Some(30), Some(5)).since(&counts(Some(10), Some(6))).rates(2.0);
        assert_eq!(rates.bytes, [Some(10.0), None]);
        assert_eq!(counts(Some(1), None).since(&counts(None, Some(1))).rates(1.0).bytes, [None; 2]);
        assert_eq!(counts(Some(1), Some(1)).rates(0.0).bytes, [None; 2]);
    }

    #[test]
    fn calls_are_not_compared_to_segments() {
        let of = |is_in_ring| Counts {
            messages: [Some(9), Some(9)],
            bytes: [Some(9), Some(9)],
            is_in_ring,
            ..Counts::default()
        };
        let since = of(true).since(&of(false));
        assert_eq!((since.messages, since.bytes), ([None; 2], [Some(0); 2]));
    }
}
