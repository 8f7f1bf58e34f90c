//! Sockets: each queue pair listens at a name of its own in the fabric's directory, which is how its number is taken.
//!
//! A requester connects to its peer's socket, sends packets, and has answers by the same connection. A name whose process was killed
//! refuses connections, and is removed by the process that finds that out.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::state::Fate;
use crate::wire::{DATA_MAX, HEADER};

const BACKLOG: c_int = 64;

/// The name of a queue pair's socket.
pub(crate) fn name(device: &str, number: u32) -> String {
    format!("qp-{device}-{number}")
}

/// A socket that listens at a free number from `first` on. Its name is there only while it listens, or its process was killed.
pub(crate) fn listen(directory: RawFd, device: &str, first: u32) -> io::Result<(OwnedFd, u32)> {
    let socket = socket()?;
    let new = path(directory, &format!("new-{device}-{}-{first}", std::process::id()));
    let _ = std::fs::remove_file(&new);
    let (address, len) = address(&new)?;
    // SAFETY: The address and its length belong together.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
    // SAFETY: A socket of ours.
    let listening = check(unsafe { libc::listen(socket.as_raw_fd(), BACKLOG) });
    let found = listening.and_then(|()| {
        for number in first..first + (1 << 20) {
            match std::fs::hard_link(&new, path(directory, &name(device, number))) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                other => return other.map(|()| number),
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    });
    let _ = std::fs::remove_file(&new);
    found.map(|number| (socket, number))
}

/// A connection to a queue pair; `None` where there is none now.
pub(crate) fn connect(directory: RawFd, device: &str, number: u32) -> Option<OwnedFd> {
    let path = path(directory, &name(device, number));
    let (socket, (address, len)) = (socket().ok()?, address(&path).ok()?);
    // SAFETY: The address and its length belong together.
    match check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) }) {
        Ok(()) => Some(socket),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let _ = std::fs::remove_file(path);
            None
        }
        Err(_) => None,
    }
}

/// A connection that a peer has made; `None` if there is no other.
pub(crate) fn accept(socket: &OwnedFd) -> Option<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: Nobody's address is asked for.
    let fd = unsafe {
        libc::accept4(socket.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags)
    };
    // SAFETY: A new descriptor.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Removes the name of a queue pair.
pub(crate) fn remove(directory: RawFd, device: &str, number: u32) {
    let _ = std::fs::remove_file(path(directory, &name(device, number)));
}

/// What a look for a packet has found.
pub(crate) enum Received {
    Packet(usize),
    Nothing,
    Closed,
}

pub(crate) const PACKET_MAX: usize = HEADER + DATA_MAX;

pub(crate) fn receive(socket: &OwnedFd, into: &mut [u8; PACKET_MAX]) -> Received {
    // SAFETY: The buffer is as long as that.
    let len = unsafe { libc::recv(socket.as_raw_fd(), into.as_mut_ptr().cast(), into.len(), 0) };
    match len {
        1.. => Received::Packet(len as usize),
        0 => Received::Closed,
        _ if is_for_later() => Received::Nothing,
        _ => Received::Closed,
    }
}

/// Packets that are on their way: due at a time, and kept while the peer's socket is full.
#[derive(Default)]
pub(crate) struct Outbox {
    packets: VecDeque<(Instant, Vec<u8>)>,
    pub(crate) is_blocked: bool,
}

impl Outbox {
    pub(crate) fn push(&mut self, due: Instant, packet: Vec<u8>) {
        self.packets.push_back((due, packet));
    }

    pub(crate) fn clear(&mut self) {
        self.packets.clear();
        self.is_blocked = false;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// When the next packet has to go; `None` while that is not a question of time.
    pub(crate) fn due(&self, fate: Fate) -> Option<Instant> {
        if self.is_blocked || fate == Fate::Held {
            return None;
        }
        self.packets.front().map(|(due, _)| *due)
    }

    /// Sends what is due. Without a socket, or with one that is closed, packets are lost, and `false` is returned.
    pub(crate) fn flush(&mut self, socket: Option<&OwnedFd>, fate: Fate, now: Instant) -> bool {
        self.is_blocked = false;
        let mut is_open = socket.is_some();
        while let Some((due, packet)) = self.packets.front() {
            if *due > now || fate == Fate::Held {
                break;
            }
            if let (Fate::Delivered, true, Some(socket)) = (fate, is_open, socket) {
                // SAFETY: The packet's own bytes.
                let sent = unsafe {
                    libc::send(
                        socket.as_raw_fd(),
                        packet.as_ptr().cast(),
                        packet.len(),
                        libc::MSG_NOSIGNAL,
                    )
                };
                if sent < 0 && is_for_later() {
                    self.is_blocked = true;
                    break;
                }
                is_open = sent >= 0;
            }
            self.packets.pop_front();
        }
        is_open
    }
}

fn is_for_later() -> bool {
    let kind = io::Error::last_os_error().kind();
    kind == io::ErrorKind::WouldBlock || kind == io::ErrorKind::Interrupted
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: No pointers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    check(fd.min(0))?;
    // SAFETY: A new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// By the directory's descriptor, as the name of a socket may have 107 bytes only.
fn path(directory: RawFd, name: &str) -> PathBuf {
    Path::new("/proc/self/fd").join(directory.to_string()).join(name)
}

fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let bytes = path.as_os_str().as_encoded_bytes();
    // SAFETY: All-zero is a value of the structure.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if bytes.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    Ok((address, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

fn check(returned: c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
