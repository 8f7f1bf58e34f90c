//! Addresses and byte counts of plain TCP sockets, from the kernel (sock_diag(7)), for the network namespace we
//! are in.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const INET_DIAG_INFO: u16 = 2;
const IPPROTO_TCP: u8 = 6;
const NLMSG_HEADER: usize = 16;
/// All states but TIME_WAIT: nobody holds such a socket, and a server of short connections has ten thousands.
const STATES: u32 = !(1 << 6);
/// `struct inet_diag_msg`; family at 0, ports at 4 and 6, addresses at 8 and 24, queues at 56 and 60, inode at 68.
const DIAG_MSG: usize = 72;
/// States of `struct tcp_info` in which the peer's FIN, which counts as a byte, has arrived.
const WITH_FIN: [u8; 3] = [CLOSE_WAIT, LAST_ACK, CLOSING];

/// What the kernel tells of a socket; counts are bytes of the application.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// As `enum` in linux/tcp_states.h: [`ESTABLISHED`] and the others here.
    pub state: u8,
    /// Own address; IPv4-mapped ones as IPv4.
    pub local: SocketAddr,
    /// The other end's.
    pub peer: SocketAddr,
    /// Written by the application.
    pub tx_bytes: u64,
    /// Read by the application.
    pub rx_bytes: u64,
    /// Written and not acknowledged.
    pub tx_queued: u64,
    /// Received and not read. Of a listener: connections that wait to be accepted.
    pub rx_queued: u64,
    /// Segments sent that carry data, those sent again included.
    pub tx_segments: u64,
    /// Segments received that carry data.
    pub rx_segments: u64,
}

/// Connected.
pub const ESTABLISHED: u8 = 1;
/// Connecting.
pub const SYN_SENT: u8 = 2;
/// This end has closed first; its FIN is not acknowledged.
pub const FIN_WAIT1: u8 = 4;
/// This end has closed first.
pub const FIN_WAIT2: u8 = 5;
/// Nobody's.
pub const CLOSE: u8 = 7;
/// The peer has closed first.
pub const CLOSE_WAIT: u8 = 8;
/// Both have closed, the peer first.
pub const LAST_ACK: u8 = 9;
/// Listening.
pub const LISTEN: u8 = 10;
/// Both have closed at once.
pub const CLOSING: u8 = 11;

/// All TCP sockets of this namespace by inode; empty where the kernel does not tell.
pub fn tcp_sockets() -> HashMap<u64, Kernel> {
    let mut found = HashMap::new();
    for family in [AddressFamily::INET, AddressFamily::INET6] {
        // A kernel without sock_diag leaves the counters unknown, which is what the caller shows.
        let _ = dump(family, &mut found);
    }
    found
}

fn dump(family: AddressFamily, found: &mut HashMap<u64, Kernel>) -> io::Result<()> {
    let kind = (SocketType::RAW, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG));
    let socket = socket_with(AddressFamily::NETLINK, kind.0, kind.1, kind.2)?;
    send(&socket, &request(family), SendFlags::empty())?;
    let mut buf = vec![0u8; 1 << 16];
    loop {
        let (_, len) = recv(&socket, &mut buf[..], RecvFlags::empty())?;
        if len == 0 || !messages(&buf[..len.min(buf.len())], found) {
            return Ok(());
        }
    }
}

