//! How an SMC connection ends: the states of RFC 7609 section 4 as the kernel walks them
//! (`smc_close.c`), on the flags that CDC messages carry.
//!
//! ```text
//!                                   ┌───────────┐
//!                                   │   Init    │
//!                                   └─────┬─────┘
//!                                 established
//!                                   ┌─────▼─────┐
//!          shutdown(WR) or close    │  Active   │    peer is done, or closed
//!            ┌──────────────────────┤           ├──────────────────────┐
//!            │                      └─────┬─────┘                      │
//!   ┌────────▼─────────┐                  │ peer aborted     ┌─────────▼────────┐
//!   │  PeerCloseWait1  │                  ▼                  │   AppCloseWait1  │
//!   └────────┬─────────┘         (see the table)             └──┬────────────┬──┘
//!      peer is done                                             │      shutdown(WR)
//!   ┌────────▼─────────┐                                        │  ┌─────────▼────────┐
//!   │  PeerCloseWait2  │                                        │  │   AppCloseWait2  │
//!   └───┬───────────┬──┘                                        │  └─────────┬────────┘
//!       │      peer closed,                                     │          close
//!       │      not closed here                                  └──────┬─────┘
//!       │  ┌────────▼─────────┐                         peer closed?   │ no
//!       │  │ AppFinCloseWait  │                          yes │  ┌──────▼──────────┐
//!       │  └────────┬─────────┘                              │  │ PeerFinCloseWait│
//!   peer closed,  close                                      │  └──────┬──────────┘
//!   closed here     │               ┌───────────┐            │    peer closed
//!       └───────────┴──────────────▶│  Closed   │◀───────────┴─────────┘
//!                                   └───────────┘
//! ```
//!
//! An abort by the peer leads to ProcessAbort, where the application still has to close, or
//! straight to Closed where it has done so. Loss of the link group ends everything.

use crate::wire::cdc::StateFlags;

/// Where a connection stands. The numbers are those of the kernel's diagnosis (`smc_diag.h`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    /// The handshake is not finished.
    Init = 2,
    /// Both directions are open.
    Active = 1,
    /// Closed, or done writing, on this side first.
    PeerCloseWait1 = 20,
    /// As before, and the peer is done writing too.
    PeerCloseWait2 = 21,
    /// The peer is done writing, or has closed, first.
    AppCloseWait1 = 22,
    /// As before, and this side is done writing too.
    AppCloseWait2 = 23,
    /// Done writing here, the peer has closed: only the local close is missing.
    AppFinCloseWait = 24,
    /// Closed here after the peer was done writing: only the peer's close is missing.
    PeerFinCloseWait = 25,
    /// The link group was lost; the peer cannot be asked any more.
    PeerAbortWait = 26,
    /// The peer aborted; the application has to close.
    ProcessAbort = 27,
    /// Over.
    Closed = 7,
}

/// What moves a connection from state to state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// The handshake is finished.
    Established,
    /// The application called shutdown for writing, and all it wrote is sent.
    ShutdownWrite,
    /// The application closed, and all it wrote is sent.
    Close,
    /// The peer is done writing.
    PeerDone,
    /// The peer has closed.
    PeerClosed,
    /// The peer has aborted.
    PeerAborted,
    /// No link of the link group is left.
    LinksLost,
}

/// What has to be told to the peer, with the next CDC message, at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tell {
    Nothing,
    /// Done writing.
    Done,
    /// Closed; or aborted, if data was left unread.
    Final,
    /// Aborted.
    Abort,
}

/// On what else a row of the table depends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum When {
    Always,
    /// A close or an abort was sent to the peer.
    ClosedHere,
    OpenHere,
    /// A close or an abort came from the peer.
    PeerClosed,
    PeerOpen,
}

use Event::*;
use State::*;
use Tell::{Abort, Done, Final, Nothing};
use When::{Always, ClosedHere, OpenHere, PeerOpen};

