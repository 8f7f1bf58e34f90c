//! An application that has left the ring: its descriptor was passed on to a program without the library, or used in a way that only the
//! kernel can serve. From then on its bytes go by the connection inside the host, and the agent moves them from there to the slot's rings
//! and back, of which both ends are its own then.
//!
//! ```text
//!   Ring ──the application has left (usmc_shm::back)──▶ Tcp
//!     └──────────the peer has sent an urgent byte──────▶ Behind
//! ```
//!
//! No ring can say that a byte is urgent (MSG_OOB): what follows from there on goes by the kernel, which says it.
//!
//! Each direction goes that way by itself. Its end is said by the kernel alone, behind its last byte.

use std::os::fd::OwnedFd;

use rustix::io::{Errno, ioctl_fionread};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use usmc_rdma::Came;
use usmc_shm::back::{Back, Resume};
use usmc_shm::layout::{ACCEPTOR, CLIENT};
use usmc_shm::span::{RxSpan, TxSpan};
use usmc_shm::state::EndState;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use super::{Deputy, RING};
use crate::sys;

/// Bytes that are moved at once.
const CHUNK: usize = 16 << 10;
/// Doorbells that are on their way, at most: one follows another once that has been heard. An application that says more has spoilt its
/// slot.
const BELLS: u64 = 1 << 16;

/// How the bytes of a direction go.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Way {
    #[default]
    Ring,
    /// By the kernel. Towards the application: the cursor of the first byte of the ring that was not sent. From it: how many bytes are
    /// doorbells still.
    Tcp(u64),
    /// Towards the application, which reads the ring to its end first: by the kernel from this position on. The ring's words stay as they are.
    Behind(u64),
}

/// Both directions.
#[derive(Clone, Default, Debug)]
pub(super) struct Relay {
    out: Way,
    into: Way,
    /// Bytes that have come over the socket.
    pub(super) came: u64,
    /// The application's, read together with doorbells.
    stash: Vec<u8>,
    /// Behind the application's last urgent byte, as a position.
    urgent: Option<u64>,
    /// No more comes from the application.
    is_over: bool,
    /// The kernel was told that no more comes to it.
    is_shut: bool,
}

/// What a move has found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Moved {
    /// Bytes have moved, or the application's last one has come.
    pub(crate) any: bool,
    /// No more comes from the application.
    pub(crate) is_over: bool,
    /// Nobody has the socket any more.
    pub(crate) is_dead: bool,
    /// Up to where the kernel has what is behind the ring, which it brings.
    pub(crate) taken: Option<u64>,
    /// Behind the application's last urgent byte.
    pub(crate) urgent: Option<u64>,
}

impl Deputy {
    /// Whether a direction is out of the ring.
    pub(crate) fn is_relayed(&self) -> bool {
        self.relay.out != Way::Ring || self.relay.into != Way::Ring
    }

    /// Whether the application reads the ring, or has still to read it to its end.
    pub(crate) fn reads_ring(&self) -> bool {
        match self.relay.out {
            Way::Ring => true,
            Way::Behind(_) => self.is_unread(),
            Way::Tcp(_) => false,
        }
    }

    /// Whether what the application sends comes by the kernel.
    pub(crate) fn sends_by_kernel(&self) -> bool {
        self.relay.into != Way::Ring
    }

    /// Whether all is said and done in both directions.
    pub(crate) fn is_relayed_to_its_end(&self) -> bool {
        self.relay.is_over && self.relay.is_shut
    }

    /// Whether nothing has left the ring, and nothing is about to.
    pub(crate) fn stays_in_ring(&self) -> bool {
        let slot = self.slot();
        let own = slot.dir[CLIENT].producer.flags(Acquire);
        let applications = slot.dir[ACCEPTOR].producer.flags(Acquire);
        !self.is_relayed() && !own.goes_back() && !own.is_left() && !applications.goes_back()
    }

    /// Whether the application is on its way out of the ring, or was when somebody last looked.
    pub(super) fn returns(&self) -> bool {
        let slot = self.slot();
        slot.dir[ACCEPTOR].producer.flags(Relaxed).goes_back()
            || slot.dir[CLIENT].producer.flags(Relaxed).is_left()
    }

