//! CLC messages in the kernel's stream: told from the application's bytes, and taken out.

use smc_proto::wire::clc::{HEADER_LEN, Header, MAX_LEN, Message};

use crate::os::{log, sockopt, sys};
use crate::record::kernel;

/// What stands at the place of a message.
#[expect(clippy::large_enum_variant, reason = "there is no allocator; a call holds one")]
pub enum Found {
    /// This.
    Message(Message),
    /// The beginning of one.
    Part,
    /// The beginning of one behind which the stream ends: its sender's process was killed, and its kernel has not sent the rest.
    Cut,
    /// Nothing yet.
    Nothing,
    /// Something else, or the stream's end.
    Other,
}

/// Looks for a message, and how long it is, or the part that is there. Nothing is taken out.
pub fn look(fd: i32) -> (Found, usize) {
    match look_once(fd) {
        // The rest may have come before the end did.
        (Found::Part, _) if kernel::has_fin(fd) => match look_once(fd) {
            (Found::Part, length) => (Found::Cut, length),
            found => found,
        },
        found => found,
    }
}

fn look_once(fd: i32) -> (Found, usize) {
    let mut bytes = [0u8; MAX_LEN];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: writable for its length.
    let n = match unsafe { sys::recv(fd, bytes.as_mut_ptr(), bytes.len(), flags) } {
        Ok(0) => return (Found::Other, 0),
        Ok(n) => n,
        Err(libc::EAGAIN) => return (Found::Nothing, 0),
        Err(_) => return (Found::Other, 0),
    };
    let there = &bytes[..n.min(MAX_LEN)];
    let length = match Header::parse(there) {
        Ok(header) => header.length,
        Err(_) if there.len() < HEADER_LEN && may_become_one(there) => {
            return (Found::Part, there.len());
        }
        Err(_) => return (Found::Other, 0),
    };
    if there.len() < length {
        return (Found::Part, there.len());
    }
    match Message::parse(&there[..length]) {
        Ok(message) => (Found::Message(message), length),
        Err(_) => (Found::Other, 0),
    }
}

/// Lets the rest of a message come, of which a part is there that is not to be read before it is whole. The kernel keeps the window shut
/// while the packet in which the part came takes most of the receive buffer, however little of it is unread (`__tcp_select_window`): for
/// ever, where nobody reads on.
#[cold]
pub fn let_rest_come(fd: i32) {
    /// Bytes. Four times the largest packet, as a packet takes more memory than it has bytes.
    const ROOM: i32 = 256 << 10;
    let set = |name, value: i32| _ = sys::setsockopt(fd, libc::SOL_SOCKET, name, &value);
    let size = || sockopt::int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, ROOM);
    let before = size();
    if before >= 2 * ROOM {
        return;
    }
    log::debug(format_args!("fd {fd}: room for the rest of a CLC message"));
    // The buffer grows by itself where a reader wants so much at once (tcp_set_rcvlowat).
    let lowat = sockopt::int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1);
    set(libc::SO_RCVLOWAT, ROOM);
    set(libc::SO_RCVLOWAT, lowat);
    // It does not where the application has set it. The size that it has set is the half of what is told.
    let is_set = size() == before;
    if is_set {
        set(libc::SO_RCVBUF, ROOM);
    }
    // A look, and the peer is told of the room.
    let mut byte = 0;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: one writable byte.
    let _ = unsafe { sys::recv(fd, &raw mut byte, 1, flags) };
    if is_set {
        set(libc::SO_RCVBUF, before / 2);
    }
}

/// Whether less than a header can be the beginning of one.
fn may_become_one(bytes: &[u8]) -> bool {
    let mut header = [0; HEADER_LEN];
    let known = bytes.len().min(HEADER_LEN);
    // The shortest Decline of version 2, but for what is there.
    let like = [0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x20];
    header[known..].copy_from_slice(&like[known..]);
    header[..known].copy_from_slice(&bytes[..known]);
    // The eyecatcher's last byte is one of two.
    known == 0 || Header::parse(&header).is_ok() || bytes == &like[..known]
}

/// Takes bytes out that have been peeked at.
pub fn discard(fd: i32, mut count: usize) {
    while count > 0 {
        match sys::discard(fd, count) {
            Ok(n) if n > 0 => count -= n.min(count),
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::io::{ErrorKind, Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};
    use std::vec;

    use super::*;

    const MESSAGE: usize = 224;

    fn unread(stream: &TcpStream) -> usize {
        sys::ioctl_int(stream.as_raw_fd(), libc::FIONREAD).map_or(0, |bytes| bytes as usize)
    }

    /// Whether a whole message comes in that time.
    fn comes(stream: &TcpStream, most: Duration) -> bool {
        let begun = Instant::now();
        while unread(stream) < MESSAGE {
            if begun.elapsed() > most {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// The reader of a stream of which all is read but for a message at its end, which the sender's kernel has cut, and does not send the
    /// rest of.
    fn stalled(
        listener: &TcpListener,
        bytes: usize,
        at_once: usize,
    ) -> Option<(TcpStream, TcpStream)> {
        let mut sender = TcpStream::connect(listener.local_addr().ok()?).ok()?;
        let (mut reader, _) = listener.accept().ok()?;
        sender.set_nodelay(true).ok()?;
        sender.set_nonblocking(true).ok()?;
        let (all, mut sent) = (vec![0; 1 << 16], 0);
        while sent < bytes {
            match sender.write(&all[..all.len().min(bytes - sent)]) {
                Ok(n) => sent += n,
                // It does not fit as a whole: another one will.
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => panic!("{error}"),
            }
        }
        if sender.write(&[1; MESSAGE]).ok() != Some(MESSAGE) {
            return None;
        }
        let (mut some, mut got) = (vec![0; at_once], 0);
        while got < bytes {
            got += reader.read(&mut some[..at_once.min(bytes - got)]).ok()?;
        }
        (!comes(&reader, Duration::from_millis(200))).then_some((sender, reader))
    }

    /// `set`: what the application has set SO_RCVBUF to.
    fn find_and_mend(set: Option<i32>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
        if let Some(bytes) = set {
            sys::setsockopt(listener.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &bytes)
                .expect("a size");
        }
        let begun = Instant::now();
        for n in 0usize.. {
            if begun.elapsed() > Duration::from_secs(15) {
                std::println!("this kernel has cut no message so in {n} streams");
                return;
            }
            let found = stalled(&listener, 10_000 + n * 104_729 % 790_000, 1 + n * 7919 % 65_535);
            let Some((_sender, reader)) = found else { continue };
            let fd = reader.as_raw_fd();
            let size = || sockopt::int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, 0);
            let before = (unread(&reader), size());
            assert!((1..MESSAGE).contains(&before.0));
            let_rest_come(fd);
            assert!(comes(&reader, Duration::from_secs(5)), "the rest of a message did not come");
            assert_eq!(sockopt::int(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 0), 1);
            assert!(set.is_none() || size() == before.1, "the application's size is another one");
            return std::println!("{} of {MESSAGE} bytes had come, at stream {n}", before.0);
        }
    }

    #[test]
    fn the_rest_of_a_message_comes_that_the_window_kept_back() {
        find_and_mend(None);
    }

    #[test]
    fn the_rest_of_a_message_comes_whatever_size_the_application_has_set() {
        find_and_mend(Some(65_536));
    }
}