/// From any of these states, on the event, under the condition: to this state, telling the peer.
/// The first row that fits counts. Where none does, nothing happens.
#[rustfmt::skip]
const TABLE: &[(&[State], Event, When, State, Tell)] = &[
    (&[Init],                                            Established,   Always,           Active,           Nothing),

    (&[Active],                                          ShutdownWrite, Always,           PeerCloseWait1,   Done),
    (&[AppCloseWait1],                                   ShutdownWrite, Always,           AppCloseWait2,    Done),

    (&[Init, PeerAbortWait],                             Close,         Always,           Closed,           Nothing),
    (&[Active],                                          Close,         Always,           PeerCloseWait1,   Final),
    (&[PeerCloseWait1],                                  Close,         OpenHere,         PeerCloseWait1,   Final),
    (&[PeerCloseWait2],                                  Close,         OpenHere,         PeerCloseWait2,   Final),
    (&[AppFinCloseWait],                                 Close,         OpenHere,         Closed,           Final),
    (&[AppFinCloseWait],                                 Close,         ClosedHere,       Closed,           Nothing),
    (&[AppCloseWait1, AppCloseWait2],                    Close,         When::PeerClosed, Closed,           Final),
    (&[AppCloseWait1, AppCloseWait2],                    Close,         PeerOpen,         PeerFinCloseWait, Final),
    (&[ProcessAbort],                                    Close,         Always,           Closed,           Abort),

    (&[Init, Active],                                    PeerDone,      Always,           AppCloseWait1,    Nothing),
    (&[PeerCloseWait1],                                  PeerDone,      Always,           PeerCloseWait2,   Nothing),

    (&[Init, Active],                                    PeerClosed,    Always,           AppCloseWait1,    Nothing),
    (&[PeerCloseWait1, PeerCloseWait2],                  PeerClosed,    ClosedHere,       Closed,           Nothing),
    (&[PeerCloseWait1, PeerCloseWait2],                  PeerClosed,    OpenHere,         AppFinCloseWait,  Nothing),
    (&[PeerFinCloseWait],                                PeerClosed,    Always,           Closed,           Nothing),

    (&[Init, Active, AppCloseWait1, AppFinCloseWait],    PeerAborted,   Always,           ProcessAbort,     Nothing),
    (&[PeerCloseWait1, PeerCloseWait2],                  PeerAborted,   OpenHere,         ProcessAbort,     Nothing),
    (&[PeerCloseWait1, PeerCloseWait2],                  PeerAborted,   ClosedHere,       Closed,           Nothing),
    (&[AppCloseWait2, PeerFinCloseWait, PeerAbortWait],  PeerAborted,   Always,           Closed,           Nothing),

    // The kernel passes through PeerAbortWait here and is Closed before anybody can look.
    (&[Active, AppCloseWait1, AppCloseWait2, PeerCloseWait1, PeerCloseWait2,
       PeerFinCloseWait, ProcessAbort, AppFinCloseWait], LinksLost,     Always,           Closed,           Nothing),
];

/// The end of a connection as one side sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closing {
    state: State,
    sent: StateFlags,
    received: StateFlags,
    links_lost: bool,
}

/// What is left of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// It is open.
    Open,
    /// It was ended in order: reading gives what is there and then 0, writing EPIPE.
    Ended,
    /// The peer aborted: ECONNRESET.
    Reset,
    /// The link group was lost: ECONNABORTED.
    Aborted,
}

impl Closing {
    /// A connection whose handshake has begun.
    pub const fn new() -> Closing {
        let none = StateFlags { done_writing: false, closed: false, aborted: false };
        Closing { state: Init, sent: none, received: none, links_lost: false }
    }

    /// Where the connection stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// The flags for every CDC message from now on.
    pub fn flags(&self) -> StateFlags {
        self.sent
    }

    /// Whether the peer has said that it writes no more.
    pub fn peer_has_written_all(&self) -> bool {
        self.received.done_writing || self.received.closed
    }

    /// Whether the peer knows that this side is over.
    pub fn has_told_end(&self) -> bool {
        self.sent.closed || self.sent.aborted
    }

    /// Whether it ended with the link group: nobody can be told.
    pub fn links_are_lost(&self) -> bool {
        self.links_lost
    }

    /// Whether the application may still read.
    pub fn reading(&self) -> Direction {
        match (self.links_lost, self.received) {
            (_, StateFlags { aborted: true, .. }) => Direction::Reset,
            (true, _) => Direction::Aborted,
            (_, StateFlags { done_writing: false, closed: false, .. }) => Direction::Open,
            _ => Direction::Ended,
        }
    }

    /// Whether the application may still write. After a close by the peer it may, as with TCP, but
    /// nobody will read it.
    pub fn writing(&self) -> Direction {
        match (self.links_lost, self.received, self.sent) {
            (_, StateFlags { aborted: true, .. }, _) => Direction::Reset,
            (true, ..) => Direction::Aborted,
            (_, _, StateFlags { done_writing: false, closed: false, aborted: false }) => {
                Direction::Open
            }
            _ => Direction::Ended,
        }
    }

    /// The handshake is finished.
    pub fn on_established(&mut self) {
        self.step(Established, false);
    }

    /// The application ends its writing direction; all it wrote is sent. True: send CDC now.
    #[must_use]
    pub fn on_shutdown_write(&mut self) -> bool {
        self.step(ShutdownWrite, false)
    }

