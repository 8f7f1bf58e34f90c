//! A TCP connection inside this host, both ends of which are this process'.

use core::ptr;

use crate::os::sys::{self, Errno};

/// How long a connection to a port of this process' own may take, in milliseconds: a packet filter may keep it away.
const MOST_MS: i32 = 200;
/// Strangers that may connect to the port first.
const STRANGERS: u32 = 8;

/// Both ends.
pub struct Pair {
    /// The end that has accepted.
    pub accepted: i32,
    /// The end that has connected.
    pub connected: i32,
}

/// Makes one, between loopback addresses of a family.
///
/// # Errors
/// socket(2), bind(2), listen(2), connect(2), accept(2); ETIMEDOUT.
pub fn tcp(family: i32) -> Result<Pair, Errno> {
    let listener = new_socket(family)?;
    let made = listen(listener, family).and_then(|name| {
        let connected = new_socket(family)?;
        join(listener, connected, &name).inspect_err(|_| sys::close(connected))
    });
    sys::close(listener);
    made
}

fn new_socket(family: i32) -> Result<i32, Errno> {
    sys::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
}

type Name = (libc::sockaddr_storage, u32);

/// The port that the listener got.
fn listen(listener: i32, family: i32) -> Result<Name, Errno> {
    // SAFETY: all-zero is valid.
    let mut name: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    name.ss_family = family as libc::sa_family_t;
    let at = (&raw mut name).cast::<u8>();
    // SAFETY: both lie in a sockaddr_storage; 127.0.0.1, or ::1, port 0.
    let len = unsafe {
        if family == libc::AF_INET {
            (*at.cast::<libc::sockaddr_in>()).sin_addr.s_addr = u32::from_be(0x7f00_0001);
            size_of::<libc::sockaddr_in>()
        } else {
            (*at.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr[15] = 1;
            size_of::<libc::sockaddr_in6>()
        }
    };
    // SAFETY: `len` bytes of it.
    unsafe { sys::bind(listener, ptr::from_ref(&name).cast(), len as u32) }?;
    sys::listen(listener, 1)?;
    let len = sys::getsockname(listener, &mut name)?;
    Ok((name, len as u32))
}

fn join(listener: i32, connected: i32, (name, len): &Name) -> Result<Pair, Errno> {
    // SAFETY: so many bytes of it.
    match unsafe { sys::connect(connected, ptr::from_ref(name).cast(), *len) } {
        Ok(()) | Err(libc::EINPROGRESS) => {}
        Err(errno) => return Err(errno),
    }
    // SAFETY: all-zero is valid.
    let mut own: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
    for _ in 0..STRANGERS {
        // The kernel has mostly connected both by now.
        let accepted = sys::accept(listener);
        if accepted == Err(libc::EAGAIN) && sys::poll1(listener, libc::POLLIN, MOST_MS) == 0 {
            break;
        }
        let Ok(accepted) = accepted else { continue };
        // SAFETY: all-zero is valid.
        let mut peer: libc::sockaddr_storage = unsafe { core::mem::zeroed() };
        let lens = (sys::getsockname(connected, &mut own), sys::getpeername(accepted, &mut peer));
        if let (Ok(one), Ok(other)) = lens
            && one == other
            && bytes(&own, one) == bytes(&peer, other)
        {
            return Ok(Pair { accepted, connected });
        }
        sys::close(accepted);
    }
    Err(libc::ETIMEDOUT)
}

fn bytes(name: &libc::sockaddr_storage, len: usize) -> &[u8] {
    let len = len.min(size_of::<libc::sockaddr_storage>());
    // SAFETY: so many bytes of it, of whatever value.
    unsafe { core::slice::from_raw_parts(ptr::from_ref(name).cast(), len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_from_one_end_to_the_other() {
        for family in [libc::AF_INET, libc::AF_INET6] {
            let made = tcp(family);
            if family == libc::AF_INET6 && made.is_err() {
                println!("skipped: no IPv6");
                continue;
            }
            let Pair { accepted, connected } = made.unwrap();
            assert_eq!(sys::send(connected, b"x", 0), Ok(1));
            assert_eq!(sys::poll1(accepted, libc::POLLIN, 1000), libc::POLLIN);
            sys::close(connected);
            sys::close(accepted);
        }
    }
}
