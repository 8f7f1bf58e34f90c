//! Connections that stay TCP: the application's ring is left, and its process asks for the TCP connection. Where nobody asks, as the
//! application is gone, what it has written goes by TCP from here.

use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use usmc_rdma::Came;
use usmc_shm::agent::Place;
use usmc_shm::state::EndState;

use super::{Case, Service, Stage, Ticket};
use crate::deputy::Flushed;
use crate::sys::{self, Owner};

/// A peer may take none of an application's last bytes for so long.
const STALL: Duration = Duration::from_secs(60);

/// A connection that stays TCP.
pub(super) struct Left {
    /// Its TCP.
    tcp: TcpStream,
    code: u32,
    /// A process has it.
    pub(super) is_fetched: bool,
    /// The application is gone, and not all that it has written had room at once.
    is_sending: bool,
}

impl Service {
    /// A process asks for the TCP connection of a deputy whose ring was left. With the reason.
    pub fn fetch(&self, owner: Owner, place: Place) -> Option<(Ticket, BorrowedFd<'_>, u32)> {
        let ticket = *self.places.get(&place)?;
        let case = self.cases.get(&ticket).filter(|case| case.owner.uid == owner.uid)?;
        match &case.stage {
            Stage::Leaves(left) if !left.is_sending => Some((ticket, left.tcp.as_fd(), left.code)),
            Stage::Leaves(_) | Stage::Waits(_) | Stage::Shakes | Stage::Serves => None,
        }
    }

    /// It was given to the process.
    pub fn is_fetched(&mut self, ticket: Ticket) {
        if let Some(Case { stage: Stage::Leaves(left), .. }) = self.cases.get_mut(&ticket) {
            left.is_fetched = true;
        }
    }

    /// Whether a process may have to ask for a TCP connection still.
    pub fn has_to_give_back(&self) -> bool {
        self.cases.values().any(|case| match &case.stage {
            Stage::Waits(_) | Stage::Shakes => true,
            Stage::Leaves(left) => !left.is_sending,
            Stage::Serves => false,
        })
    }

    /// It does not become SMC.
    pub(super) fn stays(&mut self, ticket: Ticket, tcp: TcpStream, code: u32) {
        self.next_in_line(ticket);
        self.is_left(ticket, tcp, code);
    }

    /// The application's ring is left. It has no place in a line.
    pub(super) fn is_left(&mut self, ticket: Ticket, tcp: TcpStream, code: u32) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        case.conn = None;
        // Its handshake may not have begun.
        sys::close_at_once(&tcp);
        // It may have left its ring since the last look, without a doorbell.
        let _ = case.deputy.relay(Came::default());
        if case.deputy.is_relayed() {
            // No process comes back for it.
            reset(&tcp);
            case.deputy.say(EndState::Aborted);
            return self.forget(ticket);
        }
        case.deputy.leave();
        // What it has written so far goes now, as over TCP: the application may make no call before the peer has answered that.
        let _ = case.deputy.flush(&tcp);
        case.stage = Stage::Leaves(Left { tcp, code, is_fetched: false, is_sending: false });
        self.end_if_left(ticket);
    }

    /// Nobody asks for the TCP connection of an application that has closed or died: what it has written goes by that.
    pub(super) fn end_if_left(&mut self, ticket: Ticket) {
        let Some(case) = self.cases.get_mut(&ticket) else { return };
        let Stage::Leaves(left) = &mut case.stage else { return };
        let is_aborted = case.deputy.told == EndState::Aborted;
        if !is_aborted && case.deputy.told != EndState::Closed && !case.has_died {
            return;
        }
        let flushed = match left.is_fetched {
            true => Flushed::All,
            false if is_aborted => Flushed::Never,
            false => case.deputy.flush(&left.tcp),
        };
        match flushed {
            Flushed::All => {}
            Flushed::Never => reset(&left.tcp),
            Flushed::NotAll if left.is_sending => return,
            Flushed::NotAll => {
                left.is_sending = true;
                let read = case.deputy.read();
                if self.rest.watch_room(&left.tcp, ticket.0).is_ok() {
                    return self.sending.push_back((Instant::now() + STALL, ticket, read));
                }
                reset(&left.tcp);
            }
        }
        if left.is_sending {
            self.rest.unwatch(&left.tcp);
        }
        self.forget(ticket);
    }

    /// Whether the application's ring was left.
    pub(super) fn has_left(&self, ticket: Ticket) -> bool {
        self.cases.get(&ticket).is_some_and(|case| matches!(case.stage, Stage::Leaves(_)))
    }

    /// Whether it sends what its application has left.
    pub(super) fn is_sending(&self, ticket: Ticket) -> bool {
        let case = self.cases.get(&ticket);
        case.is_some_and(|case| matches!(&case.stage, Stage::Leaves(left) if left.is_sending))
    }

    /// Those whose peers have taken nothing for a while end by a reset.
    pub(super) fn look_at_sending(&mut self, now: Instant) {
        while let Some((due, ticket, before)) = self.sending.front().copied() {
            let is_sending = self.is_sending(ticket);
            if is_sending && due > now {
                return;
            }
            self.sending.pop_front();
            let Some(case) = self.cases.get_mut(&ticket).filter(|_| is_sending) else { continue };
            match case.deputy.read() {
                read if read != before => self.sending.push_back((now + STALL, ticket, read)),
                _ => {
                    case.deputy.told = EndState::Aborted;
                    self.end_if_left(ticket);
                }
            }
        }
    }

    /// Ends connections by a reset, but for those that a process has got back.
    pub(super) fn abort_all_that(&mut self, is_it: impl Fn(&Stage) -> bool) {
        let all = self.cases.iter().filter(|(_, case)| is_it(&case.stage));
        let all: Vec<Ticket> = all.map(|(ticket, _)| *ticket).collect();
        for ticket in all {
            let Some(case) = self.cases.get_mut(&ticket) else { continue };
            match &case.stage {
                Stage::Leaves(left) if left.is_fetched => {}
                Stage::Leaves(Left { tcp, .. }) => {
                    reset(tcp);
                    case.deputy.say(EndState::Aborted);
                }
                Stage::Waits(wished) => {
                    reset(&wished.tcp);
                    case.deputy.say(EndState::Aborted);
                }
                Stage::Shakes | Stage::Serves => case.deputy.say(EndState::Aborted),
            }
            self.forget(ticket);
        }
    }
}

/// Its end is a RST.
fn reset(tcp: &TcpStream) {
    // A failure: it is reset already.
    let _ = sockopt::set_socket_linger(tcp, Some(Duration::ZERO));
}