    /// The application closes; all it wrote is sent. `unread`: it leaves data unread, so the peer
    /// sees an abort, as it would see TCP's reset. True: send CDC now.
    #[must_use]
    pub fn on_close(&mut self, unread: bool) -> bool {
        self.step(Close, unread)
    }

    /// The flags of a CDC message. Flags stay: only those that are new are news.
    pub fn on_received(&mut self, flags: StateFlags) {
        let before = self.received;
        self.received = StateFlags {
            done_writing: before.done_writing || flags.done_writing,
            closed: before.closed || flags.closed,
            aborted: before.aborted || flags.aborted,
        };
        if flags.aborted {
            if !before.aborted {
                self.step(PeerAborted, false);
            }
            return;
        }
        if flags.done_writing && !before.done_writing {
            self.step(PeerDone, false);
        }
        if flags.closed && !before.closed {
            self.step(PeerClosed, false);
        }
    }

    /// Every link of the link group is gone.
    pub fn on_links_lost(&mut self) {
        if !matches!(self.state, Init | Closed) {
            self.links_lost = true;
        }
        self.step(LinksLost, false);
    }

    /// Gives up on the connection: the next CDC message says that it is aborted, as after a failed
    /// validation (`smc_cdc_msg_validate`) or when the peer breaks the protocol.
    pub fn abort(&mut self) {
        self.sent.aborted = true;
        self.received.aborted = true;
        self.step(PeerAborted, false);
    }

    fn step(&mut self, event: Event, unread: bool) -> bool {
        let closed_here = self.sent.closed || self.sent.aborted;
        let peer_closed = self.received.closed || self.received.aborted;
        let row = TABLE.iter().find(|(from, on, when, ..)| {
            *on == event
                && from.contains(&self.state)
                && match when {
                    Always => true,
                    ClosedHere => closed_here,
                    OpenHere => !closed_here,
                    When::PeerClosed => peer_closed,
                    PeerOpen => !peer_closed,
                }
        });
        let Some(&(_, _, _, to, tell)) = row else { return false };
        self.state = to;
        match tell {
            Nothing => return false,
            Done => self.sent.done_writing = true,
            Final if unread => self.sent.aborted = true,
            Final => self.sent.closed = true,
            Abort => self.sent.aborted = true,
        }
        true
    }
}

impl Default for Closing {
    fn default() -> Self {
        Closing::new()
    }
}

#[cfg(test)]
mod tests {
    use std::format;
    use std::string::String;

    use super::*;

    const STATES: [State; 11] = [
        Init,
        Active,
        PeerCloseWait1,
        PeerCloseWait2,
        AppCloseWait1,
        AppCloseWait2,
        AppFinCloseWait,
        PeerFinCloseWait,
        PeerAbortWait,
        ProcessAbort,
        Closed,
    ];
    const EVENTS: [Event; 7] =
        [Established, ShutdownWrite, Close, PeerDone, PeerClosed, PeerAborted, LinksLost];

    fn flags(bits: u8) -> StateFlags {
        StateFlags::from_bits(bits)
    }

    fn active() -> Closing {
        let mut closing = Closing::new();
        closing.on_established();
        closing
    }

