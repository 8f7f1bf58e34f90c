//! Whether the agent gives its processor away before it sleeps, behind what it has brought to an application.
//!
//! An application that has no other processor answers while the agent is away: the agent finds the answer when it is back, and the
//! application has not to ring. A sleep instead costs both of them a doorbell and a wake-up.
//!
//! ```text
//!           brought                 away for a moment, and nothing came
//!   Nothing ───────▶ Owes(times) ─────────────▶ Owes(times - 1) ...
//!      ▲                 │
//!      └── it answers, or nobody else wants the processor, or it had all its times
//! ```
//!
//! Where it does not pay it is left for a while: applications have processors of their own, or a program that computes takes the
//! processor for a whole slice, which a sleep would have kept.

use std::time::Duration;

/// So often at most: threads of the device may run first.
const TIMES: u8 = 3;
/// Nobody else has run in so short a time.
const SHORT: Duration = Duration::from_nanos(1500);
/// A program that computes has run for so long.
const LONG: Duration = Duration::from_millis(2);
/// Vain ones in a row, behind which it is left.
const VAIN: u8 = 8;
/// A long one counts as so many. One alone may be the host's, which has let another machine run.
const LONG_ONE: u8 = 3;
/// It is left for so many of what is brought.
const LEFT: u16 = 256;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Nothing,
    /// So many times more. Behind the last time the answer may still be found.
    Owes(u8),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Lend {
    state: State,
    /// Vain ones since one has paid.
    vain: u8,
    /// It is left for so many.
    left: u16,
}

impl Lend {
    pub(super) fn new() -> Lend {
        Lend { state: State::Nothing, vain: 0, left: 0 }
    }

    /// Something was brought to an application.
    pub(super) fn brings(&mut self) {
        if self.state == State::Owes(0) {
            self.was_vain(1);
        }
        match self.left.checked_sub(1) {
            Some(left) => self.left = left,
            None => self.state = State::Owes(TIMES),
        }
    }

    /// Whether the processor is to be given away now.
    pub(super) fn is_due(&self) -> bool {
        matches!(self.state, State::Owes(1..))
    }

    /// It was given away for so long.
    pub(super) fn was_away(&mut self, time: Duration) {
        let State::Owes(times) = self.state else { return };
        match time {
            _ if time > LONG => self.was_vain(LONG_ONE),
            _ if time < SHORT => self.was_vain(1),
            _ => self.state = State::Owes(times.saturating_sub(1)),
        }
    }

    /// An application has done something.
    pub(super) fn answers(&mut self) {
        if let State::Owes(times) = self.state {
            self.state = State::Nothing;
            // Without a time away it would have answered all the same.
            if times < TIMES {
                self.vain = 0;
            }
        }
    }

    fn was_vain(&mut self, count: u8) {
        self.state = State::Nothing;
        self.vain = self.vain.saturating_add(count);
        if self.vain >= VAIN {
            // The next one tells whether it pays by now.
            self.vain = VAIN - 1;
            self.left = LEFT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_micros(20);

    /// How often the processor is given away behind so many messages, each of which is answered in the time away with that number.
    fn given(lend: &mut Lend, messages: u32, away: Duration, answered: u8) -> u32 {
        let mut given = 0;
        for _ in 0..messages {
            lend.brings();
            for time in 1.. {
                if !lend.is_due() {
                    break;
                }
                given += 1;
                lend.was_away(away);
                if time == answered {
                    lend.answers();
                }
            }
        }
        given
    }

    #[test]
    fn an_answer_ends_it() {
        let mut lend = Lend::new();
        assert!(!lend.is_due());
        assert_eq!(given(&mut lend, 1000, MOMENT, 1), 1000);
        assert_eq!(given(&mut lend, 1000, MOMENT, 3), 3000);
    }

    #[test]
    fn it_is_left_where_it_does_not_pay() {
        let never = 0;
        // Three times for each of eight, and for one of 257 behind these.
        let mut lend = Lend::new();
        assert_eq!(given(&mut lend, 8 + 257 * 10, MOMENT, never), (8 + 10) * 3);
        // Nobody else wants the processor.
        let mut lend = Lend::new();
        assert_eq!(given(&mut lend, 8 + 257 * 10, Duration::ZERO, never), 8 + 10);
        // A slice of a program that computes, be there an answer or not.
        for answered in [never, 1] {
            let mut lend = Lend::new();
            assert_eq!(given(&mut lend, 3 + 257 * 10, 3 * LONG, answered), 3 + 10);
        }
    }

    #[test]
    fn it_begins_anew_where_it_pays() {
        let mut lend = Lend::new();
        given(&mut lend, 8, Duration::ZERO, 0);
        assert_eq!(given(&mut lend, 256, MOMENT, 1), 0);
        assert_eq!(given(&mut lend, 100, MOMENT, 1), 100);
        // A vain one among others is nothing.
        for _ in 0..100 {
            assert_eq!(given(&mut lend, 1, Duration::ZERO, 0), 1);
            assert_eq!(given(&mut lend, 1, MOMENT, 1), 1);
        }
    }
}
