//! Where processes come in: a UNIX socket, and a connection of it for each request.
//!
//! ```text
//!   Silent ──Hand──▶ Asked ──answer──▶ (closed)
//!     │ Fetch: TCP, if it is there
//!     │ Show: what there is
//!     │ Propose: a Proposal, and it may say more
//!     │ rubbish, or late
//!     ▼
//!  (closed)
//! ```
//!
//! An answer waits for nobody. A process that gives up before has abandoned its connection.
//!
//! What a process says is checked here, and nothing of it is trusted: its user and its id are the kernel's word.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, ipproto, listen, recvmsg, sendmsg, socket_with, sockopt,
};
use smc_proto::wire::clc::MAX_LEN;
use usmc_shm::agent::{Answer, LEN, PROPOSAL_MAX, Place, Request, Role};

use crate::report;
use crate::service::{Handed, OTHERS, Service, Ticket};
use crate::sys::{self, Owner};

/// Processes that wait to be let in.
const BACKLOG: i32 = 1024;
/// Connections of the socket that have not said anything, at most: for a new one the oldest goes of the user who has the most.
const SILENT: usize = 256;
/// How long a process may take for its request.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long nobody is let in after the kernel had no descriptor for it.
const PAUSE: Duration = Duration::from_millis(100);
/// The listener's number in the set of what wakes.
const LISTENER: u64 = OTHERS;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Silent,
    Asked(Ticket),
}

struct Visitor {
    socket: OwnedFd,
    owner: Owner,
    stage: Stage,
}

/// How the socket is.
enum Door {
    Open(OwnedFd),
    /// The kernel has no descriptors.
    Paused(OwnedFd, Instant),
    Closed,
}

/// The socket, and the processes that are there.
pub struct Control {
    /// The socket's file, if it is ours to remove, with its device and number: another agent's file is left alone.
    file: Option<(PathBuf, (u64, u64))>,
    door: Door,
    visitors: HashMap<u64, Visitor>,
    asked: HashMap<Ticket, u64>,
    /// Those that had said nothing, in the order in which they came.
    silent: VecDeque<(Instant, u64)>,
    next: u64,
    is_draining: bool,
}

