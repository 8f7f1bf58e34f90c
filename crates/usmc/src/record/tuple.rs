//! A connection's name on this machine: network namespace and address pair, as one side sees it.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::ptr;

use crate::os::sys::{self, Errno};

/// An address and a port; IPv4 is kept in its v4-mapped form, so both views of a dual-stack connection agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Endpoint {
    /// 16 bytes, network order.
    pub addr: [u8; 16],
    /// Host order.
    pub port: u16,
}

impl Endpoint {
    /// The address for rules and display.
    pub fn ip(&self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.addr);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// Reads a socket address of `len` bytes; `None` for other families.
    pub fn from_sockaddr(storage: &libc::sockaddr_storage, len: usize) -> Option<Endpoint> {
        match storage.ss_family as i32 {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                // SAFETY: the family says so, and sockaddr_storage is larger and aligned.
                let v4 = unsafe { *ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
                let addr = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                let addr = addr.to_ipv6_mapped().octets();
                Some(Endpoint { addr, port: u16::from_be(v4.sin_port) })
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() - 4 => {
                // SAFETY: as above.
                let v6 = unsafe { *ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
                Some(Endpoint { addr: v6.sin6_addr.s6_addr, port: u16::from_be(v6.sin6_port) })
            }
            _ => None,
        }
    }

    /// Whether it stands for every address of the host (0.0.0.0, ::).
    pub fn is_wildcard(&self) -> bool {
        self.ip().is_unspecified()
    }

    /// Whether the address is this host's alone, and of one network namespace.
    pub fn is_loopback(&self) -> bool {
        self.ip().is_loopback()
    }

    /// The accepting end, as [`Tuple::words`] has it.
    pub fn server_of(words: &[u64; 6]) -> Endpoint {
        Endpoint::of([words[3], words[4]], words[5] as u16)
    }

    /// The inverse of [`Endpoint::words`].
    pub fn of([high, low]: [u64; 2], port: u16) -> Endpoint {
        let mut addr = [0; 16];
        addr[..8].copy_from_slice(&high.to_ne_bytes());
        addr[8..].copy_from_slice(&low.to_ne_bytes());
        Endpoint { addr, port }
    }

    /// The address, in words of its bytes.
    pub fn words(&self) -> [u64; 2] {
        let half = |i: usize| self.addr[i..].first_chunk().map_or(0, |b| u64::from_ne_bytes(*b));
        [half(0), half(8)]
    }
}

/// One connection, client's view: the connecting end first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tuple {
    /// SO_NETNS_COOKIE.
    pub netns: u64,
    /// The connecting end.
    pub client: Endpoint,
    /// The accepting end.
    pub server: Endpoint,
}

impl Tuple {
    /// The inverse of [`Tuple::words`].
    pub fn of(words: &[u64; 6]) -> Tuple {
        let client = Endpoint::of([words[1], words[2]], (words[5] >> 16) as u16);
        Tuple { netns: words[0], client, server: Endpoint::server_of(words) }
    }

    /// The name of a connection whose connecting end is `fd`, or whose accepting end is.
    ///
    /// # Errors
    /// As for [`local`] and [`peer`].
    pub fn live(fd: i32, is_client: bool) -> Result<Tuple, Errno> {
        let (local, peer, netns) = (local(fd)?, peer(fd)?, netns(fd));
        let (client, server) = if is_client { (local, peer) } else { (peer, local) };
        Ok(Tuple { netns, client, server })
    }

    /// Five words for comparing and hashing.
    pub fn words(&self) -> [u64; 6] {
        let (c, s) = (self.client.words(), self.server.words());
        let ports = (self.client.port as u64) << 16 | self.server.port as u64;
        [self.netns, c[0], c[1], s[0], s[1], ports]
    }
}

/// A well-mixed hash of a tuple's words.
pub fn hash(words: &[u64; 6]) -> u64 {
    words.iter().fold(0x9e37_79b9_7f4a_7c15, |h, w| {
        let h = (h ^ w).wrapping_mul(0xff51_afd7_ed55_8ccd);
        h ^ (h >> 32)
    })
}

/// The socket's own end.
///
/// # Errors
/// getsockname's errno; EAFNOSUPPORT for other families.
pub fn local(fd: i32) -> Result<Endpoint, Errno> {
    told_by(|name| sys::getsockname(fd, name))
}

/// The socket's peer.
///
/// # Errors
/// getpeername's errno; EAFNOSUPPORT for other families.
pub fn peer(fd: i32) -> Result<Endpoint, Errno> {
    told_by(|name| sys::getpeername(fd, name))
}

fn told_by(
    ask: impl FnOnce(&mut libc::sockaddr_storage) -> Result<usize, Errno>,
) -> Result<Endpoint, Errno> {
    // SAFETY: all-zero is a valid sockaddr_storage.
    let mut name = unsafe { core::mem::zeroed() };
    let len = ask(&mut name)?;
    Endpoint::from_sockaddr(&name, len).ok_or(libc::EAFNOSUPPORT)
}

/// SO_NETNS_COOKIE of the socket (Linux 5.14); `None` where the kernel does not tell.
pub fn cookie(fd: i32) -> Option<u64> {
    const SO_NETNS_COOKIE: i32 = 71;
    let mut cookie = 0u64;
    match sys::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut cookie) {
        Ok(8) if cookie != 0 => Some(cookie),
        _ => None,
    }
}

/// What names the socket's network namespace. Where the kernel does not tell: this thread's, in which it mostly was made.
pub fn netns(fd: i32) -> u64 {
    cookie(fd).unwrap_or_else(own_namespace)
}

/// A name of this thread's network namespace that is no cookie; one that nobody else has where `/proc` does not tell.
#[cold]
fn own_namespace() -> u64 {
    const NO_COOKIE: u64 = 1 << 62;
    let inode = sys::open(c"/proc/thread-self/ns/net", libc::O_RDONLY, 0).and_then(|fd| {
        let facts = sys::fstat(fd);
        sys::close(fd);
        Ok(facts?.inode)
    });
    NO_COOKIE | (inode.unwrap_or_else(|_| sys::random()) & (NO_COOKIE - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_namespaces_are_not_the_same() {
        let here = own_namespace();
        assert_eq!(own_namespace(), here);
        // SAFETY: it concerns this thread alone, which ends. Only root can.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0 {
            assert_ne!(own_namespace(), here);
        }
    }
}
