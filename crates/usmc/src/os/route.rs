//! Where the kernel would send packets for an address (rtnetlink(7)).

use core::net::IpAddr;

use crate::os::sys;

/// How far an address is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// The address is one of this network namespace.
    Local,
    /// A host on a network that this one is on, too.
    OnLink,
    /// A host behind a gateway, or one that cannot be reached.
    Far,
    /// The kernel does not tell: a sandbox may not let it.
    Unknown,
}

/// A question for one route: RTM_GETROUTE with RTA_DST.
#[repr(C)]
struct Question {
    header: libc::nlmsghdr,
    /// struct rtmsg: family, lengths of prefixes, and zero for the rest.
    family: u8,
    dst_len: u8,
    rest: [u8; 10],
    attribute_len: u16,
    attribute: u16,
    addr: [u8; 16],
}

const _: () = assert!(size_of::<Question>() == 16 + 12 + 4 + 16);

/// Words of an answer at most.
const ANSWER: usize = 256;
/// Where the attributes of an answer begin, in bytes: behind struct nlmsghdr and struct rtmsg.
const ATTRIBUTES: usize = 16 + 12;

/// The route to this address.
pub fn to(addr: IpAddr) -> Route {
    let mut bits = [0; 16];
    let (family, addr_len) = match addr {
        IpAddr::V4(v4) => {
            bits[..4].copy_from_slice(&v4.octets());
            (libc::AF_INET, 4)
        }
        IpAddr::V6(v6) => {
            bits = v6.octets();
            (libc::AF_INET6, 16)
        }
    };
    // SAFETY: all-zero is a valid nlmsghdr.
    let mut header: libc::nlmsghdr = unsafe { core::mem::zeroed() };
    header.nlmsg_len = (ATTRIBUTES + 4 + addr_len) as u32;
    header.nlmsg_type = libc::RTM_GETROUTE;
    header.nlmsg_flags = libc::NLM_F_REQUEST as u16;
    let question = Question {
        header,
        family: family as u8,
        dst_len: addr_len as u8 * 8,
        rest: [0; 10],
        attribute_len: 4 + addr_len as u16,
        attribute: libc::RTA_DST,
        addr: bits,
    };
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let Ok(fd) = sys::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) else {
        return Route::Unknown;
    };
    let mut answer = [0u32; ANSWER];
    let told = sys::ask(fd, &question, &mut answer);
    sys::close(fd);
    told.map_or(Route::Unknown, |len| read(&answer, len))
}

/// What an answer of so many bytes says.
fn read(answer: &[u32; ANSWER], len: usize) -> Route {
    let mut bytes = [0; ANSWER * 4];
    for (to, word) in bytes.chunks_exact_mut(4).zip(answer) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    let half = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
    let len = len.min(bytes.len()).min(answer[0] as usize);
    match half(4) {
        libc::RTM_NEWROUTE if len >= ATTRIBUTES => {}
        _ if i32::from(half(4)) == libc::NLMSG_ERROR && len >= 20 => return Route::Far,
        _ => return Route::Unknown,
    }
    // struct rtmsg: the type is its eighth byte.
    match bytes[16 + 7] {
        libc::RTN_LOCAL => return Route::Local,
        libc::RTN_UNICAST => {}
        _ => return Route::Far,
    }
    let mut at = ATTRIBUTES;
    while at + 4 <= len {
        let (size, kind) = (usize::from(half(at)), half(at + 2) & libc::NLA_TYPE_MASK as u16);
        if matches!(kind, libc::RTA_GATEWAY | libc::RTA_VIA | libc::RTA_MULTIPATH) {
            return Route::Far;
        }
        at += size.max(4).next_multiple_of(4);
    }
    Route::OnLink
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_local() {
        assert_eq!(to("127.0.0.1".parse().unwrap()), Route::Local);
        assert_eq!(to("127.3.4.5".parse().unwrap()), Route::Local);
        // A multicast address is nobody's; 240.0.0.0/4 is reserved.
        assert_ne!(to("240.0.0.1".parse().unwrap()), Route::Local);
    }

    /// An answer of this type, with these attributes.
    fn answer(kind: u16, route: u8, attributes: &[(u16, u32)]) -> (Box<[u32; ANSWER]>, usize) {
        let mut words = Box::new([0u32; ANSWER]);
        words[1] = u32::from(kind);
        words[5] = u32::from_ne_bytes([0, 0, 0, route]);
        let mut at = ATTRIBUTES / 4;
        for (kind, value) in attributes {
            words[at] = 8 | u32::from(*kind) << 16;
            words[at + 1] = *value;
            at += 2;
        }
        words[0] = at as u32 * 4;
        (words, at * 4)
    }

    #[test]
    fn a_gateway_is_far() {
        let told = |kind, route, attributes: &[(u16, u32)]| {
            let (words, len) = answer(kind, route, attributes);
            read(&words, len)
        };
        let (new, device, address) = (libc::RTM_NEWROUTE, (libc::RTA_OIF, 2), (libc::RTA_DST, 9));
        assert_eq!(told(new, libc::RTN_UNICAST, &[address, device]), Route::OnLink);
        let gateway = (libc::RTA_GATEWAY, 7);
        assert_eq!(told(new, libc::RTN_UNICAST, &[address, device, gateway]), Route::Far);
        assert_eq!(told(new, libc::RTN_LOCAL, &[address, device]), Route::Local);
        assert_eq!(told(new, libc::RTN_BROADCAST, &[]), Route::Far);
        assert_eq!(told(77, libc::RTN_UNICAST, &[]), Route::Unknown);
        // Attributes that lie about their lengths end the reading.
        let (mut words, len) = answer(new, libc::RTN_UNICAST, &[address, gateway]);
        words[7] = 0xffff;
        assert_eq!(read(&words, len), Route::OnLink);
        // One of no length does not hold it up.
        words[7] = 0;
        assert_ne!(read(&words, len), Route::Local);
    }
}
