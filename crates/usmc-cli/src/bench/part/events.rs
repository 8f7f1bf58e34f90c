//! The server of `connect`, `fanin` and `idle`: one thread, one epoll set, any number of connections.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use nix::poll::PollFlags;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use socket2::Socket;

use super::line;
use super::spec::Spec;

/// A request that begins with this byte is the last one of its connection: the server closes after its answer.
pub const LAST: u8 = b'c';
/// One that begins with this byte is not.
pub const STAYS: u8 = b'k';

/// Events taken by one wait.
pub const EVENTS: usize = 256;
/// The listener's data in the set; connections have their place in the table.
const LISTENER: u64 = u64::MAX;

/// A connection in the middle of a request.
struct Guest {
    socket: Socket,
    got: usize,
    kind: u8,
}

/// Serves until it is killed.
pub fn serve(spec: &Spec) -> Result<()> {
    raise_limit()?;
    let (listener, port) = line::listen(&spec.at)?;
    listener.set_nonblocking(true).context("O_NONBLOCK")?;
    let set = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("epoll_create")?;
    set.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER)).context("epoll_ctl")?;
    super::say("listening", &port)?;
    let mut guests: Vec<Option<Guest>> = Vec::new();
    let mut free: Vec<usize> = Vec::new();
    let (mut request, answer) = (vec![0; spec.request], vec![b'a'; spec.answer]);
    let mut events = [EpollEvent::empty(); EVENTS];
    loop {
        let count = match set.wait(&mut events, EpollTimeout::NONE) {
            Err(nix::errno::Errno::EINTR) => continue,
            other => other.context("epoll_wait")?,
        };
        for event in &events[..count] {
            if event.data() == LISTENER {
                accept_all(&listener, spec, &set, &mut guests, &mut free)?;
                continue;
            }
            let at = event.data() as usize;
            let Some(guest) = guests[at].as_mut() else { continue };
            if !guest.serve(&mut request, &answer)? {
                // With the close it leaves the set.
                guests[at] = None;
                free.push(at);
            }
        }
    }
}

fn accept_all(
    listener: &Socket,
    spec: &Spec,
    set: &Epoll,
    guests: &mut Vec<Option<Guest>>,
    free: &mut Vec<usize>,
) -> Result<()> {
    loop {
        let socket = match listener.accept() {
            Ok((socket, _)) => socket,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e).context("cannot accept"),
        };
        line::set_nodelay(&socket, spec)?;
        socket.set_nonblocking(true).context("O_NONBLOCK")?;
        let at = free.pop().unwrap_or_else(|| {
            guests.push(None);
            guests.len() - 1
        });
        let event = EpollEvent::new(EpollFlags::EPOLLIN, at as u64);
        set.add(&socket, event).context("epoll_ctl")?;
        guests[at] = Some(Guest { socket, got: 0, kind: STAYS });
    }
}

impl Guest {
    /// Takes what is there and answers; false when the connection is over.
    fn serve(&mut self, request: &mut [u8], answer: &[u8]) -> Result<bool> {
        let wanted = request.len() - self.got;
        let n = match self.socket.read(&mut request[..wanted]) {
            Ok(0) => return Ok(false),
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(true),
            Err(e) if is_gone(&e) => return Ok(false),
            Err(e) => return Err(e).context("cannot receive"),
        };
        if self.got == 0 {
            self.kind = request[0];
        }
        self.got += n;
        if self.got < request.len() {
            return Ok(true);
        }
        self.got = 0;
        if let Err(e) = send_all(&self.socket, answer) {
            // The client's run is over and it did not wait for this answer.
            return if is_gone(&e) { Ok(false) } else { Err(e).context("cannot send") };
        }
        match self.kind {
            LAST => Ok(false),
            STAYS => Ok(true),
            other => bail!("a request begins with {other}"),
        }
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
}

/// Sends all of it on a non-blocking socket. Short messages find room at once.
pub fn send_all(socket: &Socket, mut rest: &[u8]) -> io::Result<()> {
    while !rest.is_empty() {
        match (&*socket).write(rest) {
            Ok(n) => rest = &rest[n..],
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                line::wait(socket.as_fd(), PollFlags::POLLOUT)?;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Allows as many descriptors as the administrator does.
pub fn raise_limit() -> Result<()> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("getrlimit")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("setrlimit")
}
