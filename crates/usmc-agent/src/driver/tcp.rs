//! The TCP connection of a handshake, and of what follows.

use std::net::{SocketAddr, TcpStream};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use smc_proto::wire::clc::{EYECATCHER, Error, MAX_LEN, Message, Reception};

/// A TCP connection in its handshake, or behind it.
pub(super) struct Handshake {
    pub(super) tcp: TcpStream,
    /// Its own address and its peer's.
    pub(super) ends: Option<[SocketAddr; 2]>,
    pub(super) incoming: Incoming,
    /// CLC messages that the kernel has had no room for.
    pub(super) unsent: Vec<u8>,
    /// Whether it is not known yet that the peer speaks CLC.
    pub(super) awaits_first: bool,
}

/// What comes by a TCP connection.
///
/// ```text
/// Messages ──what comes is none──▶ Spoilt
///    ├──FIN──▶ Closed
///    └──RST, or another error──▶ Broken
/// ```
#[expect(clippy::large_enum_variant, reason = "most are in the first state")]
pub(super) enum Incoming {
    Messages(Reception),
    /// It has no beginning and no end any more.
    Spoilt,
    Closed,
    Broken,
}

/// What a look at a TCP connection finds. All but the first two are found once.
pub(super) enum Found {
    /// Not all of a message so far.
    Nothing,
    Message(Box<Result<Message, Error>>),
    /// A FIN.
    Closed,
    /// A RST, or another error.
    Broken,
    /// What a server begins with is no message, and was not taken.
    Foreign,
}

impl Handshake {
    /// Takes what has come, up to the end of a message.
    pub(super) fn receive(&mut self) -> Found {
        self.send();
        loop {
            let Incoming::Messages(reception) = &mut self.incoming else { return Found::Nothing };
            if self.awaits_first {
                match peek(&self.tcp) {
                    First::Nothing => return Found::Nothing,
                    First::Clc => self.awaits_first = false,
                    First::Foreign => return Found::Foreign,
                }
            }
            let mut bytes = [0; MAX_LEN];
            let wanted = reception.wanted();
            let into = bytes.get_mut(..wanted).unwrap_or_default();
            match recv(&self.tcp, into, RecvFlags::DONTWAIT) {
                Ok((0, _)) => break,
                Ok((n, _)) => match reception.push(bytes.get(..n).unwrap_or_default()) {
                    Ok(None) => {}
                    Ok(Some(message)) => return Found::Message(Box::new(Ok(message))),
                    Err(error) => {
                        self.incoming = Incoming::Spoilt;
                        return Found::Message(Box::new(Err(error)));
                    }
                },
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Found::Nothing,
                Err(_) => {
                    self.incoming = Incoming::Broken;
                    return Found::Broken;
                }
            }
        }
        self.incoming = Incoming::Closed;
        Found::Closed
    }

    /// Whether a FIN was found.
    pub(super) fn has_closed(&self) -> bool {
        matches!(self.incoming, Incoming::Closed)
    }

    /// As much as the kernel has room for: always all, as a handshake's messages are the first that are sent.
    pub(super) fn send(&mut self) {
        if !self.unsent.is_empty()
            && let Ok(n) = send(&self.tcp, &self.unsent, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
        {
            self.unsent.drain(..n);
        }
    }
}

/// What a stream begins with.
enum First {
    /// Nothing so far, or not enough to tell.
    Nothing,
    Clc,
    Foreign,
}

/// Looks at a stream's beginning, and takes nothing.
fn peek(tcp: &TcpStream) -> First {
    let mut bytes = [0; EYECATCHER.len()];
    let peeked = retry_on_intr(|| {
        recv(tcp, &mut bytes[..], RecvFlags::DONTWAIT | RecvFlags::PEEK).map(|(n, _)| n)
    });
    match peeked {
        Ok(n) if bytes.get(..n) != EYECATCHER.get(..n) => First::Foreign,
        Ok(n) if n == EYECATCHER.len() => First::Clc,
        // The end is found by the read.
        Ok(0) => First::Clc,
        Ok(_) | Err(Errno::WOULDBLOCK) => First::Nothing,
        Err(_) => First::Clc,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Ipv4Addr, Shutdown, TcpListener};

    use super::*;

    #[test]
    fn what_is_no_message_is_no_end() {
        for is_spoilt in [true, false] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let mut peer = TcpStream::connect(listener.local_addr().expect("a port")).expect("TCP");
            let (tcp, _) = listener.accept().expect("TCP");
            let incoming = Incoming::Messages(Reception::new());
            let (ends, unsent) = (None, Vec::new());
            let mut handshake = Handshake { tcp, ends, incoming, unsent, awaits_first: false };
            // What was sent may be under way for a while.
            let arrives = |handshake: &Handshake| handshake.tcp.peek(&mut [0]).expect("TCP");
            if is_spoilt {
                peer.write_all(&[b'x'; 100]).expect("TCP");
                arrives(&handshake);
                assert!(matches!(handshake.receive(), Found::Message(error) if error.is_err()));
                assert!(matches!(handshake.receive(), Found::Nothing));
            }
            peer.shutdown(Shutdown::Write).expect("TCP");
            arrives(&handshake);
            let is_end = matches!(handshake.receive(), Found::Closed);
            assert_eq!((is_end, handshake.has_closed()), (!is_spoilt, !is_spoilt));
            assert!(matches!(handshake.receive(), Found::Nothing), "it is found once");
        }
    }
}