impl Control {
    /// Listens at that path, for processes of this user only. The socket of an agent that is gone is replaced.
    ///
    /// # Errors
    /// `EADDRINUSE` where another agent listens there, or there is a file that is no socket; socket(2), bind(2), chmod(2).
    pub fn listen(path: &Path, service: &Service) -> io::Result<Control> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = || socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let listener = socket()?;
        match bind(&listener, &address) {
            Err(Errno::ADDRINUSE) => {
                let is_socket = fs::symlink_metadata(path)?.file_type().is_socket();
                let text = match connect(socket()?, &address) {
                    _ if !is_socket => "there is a file that is no socket: name another path",
                    Err(Errno::CONNREFUSED) => "",
                    _ => "another agent listens there: stop it, or name another path",
                };
                if !text.is_empty() {
                    return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
                }
                fs::remove_file(path)?;
                bind(&listener, &address)?;
            }
            bound => bound?,
        }
        // Before anybody can connect.
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listen(&listener, BACKLOG)?;
        service.rest().watch(&listener, LISTENER)?;
        let file = fs::symlink_metadata(path)?;
        Ok(Control::open(listener, Some((path.into(), (file.dev(), file.ino())))))
    }

    /// Lets processes in by a socket that a service manager has made and listens on; the file's permissions say which. The file stays when
    /// the agent ends.
    ///
    /// # Errors
    /// `ENOTSOCK`; `EPROTOTYPE` where it is no listening UNIX socket of sequenced packets.
    pub fn given(listener: OwnedFd, service: &Service) -> io::Result<Control> {
        let is_fit = sockopt::socket_type(&listener)? == SocketType::SEQPACKET
            && sockopt::socket_domain(&listener)? == AddressFamily::UNIX
            && sockopt::socket_acceptconn(&listener)?;
        if !is_fit {
            return Err(Errno::PROTOTYPE.into());
        }
        let flags = rustix::fs::fcntl_getfl(&listener)?;
        rustix::fs::fcntl_setfl(&listener, flags | OFlags::NONBLOCK)?;
        service.rest().watch(&listener, LISTENER)?;
        Ok(Control::open(listener, None))
    }

    fn open(listener: OwnedFd, file: Option<(PathBuf, (u64, u64))>) -> Control {
        Control {
            file,
            door: Door::Open(listener),
            visitors: HashMap::new(),
            asked: HashMap::new(),
            silent: VecDeque::new(),
            next: 1,
            is_draining: false,
        }
    }

    /// Nobody hands over any more: connections stay TCP. They can be fetched still.
    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    /// Whether nobody is let in any more.
    pub fn is_closed(&self) -> bool {
        matches!(self.door, Door::Closed)
    }

    /// Nobody is let in any more, and the file goes, if it is the agent's. Requests that are there are answered still.
    pub fn close(&mut self) {
        self.door = Door::Closed;
        if let Some((path, known)) = &self.file
            && let Ok(file) = fs::symlink_metadata(path)
            && (file.dev(), file.ino()) == *known
        {
            let _ = fs::remove_file(path);
        }
        let is_silent = |visitor: &Visitor| visitor.stage == Stage::Silent;
        self.visitors.retain(|_, visitor| !is_silent(visitor));
    }

    /// Processes that are there, and have no answer.
    pub fn visitors(&self) -> usize {
        self.visitors.len()
    }

    /// Looks at what the service has found ready ([`Service::take_ready`]), and sends its answers. Whether there was anything.
    pub fn turn(&mut self, ready: &[u64], service: &mut Service) -> bool {
        let (mut any, now) = (false, service.turned());
        for number in ready {
            match *number {
                LISTENER => any |= self.let_in(service),
                number => any |= self.look_at(number & !OTHERS, service),
            }
        }
        while let Some((since, number)) = self.silent.front().copied()
            && now.duration_since(since) >= PATIENCE
        {
            self.silent.pop_front();
            self.forget_silent(number);
        }
        if let Door::Paused(_, until) = &self.door
            && *until <= now
            && let Door::Paused(listener, _) = std::mem::replace(&mut self.door, Door::Closed)
        {
            self.door = match service.rest().watch(&listener, LISTENER) {
                Ok(()) => Door::Open(listener),
                Err(_) => Door::Paused(listener, now + PAUSE),
            };
        }
        while let Some((ticket, answer)) = service.poll_answer() {
            any = true;
            self.answer(ticket, answer, service);
        }
        any
    }

    /// How long until the next turn, whatever happens; `None`: nothing is due.
    pub fn next_turn(&self) -> Option<Duration> {
        let silent = self.silent.front().map(|(since, _)| *since + PATIENCE);
        let paused = if let Door::Paused(_, until) = &self.door { Some(*until) } else { None };
        let due = silent.into_iter().chain(paused).min()?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    fn let_in(&mut self, service: &Service) -> bool {
        let Door::Open(listener) = &self.door else { return false };
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                let number = self.next;
                self.next += 1;
                // One whose process is not known is closed.
                if let Ok(owner) = Owner::of(&socket)
                    && service.rest().watch(&socket, OTHERS | number).is_ok()
                {
                    self.visitors.insert(number, Visitor { socket, owner, stage: Stage::Silent });
                    self.silent.push_back((Instant::now(), number));
                }
                if self.silent.len() > SILENT {
                    self.forget_one_silent();
                }
                true
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // It would be ready for ever.
                service.rest().unwatch(listener);
                if let Door::Open(listener) = std::mem::replace(&mut self.door, Door::Closed) {
                    self.door = Door::Paused(listener, Instant::now() + PAUSE);
                }
                false
            }
            // It is gone again.
            Err(_) => false,
        }
    }

    fn forget_one_silent(&mut self) {
        let user = |number| self.visitors.get(&number).map_or(0, |visitor| visitor.owner.uid);
        let all = self.silent.iter().map(|(_, number)| (user(*number), *number));
        if let Some(number) = oldest_of_most(all) {
            self.silent.retain(|(_, other)| *other != number);
            self.forget_silent(number);
        }
    }

    fn forget_silent(&mut self, number: u64) {
        if self.visitors.get(&number).is_some_and(|visitor| visitor.stage == Stage::Silent) {
            self.visitors.remove(&number);
        }
    }

    /// A process has what it asked for, or is refused.
    fn dismiss(&mut self, number: u64) {
        self.visitors.remove(&number);
        self.silent.retain(|(_, other)| *other != number);
    }

    /// A process has said something, or is gone.
    fn look_at(&mut self, number: u64, service: &mut Service) -> bool {
        let Some(visitor) = self.visitors.get_mut(&number) else { return false };
        let received = receive(&visitor.socket);
        let owner = visitor.owner;
        match (visitor.stage, received) {
            (_, Received::Nothing) => return false,
            (Stage::Silent, Received::Fetch(place)) => {
                // A process that is gone does not get it.
                if let Some((ticket, tcp, code)) = service.fetch(owner, place)
                    && send(&visitor.socket, &Answer::Tcp { code }.emit(), Some(tcp)).is_ok()
                {
                    service.is_fetched(ticket);
                }
                self.dismiss(number);
            }
            (Stage::Silent, Received::Show) => {
                if let Ok(file) = report::file(service.driver()) {
                    let _ = send(&visitor.socket, &Answer::Shown.emit(), Some(file.as_fd()));
                }
                self.dismiss(number);
            }
            (Stage::Silent, Received::Propose(server)) => {
                // The process hands the connection over by the same socket, once it is made.
                let is_sent = propose(&visitor.socket, server, self.is_draining, service).is_ok();
                self.silent.retain(|(_, other)| *other != number);
                match is_sent {
                    true => self.silent.push_back((Instant::now(), number)),
                    false => _ = self.visitors.remove(&number),
                }
            }
            (Stage::Silent, Received::Ear(place)) => {
                let _ = match service.ear(owner, place) {
                    Some((number, ear)) => {
                        send(&visitor.socket, &Answer::Ear(number).emit(), Some(ear.as_fd()))
                    }
                    None => send(&visitor.socket, &Answer::Tcp { code: 0 }.emit(), None),
                };
                self.dismiss(number);
            }
            (Stage::Silent, Received::RoomEar(place)) => {
                let _ = match service.own_ear(owner, place) {
                    Some(ear) => send(&visitor.socket, &Answer::RoomEar.emit(), Some(ear)),
                    None => send(&visitor.socket, &Answer::Tcp { code: 0 }.emit(), None),
                };
                self.dismiss(number);
            }
            (Stage::Silent, Received::Hand(..)) if self.is_draining => {
                let _ = send(&visitor.socket, &Answer::Tcp { code: 0 }.emit(), None);
                self.dismiss(number);
            }
            (Stage::Silent, Received::Hand(role, tcp, deputy)) => {
                let handed = Handed { role, tcp, deputy, owner };
                let ticket = service.hand_over(handed);
                visitor.stage = Stage::Asked(ticket);
                self.asked.insert(ticket, number);
                self.silent.retain(|(_, other)| *other != number);
            }
            (Stage::Silent, _) => {
                self.dismiss(number);
            }
            // It has nothing more to say.
            (Stage::Asked(ticket), _) => {
                self.visitors.remove(&number);
                self.asked.remove(&ticket);
                service.abandon(ticket);
            }
        }
        true
    }

    fn answer(&mut self, ticket: Ticket, answer: Answer, service: &mut Service) {
        let number = self.asked.remove(&ticket);
        let Some(visitor) = number.and_then(|number| self.visitors.remove(&number)) else {
            return service.abandon(ticket);
        };
        let memfd = match answer {
            Answer::Ring(_) => service.memfd(ticket),
            Answer::Tcp { .. }
            | Answer::Shown
            | Answer::Proposal(_)
            | Answer::Ear(_)
            | Answer::RoomEar => None,
        };
        match send(&visitor.socket, &answer.emit(), memfd) {
            Ok(()) => service.is_answered(ticket),
            Err(_) => service.abandon(ticket),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.close();
    }
}