    /// Bytes that were read beyond the doorbells are the application's, if it is out of the ring. Whether they are.
    pub(super) fn stash(&mut self, bytes: &[u8]) -> bool {
        let is_back = self.slot().dir[ACCEPTOR].producer.flags(Acquire).goes_back();
        if is_back {
            self.relay.stash.extend_from_slice(bytes);
        }
        is_back
    }

    /// Follows the application out of the ring, where it has left.
    fn follow(&mut self) {
        let (slot, out) = (self.slot(), self.pair.ring(CLIENT));
        let own = &slot.dir[CLIENT].producer;
        let mut ways = (self.relay.out, self.relay.into);
        if ways.0 == Way::Ring && own.flags(Acquire).goes_back() {
            // The engine has gone back, behind the bytes that are in the ring now.
            ways.0 = Way::Behind(own.prod.load(Relaxed));
        }
        if ways.0 == Way::Ring && own.flags(Acquire).is_left() {
            // Nothing but doorbells was ever sent there.
            let sent = || Some(u64::from(own.bells_sent.load(Relaxed)));
            let span = TxSpan::new(slot, CLIENT);
            match span.try_back(&out, sent) {
                Ok(Back::Resend(from)) => {
                    span.is_resent(own.prod.load(Relaxed));
                    ways.0 = Way::Tcp(from);
                }
                Ok(Back::Done) => ways.0 = Way::Tcp(out.read()),
                // This thread alone rings, and the count is its own.
                Ok(Back::Busy) | Err(_) => {}
            }
        }
        if ways.1 == Way::Ring && slot.dir[ACCEPTOR].producer.flags(Acquire).goes_back() {
            let came = self.relay.came - self.relay.stash.len() as u64;
            ways.1 = match RxSpan::new(slot, CLIENT).resume() {
                Resume::At(upto) => Way::Tcp(upto.saturating_sub(came)),
                Resume::AtOnce => Way::Tcp(0),
                Resume::Not => Way::Ring,
            };
        }
        (self.relay.out, self.relay.into) = ways;
    }

    /// Moves what there is, and as much as there is room for. `came`: the peer's bytes, as the engine has them.
    pub(crate) fn relay(&mut self, came: Came) -> Moved {
        self.follow();
        let mut moved = Moved::default();
        match self.relay.out {
            Way::Ring => {}
            Way::Tcp(at) => self.relay.out = Way::Tcp(self.send_out(at, None, came, &mut moved)),
            Way::Behind(at) => {
                let at = self.send_out(at, Some(came.upto), came, &mut moved);
                (self.relay.out, moved.taken) = (Way::Behind(at), Some(at));
            }
        }
        if let Way::Tcp(bells) = self.relay.into {
            self.take_in(bells, &mut moved);
        }
        (moved.is_over, moved.urgent) = (self.relay.is_over, self.relay.urgent);
        moved
    }

    /// From the RMB to the application: what it holds from `at` on, up to the ring's end or to `behind`. Up to where the kernel has it now.
    fn send_out(&mut self, mut at: u64, behind: Option<u64>, came: Came, moved: &mut Moved) -> u64 {
        let Some(socket) = &self.socket else { return at };
        let out = self.pair.ring(CLIENT);
        let found = match behind {
            None => out
                .data()
                .map(|data| (data.place, data.cons.wrapping_add(data.len as u64), data.len)),
            Some(end) => out.place(at).map(|place| (place, end, place.window)),
        };
        let Ok((place, end, most)) = found else {
            moved.is_dead = true;
            return at;
        };
        let mut bytes = [0; CHUNK];
        while at != end && end.wrapping_sub(at) <= most as u64 {
            let mut flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            // An urgent byte goes by itself: the kernel marks the last one that it takes.
            let upto = match came.urgent.map(|urgent| urgent.wrapping_sub(at)) {
                Some(1) => {
                    flags |= SendFlags::OOB;
                    at.wrapping_add(1)
                }
                Some(n) if n > 1 && n <= end.wrapping_sub(at) => at.wrapping_add(n - 1),
                _ => end,
            };
            let len = (upto.wrapping_sub(at) as usize).min(CHUNK);
            // SAFETY: so many bytes of what the peer has written and nobody has consumed, at most a window's; `bytes` has room for them.
            unsafe { out.copy_out(at, place, bytes.as_mut_ptr(), len) };
            match send(socket, bytes.get(..len).unwrap_or_default(), flags) {
                Ok(n) => {
                    at = at.wrapping_add(n as u64);
                    if behind.is_none() {
                        out.consume(at);
                    }
                    moved.any = true;
                }
                Err(Errno::WOULDBLOCK | Errno::INTR) => break,
                Err(_) => {
                    moved.is_dead = true;
                    break;
                }
            }
        }
        let is_done = at == end && matches!(self.said, EndState::Shut | EndState::Closed);
        if is_done && !self.relay.is_shut {
            let _ = shutdown(socket, Shutdown::Write);
            self.relay.is_shut = true;
        }
        at
    }

