//! Native SMC sockets: AF_SMC, and IPPROTO_SMC of AF_INET and AF_INET6. What the kernel makes is a TCP socket, which
//! its own module has inside, too; only what such a socket says about itself is answered here. Where AF_SMC and TCP
//! behave differently, TCP's way holds.
//!
//! That a socket is one is written on the kernel's socket, by IP options that do nothing to TCP: they choose what
//! recvmsg(2) tells about a datagram. So it is known after dup, fork, exec and SCM_RIGHTS, and of sockets accepted by
//! whatever way, without any state here. No program has a use for them on TCP.

use libc::{AF_INET, AF_INET6, IPPROTO_IP, IPPROTO_TCP, SO_DOMAIN, SOL_SOCKET};

use super::option::Verdict;
use crate::os::sys::{self, Errno};
use crate::os::{config, kernel_only, sockopt};

/// The address family (linux/socket.h); its protocols say which version of IP is below.
pub const AF_SMC: i32 = 43;
const SMCPROTO_SMC: i32 = 0;
const SMCPROTO_SMC6: i32 = 1;
/// The protocol of AF_INET and AF_INET6 (linux/in.h, since Linux 6.11).
pub const IPPROTO_SMC: i32 = 256;
/// Level and only option (linux/smc.h).
pub const SOL_SMC: i32 = 286;
const SMC_LIMIT_HS: i32 = 1;

/// Set on every native SMC socket.
const MARK: i32 = libc::IP_RETOPTS;
/// Set as well where it is IPPROTO_SMC's.
const BY_PROTOCOL: i32 = libc::IP_RECVOPTS;
/// SMC_LIMIT_HS. There are no handshakes to limit, but it reads back.
const LIMITED: i32 = libc::IP_PASSSEC;

/// What to ask the kernel for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Address family.
    pub family: i32,
    /// Protocol.
    pub protocol: i32,
    native: Option<Native>,
}

/// How a program names an SMC socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Native {
    /// As a family.
    Family,
    /// As a protocol.
    Protocol,
}

/// What socket(2) of these arguments means.
///
/// # Errors
/// The kernel's own for AF_SMC.
pub fn requested(family: i32, kind: i32, protocol: i32) -> Result<Request, Errno> {
    let as_asked = Request { family, protocol, native: None };
    let native = match (family, protocol) {
        (AF_SMC, _) => Native::Family,
        (AF_INET | AF_INET6, IPPROTO_SMC) => Native::Protocol,
        _ => return Ok(as_asked),
    };
    if config::get().off {
        return Ok(as_asked);
    }
    let is_stream = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_STREAM;
    match native {
        Native::Protocol if is_stream => {
            Ok(Request { family, protocol: IPPROTO_TCP, native: Some(native) })
        }
        Native::Protocol => Ok(as_asked),
        // Refused by the kernel whatever the family.
        Native::Family if !is_known(kind) => Ok(as_asked),
        Native::Family if !is_stream => Err(libc::ESOCKTNOSUPPORT),
        Native::Family => {
            let family = match protocol {
                SMCPROTO_SMC => AF_INET,
                SMCPROTO_SMC6 => AF_INET6,
                _ => return Err(libc::EPROTONOSUPPORT),
            };
            Ok(Request { family, protocol: IPPROTO_TCP, native: Some(native) })
        }
    }
}

/// Whether socket(2) knows this type and these flags.
fn is_known(kind: i32) -> bool {
    /// Where the type ends and flags begin, and the first type that does not exist (linux/net.h).
    const TYPE_MASK: i32 = 0xf;
    const SOCK_MAX: i32 = 11;
    let flags = kind & !TYPE_MASK;
    flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == 0 && kind & TYPE_MASK < SOCK_MAX
}

/// `fd` was made for this request.
pub fn created(fd: i32, request: &Request) {
    let Some(native) = request.native else { return };
    // A filter may know neither the call nor the option.
    if kernel_only::is_sandboxed() {
        return;
    }
    // It is a working socket without, that says it is TCP's.
    let mark = |option| sys::setsockopt(fd, IPPROTO_IP, option, &1i32);
    let _ = mark(MARK);
    if native == Native::Protocol {
        let _ = mark(BY_PROTOCOL);
    }
}

/// Whether `fd` is a native SMC socket, and how it was named.
fn native(fd: i32) -> Option<Native> {
    if config::get().off || kernel_only::is_sandboxed() {
        return None;
    }
    let is_set = |option| sockopt::int(fd, IPPROTO_IP, option, 0) != 0;
    let is_tcp = || sockopt::int(fd, SOL_SOCKET, libc::SO_PROTOCOL, 0) == IPPROTO_TCP;
    if !is_set(MARK) || !is_tcp() {
        return None;
    }
    Some(if is_set(BY_PROTOCOL) { Native::Protocol } else { Native::Family })
}

/// Whether these options are answered by [`named`].
pub fn is_name(level: i32, name: i32) -> bool {
    level == SOL_SOCKET && matches!(name, SO_DOMAIN | libc::SO_PROTOCOL)
}

/// SO_DOMAIN and SO_PROTOCOL.
pub fn named(fd: i32, name: i32) -> Verdict {
    let domain = || sockopt::int(fd, SOL_SOCKET, SO_DOMAIN, AF_INET);
    match (native(fd), name) {
        (Some(Native::Family), SO_DOMAIN) => Verdict::Value(AF_SMC),
        (Some(Native::Family), _) if domain() == AF_INET6 => Verdict::Value(SMCPROTO_SMC6),
        (Some(Native::Family), _) => Verdict::Value(SMCPROTO_SMC),
        (Some(Native::Protocol), libc::SO_PROTOCOL) => Verdict::Value(IPPROTO_SMC),
        _ => Verdict::Kernel,
    }
}

/// getsockopt(2) of level SOL_SMC.
pub fn get(fd: i32, name: i32) -> Verdict {
    match (native(fd), name) {
        (None, _) => Verdict::Kernel,
        (_, SMC_LIMIT_HS) => Verdict::Value(sockopt::int(fd, IPPROTO_IP, LIMITED, 0)),
        _ => Verdict::Fail(libc::EOPNOTSUPP),
    }
}

/// setsockopt(2) of level SOL_SMC; `value` reads the caller's int.
pub fn set(fd: i32, name: i32, value: impl FnOnce() -> Result<i32, Errno>) -> Verdict {
    match (native(fd), name) {
        (None, _) => return Verdict::Kernel,
        (_, SMC_LIMIT_HS) => {}
        _ => return Verdict::Fail(libc::EOPNOTSUPP),
    }
    let limit = |value| sys::setsockopt(fd, IPPROTO_IP, LIMITED, &i32::from(value != 0));
    match value().and_then(limit) {
        Ok(()) => Verdict::Value(0),
        Err(code) => Verdict::Fail(code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_and_flags_that_socket_knows() {
        for kind in [0, 1, 5, 10, 1 | libc::SOCK_CLOEXEC, 2 | libc::SOCK_NONBLOCK] {
            assert!(is_known(kind), "{kind}");
        }
        for kind in [11, 15, 16, -1, 1 | 0x40] {
            assert!(!is_known(kind), "{kind}");
        }
    }
}