fn request(family: AddressFamily) -> [u8; 72] {
    let mut bytes = [0; 72];
    bytes[0..4].copy_from_slice(&72u32.to_ne_bytes());
    bytes[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes[6..8].copy_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
    bytes[16] = family.as_raw() as u8;
    bytes[17] = IPPROTO_TCP;
    bytes[18] = 1 << (INET_DIAG_INFO - 1);
    bytes[20..24].copy_from_slice(&STATES.to_ne_bytes());
    bytes
}

/// Takes one datagram's messages; false after the last.
fn messages(mut bytes: &[u8], found: &mut HashMap<u64, Kernel>) -> bool {
    while let (Some(len), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let len = (len as usize).max(NLMSG_HEADER).min(bytes.len());
        if matches!(kind, NLMSG_DONE | NLMSG_ERROR) {
            return false;
        }
        if let Some((inode, kernel)) = bytes.get(NLMSG_HEADER..len).and_then(socket) {
            found.insert(inode, kernel);
        }
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    true
}

fn socket(message: &[u8]) -> Option<(u64, Kernel)> {
    let (rx_queue, tx_queue) = (u32_at(message, 56)?, u32_at(message, 60)?);
    let inode = u64::from(u32_at(message, 68)?);
    let mut attributes = message.get(DIAG_MSG..)?;
    while let (Some(len), Some(kind)) = (u16_at(attributes, 0), u16_at(attributes, 2)) {
        let len = (len as usize).max(4);
        if kind == INET_DIAG_INFO {
            let info = attributes.get(4..len)?;
            let ends = [address(message, 4, 8)?, address(message, 6, 24)?];
            return Some((inode, from_info(ends, info, tx_queue, rx_queue)?));
        }
        attributes = attributes.get(len.next_multiple_of(4)..)?;
    }
    None
}

/// From `struct tcp_info` (linux/tcp.h): sent less sent again, and what was never sent, is what was
/// written, without SYN and FIN; all there since Linux 4.19.
fn from_info(
    [local, peer]: [SocketAddr; 2],
    info: &[u8],
    tx_queued: u32,
    rx_queued: u32,
) -> Option<Kernel> {
    let state = *info.first()?;
    let segments = |at: usize| u32_at(info, at).map(u64::from);
    let (received, unsent) = (u64_at(info, 128)?, u32_at(info, 144)?);
    let (sent, again) = (u64_at(info, 200)?, u64_at(info, 208)?);
    let fin = u64::from(WITH_FIN.contains(&state));
    let rx_queued = u64::from(rx_queued).saturating_sub(fin);
    Some(Kernel {
        state,
        local,
        peer,
        tx_bytes: sent.saturating_sub(again).saturating_add(u64::from(unsent)),
        rx_bytes: received.saturating_sub(fin).saturating_sub(rx_queued),
        tx_queued: u64::from(tx_queued),
        rx_queued,
        tx_segments: segments(156)?,
        rx_segments: segments(152)?,
    })
}

fn address(message: &[u8], port: usize, addr: usize) -> Option<SocketAddr> {
    let port = message.get(port..)?.first_chunk().map(|port| u16::from_be_bytes(*port))?;
    let addr = message.get(addr..)?;
    let ip = if message[0] == AddressFamily::INET.as_raw() as u8 {
        Ipv4Addr::from(*addr.first_chunk::<4>()?).into()
    } else {
        IpAddr::from(Ipv6Addr::from(*addr.first_chunk::<16>()?)).to_canonical()
    };
    Some(SocketAddr::new(ip, port))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|b| u16::from_ne_bytes(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|b| u32::from_ne_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|b| u64::from_ne_bytes(*b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    fn inode(fd: impl AsFd) -> u64 {
        rustix::fs::fstat(fd).expect("fstat").st_ino
    }

    #[test]
    fn the_kernel_counts_what_the_application_wrote_and_read() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let mut client = TcpStream::connect(listener.local_addr().expect("name")).expect("connect");
        let (mut server, _) = listener.accept().expect("accept");
        client.write_all(&[7; 1000]).expect("write");
        server.read_exact(&mut [0; 400]).expect("read");
        let found = tcp_sockets();
        let client_counters = found[&inode(&client)];
        assert_eq!(client_counters.local, client.local_addr().expect("name"));
        assert_eq!(client_counters.peer, client.peer_addr().expect("name"));
        assert_eq!((client_counters.state, client_counters.tx_segments), (ESTABLISHED, 1));
        assert_eq!((client_counters.tx_bytes, client_counters.rx_bytes), (1000, 0));
        let server_counters = found[&inode(&server)];
        assert_eq!((server_counters.rx_bytes, server_counters.rx_queued), (400, 600));
        assert_eq!((server_counters.tx_segments, server_counters.rx_segments), (0, 1));
        assert_eq!(found[&inode(&listener)].state, LISTEN);
        let server_inode = inode(&server);
        drop(client);
        server.read_to_end(&mut Vec::new()).expect("read to the end");
        let closed = tcp_sockets()[&server_inode];
        assert_eq!((closed.rx_bytes, closed.state), (1000, CLOSE_WAIT), "the FIN is no byte");
    }

    #[test]
    fn half_a_message_is_no_message() {
        let mut whole = vec![0u8; 16 + DIAG_MSG + 4 + 232];
        let len = whole.len() as u32;
        whole[0..4].copy_from_slice(&len.to_ne_bytes());
        whole[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        whole[88..90].copy_from_slice(&236u16.to_ne_bytes());
        whole[90..92].copy_from_slice(&INET_DIAG_INFO.to_ne_bytes());
        for cut in 0..whole.len() {
            let mut found = HashMap::new();
            messages(&whole[..cut], &mut found);
            assert!(cut >= 16 + DIAG_MSG + 4 + 216 || found.is_empty(), "{cut}");
        }
    }
}