/// The oldest one of the user who has the most, so that nobody takes the place of all.
fn oldest_of_most(all: impl Iterator<Item = (u32, u64)> + Clone) -> Option<u64> {
    let mut counts: HashMap<u32, usize> = HashMap::new();
    all.clone().for_each(|(user, _)| *counts.entry(user).or_default() += 1);
    let (most, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    all.filter(|(user, _)| *user == most).map(|(_, number)| number).next()
}

/// Says the Proposal for a server at that address, or that there is none.
fn propose(
    socket: &OwnedFd,
    server: IpAddr,
    is_draining: bool,
    service: &Service,
) -> rustix::io::Result<()> {
    let mut room = [0; MAX_LEN];
    let message = if is_draining { Err(0) } else { service.propose(server) };
    let proposal = match &message {
        Ok(message) => message.emit(&mut room).ok().filter(|bytes| bytes.len() <= PROPOSAL_MAX),
        Err(_) => None,
    };
    match proposal {
        Some(bytes) => {
            let head = Answer::Proposal(bytes.len() as u32).emit();
            send(socket, &[&head[..], bytes].concat(), None)
        }
        None => send(socket, &Answer::Tcp { code: message.err().unwrap_or(0) }.emit(), None),
    }
}

/// One message with a descriptor, or without.
fn send(socket: &OwnedFd, message: &[u8], memfd: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = memfd.into_iter().collect();
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(message)], &mut control, flags).map(drop)
}