    /// From the application to the send buffer.
    fn take_in(&mut self, mut bells: u64, moved: &mut Moved) {
        if bells > BELLS {
            return moved.is_dead = true;
        }
        let mut left = RING;
        let mut relay = std::mem::take(&mut self.relay);
        let Some(socket) = &self.socket else { return self.relay = relay };
        let into = self.pair.ring(ACCEPTOR);
        let mut bytes = [0; CHUNK];
        while !relay.is_over {
            let Ok(room) = into.room(1) else {
                moved.is_dead = true;
                break;
            };
            let most = if bells > 0 { bells as usize } else { room.free }.min(CHUNK).min(left);
            if most == 0 {
                break;
            }
            let mut is_urgent = false;
            let len = if relay.stash.is_empty() {
                match take(socket, bytes.get_mut(..most).unwrap_or_default()) {
                    Ok(Taken { len: 0, .. }) => {
                        relay.is_over = true;
                        moved.any = true;
                        break;
                    }
                    Ok(taken) => {
                        relay.came += taken.len as u64;
                        is_urgent = taken.is_urgent && bells == 0;
                        taken.len
                    }
                    Err(Errno::WOULDBLOCK | Errno::INTR) => break,
                    Err(_) => {
                        moved.is_dead = true;
                        break;
                    }
                }
            } else {
                let n = relay.stash.len().min(most);
                for (place, byte) in bytes.iter_mut().zip(relay.stash.drain(..n)) {
                    *place = byte;
                }
                n
            };
            left -= len;
            if bells > 0 {
                bells -= len as u64;
                continue;
            }
            // SAFETY: `len` bytes, and no more than the room that was found.
            unsafe { into.copy_in(room.prod, room.place, bytes.as_ptr(), len) };
            let upto = room.prod.wrapping_add(len as u64);
            into.publish(upto);
            if is_urgent {
                relay.urgent = Some(upto);
            }
            moved.any = true;
        }
        relay.into = Way::Tcp(bells);
        self.relay = relay;
    }
}

/// What was read of a socket.
#[derive(Clone, Copy)]
struct Taken {
    /// Bytes; none at the end.
    len: usize,
    /// It is one byte, and urgent.
    is_urgent: bool,
}

/// Reads up to the next urgent byte, or that.
fn take(socket: &OwnedFd, into: &mut [u8]) -> Result<Taken, Errno> {
    loop {
        // Of what comes behind this look the mark is not known.
        let here = usize::try_from(ioctl_fionread(socket)?).unwrap_or(0).min(into.len());
        let is_urgent = here > 0 && sys::is_at_mark(socket);
        let most = if is_urgent { 1 } else { here };
        if most == 0 {
            match recv(socket, &mut [0], RecvFlags::DONTWAIT | RecvFlags::PEEK)? {
                (0, _) => return Ok(Taken { len: 0, is_urgent }),
                _ => continue,
            }
        }
        let (len, _) = recv(socket, into.get_mut(..most).unwrap_or_default(), RecvFlags::DONTWAIT)?;
        return Ok(Taken { len, is_urgent });
    }
}
