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
//! Where lending does not pay the agent stops for a while, and for longer each time: applications have processors of their own, or a program that
//! computes takes the processor for a whole slice, which a sleep would have kept.

use std::time::Duration;

/// The agent lends so often for what one turn has brought: threads of the device may run first.
const TIMES: u8 = 3;
/// Nobody else has run in so short a time.
const SHORT: Duration = Duration::from_nanos(1500);
/// A program that computes has run in so long a time, or in that of so many of the cheapest system calls: where the processor is emulated an
/// answer takes long, too.
const LONG: Duration = Duration::from_millis(1);
const LONG_CALLS: u32 = 5000;
/// So many vain lends more than such that pay stop it, and as many that pay are kept in mind.
const VAIN: u8 = 8;
/// A long lend counts as so many. A single one may be the hypervisor's, which has let another machine run.
const LONG_ONE: u8 = 3;
/// The agent then lends nothing for so many turns that bring something: at first, and after several times.
const STOPPED: u16 = 16;
const STOPPED_MOST: u16 = 256;

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
    /// How many vain lends more stop it.
    credit: u8,
    /// Turns for which it has stopped.
    stopped: u16,
    /// For how many it stops next.
    next_stop: u16,
    /// A program that computes has run in so long a time.
    long: Duration,
}

impl Lend {
    /// `call`: how long the cheapest system call takes.
    pub(super) fn new(call: Duration) -> Lend {
        let long = LONG.max(call * LONG_CALLS);
        Lend {
            state: State::Nothing,
            has_brought: false,
            credit: VAIN,
            stopped: 0,
            next_stop: STOPPED,
            long,
        }
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
            _ if time > self.long => self.was_vain(LONG_ONE),
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
                self.credit = (self.credit + 1).min(VAIN);
                self.next_stop = (self.next_stop / 2).max(STOPPED);
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
        self.credit = self.credit.saturating_sub(count);
        if self.credit == 0 {
            // The next one tells whether it pays by now.
            self.credit = 1;
            self.stopped = self.next_stop;
            self.next_stop = (self.next_stop * 2).min(STOPPED_MOST);
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
        let mut lend = Lend::new(Duration::ZERO);
        assert!(!lend.is_due());
        assert_eq!(given(&mut lend, 1000, MOMENT, 1), 1000);
        assert_eq!(given(&mut lend, 1000, MOMENT, 3), 3000);
    }

    /// How many of so many messages find it lending, where it begins with so many, and none pays.
    fn tried(first: u32, messages: u32) -> u32 {
        let stops = [16, 32, 64, 128].into_iter().chain(std::iter::repeat(256));
        let mut at = first;
        stops
            .map_while(|stop| {
                at += stop + 1;
                (at <= messages).then_some(1)
            })
            .sum::<u32>()
            + first
    }

    #[test]
    fn it_stops_where_it_does_not_pay() {
        let (never, messages) = (0, 3000);
        // Three times for each: an answer behind the sleep is none of these.
        let mut lend = Lend::new(Duration::ZERO);
        assert_eq!(given(&mut lend, messages, MOMENT, never), tried(8, messages) * 3);
        // Nobody else wants the processor.
        let mut lend = Lend::new(Duration::ZERO);
        assert_eq!(given(&mut lend, messages, Duration::ZERO, never), tried(8, messages));
        assert!(tried(8, messages) < 24);
        // A slice of a program that computes, be there an answer or not.
        for answered in [never, 1] {
            let mut lend = Lend::new(Duration::ZERO);
            assert_eq!(given(&mut lend, messages, 3 * LONG, answered), tried(3, messages));
        }
    }

    #[test]
    fn on_a_slow_processor_an_answer_takes_long() {
        let mut lend = Lend::new(LONG / 1000);
        assert_eq!(given(&mut lend, 1000, 3 * LONG, 1), 1000);
        assert_eq!(given(&mut lend, 3000, 6 * LONG, 1), tried(3, 3000));
    }

    #[test]
    fn an_answer_is_to_what_an_earlier_turn_has_brought() {
        let mut lend = Lend::new(Duration::ZERO);
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
        let mut lend = Lend::new(Duration::ZERO);
        given(&mut lend, 8, Duration::ZERO, 0);
        assert_eq!(given(&mut lend, 16, MOMENT, 1), 0);
        assert_eq!(given(&mut lend, 100, MOMENT, 1), 100);
        // A vain one among others is nothing, nor is a long one among more.
        for _ in 0..100 {
            assert_eq!(given(&mut lend, 1, Duration::ZERO, 0), 1);
            assert_eq!(given(&mut lend, 1, MOMENT, 1), 1);
        }
        for _ in 0..100 {
            assert_eq!(given(&mut lend, 1, 2 * LONG, 0), 1);
            assert_eq!(given(&mut lend, 3, MOMENT, 1), 3);
        }
        // What has paid since makes the next stop a short one.
        given(&mut lend, 8, Duration::ZERO, 0);
        assert_eq!(given(&mut lend, 17, MOMENT, 1), 1);
    }
}
