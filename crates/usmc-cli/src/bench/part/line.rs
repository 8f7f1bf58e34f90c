//! One connection and one way to wait on it.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use socket2::{Domain, SockAddr, Socket, Type};

use super::spec::{Address, Spec, Wait};

/// The listener's queue, as busy servers have it.
const BACKLOG: i32 = 4096;

/// A listening socket, and the port if it has one.
pub fn listen(at: &Address) -> Result<(Socket, u16)> {
    let (socket, name) = socket(at)?;
    socket.set_reuse_address(true).context("SO_REUSEADDR")?;
    socket.bind(&name).context("cannot bind")?;
    socket.listen(BACKLOG).context("cannot listen")?;
    let port = socket.local_addr().ok().and_then(|name| Some(name.as_socket()?.port()));
    Ok((socket, port.unwrap_or(0)))
}

/// A connected socket.
pub fn connect(at: &Address) -> Result<Socket> {
    let (socket, name) = socket(at)?;
    socket.connect(&name).context("cannot connect")?;
    Ok(socket)
}

/// A socket, and the address that is the server's.
pub fn socket(at: &Address) -> Result<(Socket, SockAddr)> {
    let (domain, name) = match at {
        Address::Tcp(at) => (Domain::IPV4, (*at).into()),
        Address::Unix(path) => (Domain::UNIX, SockAddr::unix(path).context("a UNIX address")?),
    };
    Ok((Socket::new(domain, Type::STREAM, None).context("cannot make a socket")?, name))
}

/// As programs set it that send small messages; streams are left as they are by default.
pub fn set_nodelay(socket: &Socket, spec: &Spec) -> Result<()> {
    if matches!(spec.at, Address::Tcp(_)) && spec.chunk >= spec.request {
        socket.set_tcp_nodelay(true).context("TCP_NODELAY")?;
    }
    Ok(())
}

/// A connection.
pub struct Line {
    socket: Socket,
    wait: Wait,
    set: Option<Epoll>,
    chunk: usize,
}

impl Line {
    /// Takes a connected socket.
    pub fn new(socket: Socket, spec: &Spec) -> Result<Line> {
        set_nodelay(&socket, spec)?;
        socket.set_nonblocking(spec.wait != Wait::Blocking).context("O_NONBLOCK")?;
        let mut set = None;
        if spec.wait == Wait::Epoll {
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("epoll_create")?;
            epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, 0)).context("epoll_ctl")?;
            set = Some(epoll);
        }
        Ok(Line { socket, wait: spec.wait, set, chunk: spec.chunk })
    }

    /// Sends all of it, in chunks.
    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        for chunk in message.chunks(self.chunk) {
            let mut rest = chunk;
            while !rest.is_empty() {
                match self.socket.write(rest) {
                    Ok(n) => rest = &rest[n..],
                    Err(e) if e.kind() == ErrorKind::WouldBlock => self.wait_for_room()?,
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(())
    }

    /// Fills the buffer; false if the stream was over before its first byte.
    pub fn receive(&mut self, message: &mut [u8]) -> io::Result<bool> {
        let mut got = 0;
        while got < message.len() {
            self.wait_for_bytes()?;
            let end = message.len().min(got + self.chunk);
            match self.socket.read(&mut message[got..end]) {
                Ok(0) if got == 0 => return Ok(false),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    fn wait_for_bytes(&self) -> io::Result<()> {
        match (&self.set, self.wait) {
            (Some(set), _) => {
                set.wait(&mut [EpollEvent::empty()], EpollTimeout::NONE)?;
            }
            (None, Wait::Poll) => wait(self.socket.as_fd(), PollFlags::POLLIN)?,
            (None, _) => {}
        }
        Ok(())
    }

    fn wait_for_room(&self) -> io::Result<()> {
        if self.wait == Wait::Busy {
            std::hint::spin_loop();
            return Ok(());
        }
        wait(self.socket.as_fd(), PollFlags::POLLOUT)
    }
}

/// Sleeps in poll(2).
pub fn wait(fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<()> {
    poll(&mut [PollFd::new(fd, flags)], PollTimeout::NONE)?;
    Ok(())
}
