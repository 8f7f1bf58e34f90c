//! The few calls of the kernel and libc that rustix does not have, or not for every answer.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};

use rustix::net::sockopt;
use rustix::process::{Resource, Rlimit};

/// `linux/sockios.h`; the crate has no name for it.
const SIOCATMARK: libc::Ioctl = 0x8905;

/// A process at the other end of a UNIX socket, as the kernel has noted it when it connected.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Owner {
    /// Its effective user.
    pub uid: u32,
    /// Its id in this process' namespace; 0 where it has none there.
    pub pid: u32,
}

impl Owner {
    /// This process itself.
    pub fn own() -> Owner {
        let pid = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
        Owner { uid: rustix::process::geteuid().as_raw(), pid }
    }

    /// The process that has connected a UNIX socket.
    ///
    /// # Errors
    /// getsockopt(2).
    pub fn of(socket: impl AsFd) -> io::Result<Owner> {
        let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let fd = socket.as_fd().as_raw_fd();
        let into = (&raw mut found).cast();
        // SAFETY: a place of that length. (rustix' answer holds an id that may not be 0, and a process of another namespace has 0.)
        let done = unsafe {
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len)
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Owner { uid: found.uid, pid: found.pid.unsigned_abs() })
    }
}

/// Whether the next byte of a TCP connection is an urgent one, which is read in line.
pub(crate) fn is_at_mark(socket: impl AsFd) -> bool {
    let mut is_at: libc::c_int = 0;
    // SAFETY: a place for the answer.
    let done = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), SIOCATMARK, &raw mut is_at) };
    done == 0 && is_at != 0
}

/// The address that a connection to that one comes from, as the routes are; `None`: there is no route.
pub(crate) fn source_of(destination: IpAddr) -> Option<IpAddr> {
    let any: IpAddr = match destination {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // UDP: the kernel looks up the route, and sends nothing. The port is of no use.
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((destination, 9)).ok()?;
    socket.local_addr().ok().map(|at| at.ip())
}

/// The index of the network device that has this address; `None` where none has.
pub(crate) fn interface_of(address: IpAddr) -> Option<(u32, String)> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: a place for the list's start.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let (mut at, mut found) = (list, None);
    while found.is_none() && !at.is_null() {
        // SAFETY: an element of the list, which is there until it is freed below.
        let (addr, name, next) = unsafe { ((*at).ifa_addr, (*at).ifa_name, (*at).ifa_next) };
        // SAFETY: as above; an address is as long as its family says.
        if unsafe { ip_of(addr) } == Some(address) {
            // SAFETY: a name that ends in NUL.
            let (index, name) = unsafe { (libc::if_nametoindex(name), CStr::from_ptr(name)) };
            found = (index != 0).then(|| (index, name.to_string_lossy().into_owned()));
        }
        at = next;
    }
    // SAFETY: the list of above, of which nothing is used any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// # Safety
/// Null, or an address that is as long as its family says.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the caller's contract.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

/// A socket that a process has handed over does not wait for its own peer when it is closed here, as its application may have wished
/// (SO_LINGER): all the other ones would wait, too. A wish for a reset waits for nobody, and stays.
pub(crate) fn close_at_once(socket: impl AsFd) {
    let socket = socket.as_fd();
    if let Ok(Some(wait)) = sockopt::socket_linger(socket)
        && !wait.is_zero()
    {
        let _ = sockopt::set_socket_linger(socket, None);
    }
}

/// The socket is readable from its first byte on (SO_RCVLOWAT).
pub(crate) fn hear_each_byte(socket: impl AsFd) {
    let (fd, least): (_, libc::c_int) = (socket.as_fd().as_raw_fd(), 1);
    let (at, len) = ((&raw const least).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: an integer, and its length. A failure: it is no socket.
    let _ = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, at, len) };
}

/// As many descriptors as the system lets the process have: a connection takes two, and a third one while it is handed over.
pub fn allow_many_descriptors() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    // Without them there are fewer connections.
    let _ =
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Bytes that nobody guesses.
///
/// # Errors
/// There is no /dev/urandom.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_device() {
        let loopback = std::fs::read_to_string("/sys/class/net/lo/ifindex").expect("a device");
        let index = interface_of(Ipv4Addr::LOCALHOST.into());
        assert_eq!(index, loopback.trim().parse().ok().map(|index| (index, "lo".to_owned())));
        assert_eq!(interface_of(Ipv4Addr::new(192, 0, 2, 77).into()), None);
    }

    #[test]
    fn a_socket_tells_its_process() {
        let (one, other) = std::os::unix::net::UnixDatagram::pair().expect("a pair");
        assert_eq!(Owner::of(&one).expect("credentials"), Owner::own());
        drop(other);
        assert!(Owner::of(File::open("/dev/null").expect("a file")).is_err());
    }
}