enum Received {
    Nothing,
    Hand(Role, TcpStream, OwnedFd),
    Fetch(Place),
    Show,
    Propose(IpAddr),
    Ear(Place),
    RoomEar(Place),
    /// The end, or what is no request. Descriptors that came are closed.
    Other,
}

fn receive(socket: &OwnedFd) -> Received {
    // One byte more than a request has.
    let mut bytes = [0; LEN + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = match recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
        Ok(message) => message,
        Err(Errno::WOULDBLOCK | Errno::INTR) => return Received::Nothing,
        Err(_) => return Received::Other,
    };
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(part) = part {
            descriptors.extend(part);
        }
    }
    if message.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
        return refused(&descriptors);
    }
    let request = bytes.get(..message.bytes).and_then(Request::parse);
    let role = match request {
        Some(Request::Hand(role)) => role,
        Some(Request::Fetch(place)) if descriptors.is_empty() => return Received::Fetch(place),
        Some(Request::Ear(place)) if descriptors.is_empty() => return Received::Ear(place),
        Some(Request::RoomEar(place)) if descriptors.is_empty() => {
            return Received::RoomEar(place);
        }
        Some(Request::Show) if descriptors.is_empty() => return Received::Show,
        Some(Request::Propose(address)) if descriptors.is_empty() => {
            return Received::Propose(Ipv6Addr::from(address).to_canonical());
        }
        Some(_) | None => return refused(&descriptors),
    };
    let [tcp, deputy] = match <[OwnedFd; 2]>::try_from(descriptors) {
        Ok(both) if both.iter().all(is_tcp) => both,
        Ok(both) => return refused(&both),
        Err(all) => return refused(&all),
    };
    let (tcp, deputy) = (TcpStream::from(tcp), TcpStream::from(deputy));
    if !is_connected(&tcp, |_| true) || !is_connected(&deputy, |ip| ip.to_canonical().is_loopback())
    {
        return refused(&[tcp, deputy]);
    }
    Received::Hand(role, tcp, deputy.into())
}

/// It is no request. This may be the last close of what came along.
fn refused(descriptors: &[impl AsFd]) -> Received {
    descriptors.iter().for_each(sys::close_at_once);
    Received::Other
}

/// Whether it is a socket of TCP.
fn is_tcp(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let domain = sockopt::socket_domain(fd);
    matches!(domain, Ok(AddressFamily::INET | AddressFamily::INET6))
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        && sockopt::socket_protocol(fd) == Ok(Some(ipproto::TCP))
}

/// Whether it has two ends, and both addresses are fit.
fn is_connected(tcp: &TcpStream, is_fit: impl Fn(IpAddr) -> bool) -> bool {
    let ends = [tcp.local_addr(), tcp.peer_addr()];
    ends.iter().all(|end| end.as_ref().is_ok_and(|at| is_fit(at.ip())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_makes_room_for_itself() {
        let all = [(1000, 1), (1001, 2), (1002, 3), (1001, 4), (1000, 5), (1001, 6)];
        assert_eq!(oldest_of_most(all.into_iter()), Some(2));
        assert_eq!(oldest_of_most([].into_iter()), None);
    }
}
