//! The phases of a record, and the events that lead from one to the next.
//!
//! ```text
//!  Free ──Made──▶ Fresh ──Listens──▶ Listen
//!                   │
//!             Begins or ComesBack
//!                   ▼
//!                 Early ──Offers────▶ Offered ───┐
//!                   ▲ └───Attaches──▶ Attached ──┤ Confirms
//!                   │                            ▼
//!                   └─────────ComesBack──────── Ring
//!
//!  from any of them: GivesUp ──▶ Plain, Disconnects ──▶ Fresh, Frees ──▶ Free
//! ```
//!
//! Plain comes back, too, where a descriptor of the connection came from another process. Each event leads to one phase; [`LEGAL`] says
//! where it may happen.

/// Where a connection is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Phase {
    /// The record is not in use.
    Free = 0,
    /// A TCP socket, neither connected nor listening.
    Fresh = 1,
    /// Listening; the record's `token` says where it is registered.
    Listen = 2,
    /// Client: an offer is out.
    Offered = 3,
    /// No slot yet: a client has made no offer ([`crate::record::change_over`]), an acceptor has found none.
    Early = 4,
    /// Acceptor: attached, the client has not confirmed.
    Attached = 5,
    /// Confirmed: each direction is in the ring or about to change over.
    Ring = 6,
    /// Plain TCP, for good unless the socket is disconnected or comes back.
    Plain = 7,
}

/// What moves a record on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// socket(2), or a descriptor that came from elsewhere.
    Made,
    /// listen(2).
    Listens,
    /// connect(2) or accept(2).
    Begins,
    /// The client leaves an offer.
    Offers,
    /// The acceptor takes the slot of an offer.
    Attaches,
    /// Both ends hold the slot.
    Confirms,
    /// Its end, or the peer's, is or may soon be in other hands.
    ComesBack,
    /// connect(2) with AF_UNSPEC, or a connection attempt that failed.
    Disconnects,
    /// It is left to TCP, with a reason.
    GivesUp,
    /// Nobody needs the record any more.
    Frees,
}

impl Event {
    /// The phase that it leads to.
    pub const fn leads_to(self) -> Phase {
        match self {
            Event::Made | Event::Disconnects => Phase::Fresh,
            Event::Listens => Phase::Listen,
            Event::Begins | Event::ComesBack => Phase::Early,
            Event::Offers => Phase::Offered,
            Event::Attaches => Phase::Attached,
            Event::Confirms => Phase::Ring,
            Event::GivesUp => Phase::Plain,
            Event::Frees => Phase::Free,
        }
    }

    /// Whether it may happen in this phase.
    pub fn may_follow(self, phase: Phase) -> bool {
        LEGAL.iter().any(|(event, from)| *event == self && from.contains(&phase))
    }
}

/// In which phases each event may happen.
pub const LEGAL: &[(Event, &[Phase])] = &[
    (Event::Made, &[Phase::Free]),
    (Event::Listens, &[Phase::Fresh]),
    // Early: connect(2) once more, of an attempt that is under way or has failed.
    (Event::Begins, &[Phase::Fresh, Phase::Early]),
    (Event::Offers, &[Phase::Early]),
    (Event::Attaches, &[Phase::Early]),
    (Event::Confirms, &[Phase::Offered, Phase::Attached]),
    // Fresh: the record was made for a descriptor that came with the connection.
    (Event::ComesBack, &[Phase::Fresh, Phase::Offered, Phase::Attached, Phase::Ring, Phase::Plain]),
    (Event::Disconnects, &ALL),
    (Event::GivesUp, &ALL),
    (Event::Frees, &ALL),
];

/// Those of a record in use.
const ALL: [Phase; 7] = [
    Phase::Fresh,
    Phase::Listen,
    Phase::Offered,
    Phase::Early,
    Phase::Attached,
    Phase::Ring,
    Phase::Plain,
];

impl Phase {
    /// Of its number. Of others, as another process' memory may have: [`Phase::Free`].
    #[inline(always)]
    pub const fn of(code: u32) -> Phase {
        match code {
            1 => Phase::Fresh,
            2 => Phase::Listen,
            3 => Phase::Offered,
            4 => Phase::Early,
            5 => Phase::Attached,
            6 => Phase::Ring,
            7 => Phase::Plain,
            _ => Phase::Free,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_back_to_their_phases() {
        for phase in ALL {
            assert_eq!(Phase::of(phase as u32), phase);
        }
        for code in [0, 8, u32::MAX] {
            assert_eq!(Phase::of(code), Phase::Free);
        }
    }

    #[test]
    fn every_phase_is_reached_and_left_by_events_of_the_table() {
        for phase in ALL {
            let leads_there =
                |(event, from): &&(Event, &[Phase])| event.leads_to() == phase && **from != [phase];
            assert!(LEGAL.iter().any(|row| leads_there(&row)), "{phase:?} is never reached");
            assert!(Event::GivesUp.may_follow(phase) && Event::Frees.may_follow(phase));
        }
        assert!(!Event::Confirms.may_follow(Phase::Early), "nobody confirms without a slot");
        assert!(!Event::Offers.may_follow(Phase::Plain));
        assert!(!Event::Made.may_follow(Phase::Ring));
    }
}