    #[test]
    fn every_state_and_event_is_as_reviewed() {
        let mut table = String::new();
        for state in STATES {
            for event in EVENTS {
                let outcomes = [(0, 0), (0x40, 0), (0, 0x40), (0x40, 0x40)].map(|(s, r)| {
                    let mut closing =
                        Closing { state, sent: flags(s), received: flags(r), links_lost: false };
                    let tell = closing.step(event, false);
                    format!("{:?}{}", closing.state, if tell { "!" } else { "" })
                });
                if outcomes.iter().all(|outcome| *outcome == format!("{state:?}")) {
                    continue;
                }
                table += &format!("{state:?} {event:?}: ");
                if outcomes.iter().all(|outcome| *outcome == outcomes[0]) {
                    table += &outcomes[0];
                } else {
                    table += &outcomes.join(" | ");
                }
                table += "\n";
            }
        }
        // Four outcomes: nobody closed | closed here | peer closed | both. "!": CDC is sent.
        let expected = "\
Init Established: Active
Init Close: Closed
Init PeerDone: AppCloseWait1
Init PeerClosed: AppCloseWait1
Init PeerAborted: ProcessAbort
Active ShutdownWrite: PeerCloseWait1!
Active Close: PeerCloseWait1!
Active PeerDone: AppCloseWait1
Active PeerClosed: AppCloseWait1
Active PeerAborted: ProcessAbort
Active LinksLost: Closed
PeerCloseWait1 Close: PeerCloseWait1! | PeerCloseWait1 | PeerCloseWait1! | PeerCloseWait1
PeerCloseWait1 PeerDone: PeerCloseWait2
PeerCloseWait1 PeerClosed: AppFinCloseWait | Closed | AppFinCloseWait | Closed
PeerCloseWait1 PeerAborted: ProcessAbort | Closed | ProcessAbort | Closed
PeerCloseWait1 LinksLost: Closed
PeerCloseWait2 Close: PeerCloseWait2! | PeerCloseWait2 | PeerCloseWait2! | PeerCloseWait2
PeerCloseWait2 PeerClosed: AppFinCloseWait | Closed | AppFinCloseWait | Closed
PeerCloseWait2 PeerAborted: ProcessAbort | Closed | ProcessAbort | Closed
PeerCloseWait2 LinksLost: Closed
AppCloseWait1 ShutdownWrite: AppCloseWait2!
AppCloseWait1 Close: PeerFinCloseWait! | PeerFinCloseWait! | Closed! | Closed!
AppCloseWait1 PeerAborted: ProcessAbort
AppCloseWait1 LinksLost: Closed
AppCloseWait2 Close: PeerFinCloseWait! | PeerFinCloseWait! | Closed! | Closed!
AppCloseWait2 PeerAborted: Closed
AppCloseWait2 LinksLost: Closed
AppFinCloseWait Close: Closed! | Closed | Closed! | Closed
AppFinCloseWait PeerAborted: ProcessAbort
AppFinCloseWait LinksLost: Closed
PeerFinCloseWait PeerClosed: Closed
PeerFinCloseWait PeerAborted: Closed
PeerFinCloseWait LinksLost: Closed
PeerAbortWait Close: Closed
PeerAbortWait PeerAborted: Closed
ProcessAbort Close: Closed!
ProcessAbort LinksLost: Closed
";
        assert_eq!(table, expected);
    }

    /// The flags that two kernels sent in `smcr-v2-first-and-next-contact`.
    #[test]
    fn a_half_close_sends_the_flags_that_the_kernel_sends() {
        let (mut client, mut server) = (active(), active());
        assert!(client.on_shutdown_write());
        assert_eq!(client.flags().bits(), 0x80);
        assert_eq!(client.writing(), Direction::Ended);
        server.on_received(client.flags());
        assert_eq!((server.reading(), server.writing()), (Direction::Ended, Direction::Open));
        assert!(server.on_close(false));
        assert_eq!(server.flags().bits(), 0x40);
        client.on_received(server.flags());
        assert_eq!(client.state(), AppFinCloseWait);
        assert!(client.on_close(false));
        assert_eq!((client.flags().bits(), client.state()), (0xc0, Closed));
        server.on_received(client.flags());
        assert_eq!(server.state(), Closed);
    }

    #[test]
    fn a_close_with_unread_data_is_an_abort_that_is_answered_by_one() {
        let (mut a, mut b) = (active(), active());
        assert!(a.on_close(true));
        assert_eq!(a.flags().bits(), 0x20);
        b.on_received(a.flags());
        assert_eq!((b.state(), b.reading()), (ProcessAbort, Direction::Reset));
        assert!(b.on_close(false));
        assert_eq!((b.flags().bits(), b.state()), (0x20, Closed));
        a.on_received(b.flags());
        assert_eq!(a.state(), Closed);
    }

    #[test]
    fn closing_on_both_sides_at_once_ends_closed_on_both() {
        let (mut a, mut b) = (active(), active());
        assert!(a.on_close(false) && b.on_close(false));
        let (from_a, from_b) = (a.flags(), b.flags());
        a.on_received(from_b);
        b.on_received(from_a);
        assert_eq!((a.state(), b.state()), (Closed, Closed));
    }

    #[test]
    fn losing_the_links_is_seen_by_reader_and_writer() {
        let mut closing = active();
        closing.on_links_lost();
        assert_eq!(
            (closing.reading(), closing.writing()),
            (Direction::Aborted, Direction::Aborted)
        );
        let mut over = active();
        assert!(over.on_close(false));
        over.on_received(flags(0x40));
        over.on_links_lost();
        assert_eq!(over.reading(), Direction::Ended, "what is over stays as it ended");
    }

    #[test]
    fn repeated_flags_are_no_news() {
        let mut closing = active();
        for _ in 0..3 {
            closing.on_received(flags(0x80));
            assert_eq!(closing.state(), AppCloseWait1);
        }
        closing.on_received(flags(0));
        assert_eq!(closing.reading(), Direction::Ended, "flags do not go back");
    }
}
