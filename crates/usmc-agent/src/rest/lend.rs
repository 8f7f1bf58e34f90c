//! Whether the agent gives its processor away before it sleeps, behind what it has brought to an application.
//!
//! An application that has no other processor answers while the agent is away: the agent finds the answer when it is back, and the
//! application has not to ring. A sleep instead costs both of them a doorbell and a wake-up.
//!
//! ```text
//!           brought                 away for a moment, and nothing came
//!   Nothing ───────▶ Owes(times) ─────────────▶ Owes(times - 1) ... Owes(0)
//!      ▲                 │                                             │
//!      └─────────────────┴── it answers, or the agent sleeps ──────────┘
//!                            or nobody else wants the processor
//! ```
//!
//! Where lending does not pay the agent stops for a while: applications have processors of their own, or a program that computes takes the
//! processor for a whole slice, which a sleep would have kept.

use std::time::Duration;

/// The agent lends so often for what one turn has brought: threads of the device may run first.
const TIMES: u8 = 3;
/// Nobody else has run in so short a time.
const SHORT: Duration = Duration::from_nanos(1500);
/// A program that computes has run in so long a time.
const LONG: Duration = Duration::from_millis(1);
/// So many vain lends in a row stop it.
const VAIN: u8 = 8;
/// A long lend counts as so many. A single one may be the hypervisor's, which has let another machine run.
const LONG_ONE: u8 = 3;
/// The agent then lends nothing for so many turns that bring something.
const STOPPED: u16 = 256;

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
    /// This turn has brought something.
    has_brought: bool,
    /// Vain lends since one has paid.
    vain: u8,
    /// Turns for which it has stopped.
    stopped: u16,
}

impl Lend {
    pub(super) fn new() -> Lend {
        Lend { state: State::Nothing, has_brought: false, vain: 0, stopped: 0 }
    }

    /// Something was brought to an application. It counts at the end of the turn, as the same turn may find the answer to what an earlier one
    /// has brought.
    pub(super) fn brings(&mut self) {
        self.has_brought = true;
    }

    /// A turn is over.
    pub(super) fn ends_turn(&mut self) {
        if std::mem::take(&mut self.has_brought) {
            if self.state == State::Owes(0) {
                self.was_vain(1);
            }
            match self.stopped.checked_sub(1) {
                Some(left) => self.stopped = left,
                None => self.state = State::Owes(TIMES),
            }
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

    /// The agent is about to sleep: the application rings from now on.
    pub(super) fn sleeps(&mut self) {
        if self.state != State::Nothing {
            self.was_vain(1);
        }
    }

    fn was_vain(&mut self, count: u8) {
        self.state = State::Nothing;
        self.vain = self.vain.saturating_add(count);
        if self.vain >= VAIN {
            // The next one tells whether it pays by now.
            self.vain = VAIN - 1;
            self.stopped = STOPPED;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_micros(20);

    /// How often the processor is given away behind so many messages, each of which is answered in the time away with that number, or behind a
    /// sleep.
    fn given(lend: &mut Lend, messages: u32, away: Duration, answered: u8) -> u32 {
        let mut given = 0;
        for _ in 0..messages {
            lend.brings();
            lend.ends_turn();
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
            lend.sleeps();
            lend.answers();
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
    fn it_stops_where_it_does_not_pay() {
        let never = 0;
        // Three times for each of eight, and for one of 257 behind these: an answer behind the sleep is none of these.
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
    fn an_answer_is_to_what_an_earlier_turn_has_brought() {
        let mut lend = Lend::new();
        for _ in 0..1000 {
            lend.brings();
            lend.answers();
            lend.ends_turn();
            assert!(lend.is_due());
            // The last time.
            (0..TIMES).for_each(|_| lend.was_away(MOMENT));
            assert!(!lend.is_due());
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
