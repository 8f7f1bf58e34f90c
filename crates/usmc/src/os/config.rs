//! The flat environment that `usmc run` hands over, read once at start. No allocation.
//!
//! Bad values never stop a program: they are ignored here and were refused with words by `usmc run`.

use core::ffi::{CStr, c_char};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::str;

use crate::os::sys;

const RULES: usize = 32;

/// A list of at most 32 rules.
#[derive(Clone, Copy)]
pub struct List<T: Copy> {
    items: [Option<T>; RULES],
}

impl<T: Copy> List<T> {
    const fn new() -> List<T> {
        List { items: [None; RULES] }
    }

    fn parse(text: Option<&str>, item: impl Fn(&str) -> Option<T>) -> List<T> {
        let mut list = List::new();
        let parsed = text.unwrap_or("").split(',').filter_map(|s| item(s.trim()));
        for (place, value) in list.items.iter_mut().zip(parsed) {
            *place = Some(value);
        }
        list
    }

    fn is_empty(&self) -> bool {
        self.items[0].is_none()
    }

    fn any(&self, test: impl Fn(T) -> bool) -> bool {
        self.items.iter().flatten().any(|&rule| test(rule))
    }
}

#[derive(Clone, Copy)]
struct Ports(u16, u16);

#[derive(Clone, Copy)]
struct Net(u128, u32);

/// `USMC_TCP_OPTION`: whose SYN and SYN-ACK say SMC, where the kernel has the programs for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TcpOption {
    /// Nobody's.
    Off,
    /// Of those that can follow it up by in-band CLC: nobody so far.
    Auto,
    /// Of all connections and listeners that may leave TCP.
    On,
}

/// A network, and the port of its listeners if it is one only.
#[derive(Clone, Copy)]
struct Peer(Net, Option<u16>);

/// What the library was told.
pub struct Config {
    /// Do nothing at all.
    pub off: bool,
    /// `USMC_ISM_DIR`. A copy: programs that set their title (redis) write over the environment.
    ism_dir: ([u8; DIR_MAX], usize),
    /// `USMC_REGIONS`; a copy, likewise.
    regions: ([u8; REGIONS_MAX], usize),
    /// log2 of a ring's bytes, 14..=22.
    pub ring_shift: u32,
    /// Most time a waiter spins before it sleeps, in nanoseconds.
    pub busy_ns: u64,
    /// `busy_ns` was not set: a thread that works longer may spin longer.
    pub busy_adapts: bool,
    /// Whether to say SMC when a connection is made.
    pub tcp_option: TcpOption,
    /// `USMC_IO_URING` is `deny`: to the program the kernel has none.
    pub denies_io_uring: bool,
    /// Whether connections leave TCP by memory that processes of one host hand each other: not where `USMC_LOOPBACK` is `off`.
    pub uses_loopback: bool,
    /// `USMC_CHANGE_OVER` is `at-once`: no connection has to show that it lasts.
    pub changes_over_at_once: bool,
    include_ports: List<Ports>,
    exclude_ports: List<Ports>,
    include_addrs: List<Net>,
    exclude_addrs: List<Net>,
    region_nets: List<Net>,
    /// Whether there are such rules at all.
    has_rules: bool,
    peers: List<Peer>,
    fast_open: List<Peer>,
    /// `USMC_UEIDS`; a copy.
    ueids: ([u8; UEIDS_MAX], usize),
}

/// Default ring: 256 KiB per direction. Larger ones move large messages faster (64 KB: 11 GB/s, in 4 MiB 13 GB/s), and keep
/// as much memory once such were sent. What nobody reads has room beside it ([`crate::stream::room`]).
const RING_SHIFT: u32 = 18;
/// Default spin budget: a little more than a cross-core wake-up costs.
const BUSY_NS: u64 = 50_000;

impl Config {
    /// Before anything was read: off.
    pub const fn off() -> Config {
        Config {
            off: true,
            ism_dir: ([0; DIR_MAX], 0),
            regions: ([0; REGIONS_MAX], 0),
            ring_shift: RING_SHIFT,
            busy_ns: BUSY_NS,
            busy_adapts: true,
            tcp_option: TcpOption::Auto,
            denies_io_uring: false,
            uses_loopback: true,
            changes_over_at_once: false,
            include_ports: List::new(),
            exclude_ports: List::new(),
            include_addrs: List::new(),
            exclude_addrs: List::new(),
            region_nets: List::new(),
            has_rules: false,
            peers: List::new(),
            fast_open: List::new(),
            ueids: ([0; UEIDS_MAX], 0),
        }
    }

    /// Reads the environment.
    pub fn from_env() -> Config {
        let mut config = Config {
            off: env(c"USMC_OFF").is_some_and(|v| !matches!(v, "" | "0" | "false" | "no")),
            ism_dir: copy(env(c"USMC_ISM_DIR").filter(|d| d.starts_with('/')).unwrap_or("")),
            regions: copy(env(c"USMC_REGIONS").unwrap_or("")),
            tcp_option: match env(c"USMC_TCP_OPTION") {
                Some("on") => TcpOption::On,
                Some("off") => TcpOption::Off,
                _ => TcpOption::Auto,
            },
            denies_io_uring: env(c"USMC_IO_URING") == Some("deny"),
            uses_loopback: env(c"USMC_LOOPBACK") != Some("off"),
            changes_over_at_once: env(c"USMC_CHANGE_OVER") == Some("at-once"),
            include_ports: List::parse(env(c"USMC_INCLUDE_PORTS"), ports),
            exclude_ports: List::parse(env(c"USMC_EXCLUDE_PORTS"), ports),
            include_addrs: List::parse(env(c"USMC_INCLUDE_ADDRS"), net),
            exclude_addrs: List::parse(env(c"USMC_EXCLUDE_ADDRS"), net),
            region_nets: List::parse(env(c"USMC_REGION_NETS"), net),
            peers: List::parse(env(c"USMC_PEERS"), peer),
            fast_open: List::parse(env(c"USMC_FAST_OPEN"), peer),
            ueids: copy(env(c"USMC_UEIDS").unwrap_or("")),
            ..Config::off()
        };
        config.find_rules();
        if let Some(bytes) = env(c"USMC_RING_SIZE").and_then(|v| v.parse::<u32>().ok()) {
            let shift = bytes.max(1).next_power_of_two().trailing_zeros();
            config.ring_shift = shift.clamp(14, 22);
        }
        if let Some(us) = env(c"USMC_BUSY_POLL_US").and_then(|v| v.parse::<u64>().ok()) {
            config.busy_ns = us.min(1_000_000) * 1000;
            config.busy_adapts = false;
        }
        if !program_allowed() {
            config.off = true;
        }
        config
    }

    /// The configured ISM directory; empty = default.
    pub fn ism_dir(&self) -> &str {
        str::from_utf8(&self.ism_dir.0[..self.ism_dir.1]).unwrap_or("")
    }

    /// Which regions this process shares: `auto`, `none`, or paths with commas between them; empty = `auto`.
    pub fn regions(&self) -> &str {
        str::from_utf8(&self.regions.0[..self.regions.1]).unwrap_or("")
    }

    /// Whether the other end at this address was declared to speak SMC: a listener there, or with port `None` a client.
    #[inline]
    pub fn is_peer(&self, addr: impl Fn() -> IpAddr, port: Option<u16>) -> bool {
        (!self.peers.is_empty() && is_in(&self.peers, addr_bits(addr()), port))
            || self.opens_fast(addr, port)
    }

    /// Whether connections to a listener there carry the Proposal in their SYN: it was declared so.
    #[inline]
    pub fn opens_fast(&self, addr: impl FnOnce() -> IpAddr, port: Option<u16>) -> bool {
        self.has_fast_open() && is_in(&self.fast_open, addr_bits(addr()), port)
    }

    /// Whether there is any such peer.
    #[inline]
    pub fn has_fast_open(&self) -> bool {
        !self.fast_open.is_empty()
    }

    /// The configured user-defined EIDs.
    pub fn ueids(&self) -> impl Iterator<Item = &str> {
        let text = str::from_utf8(&self.ueids.0[..self.ueids.1]).unwrap_or("");
        text.split(',').map(str::trim).filter(|eid| !eid.is_empty())
    }

    /// Whether connections to (or listeners at) this address may leave TCP.
    #[inline]
    pub fn allows(&self, addr: impl FnOnce() -> IpAddr, port: u16) -> bool {
        !self.has_rules || self.rules_allow(addr_bits(addr()), port)
    }

    /// Whether a listener there may be asked for in a region, though no network of this host has the address.
    pub fn is_in_region_nets(&self, addr: IpAddr) -> bool {
        let bits = addr_bits(addr);
        self.region_nets.any(|n: Net| n.1 == 0 || (bits ^ n.0) >> (128 - n.1) == 0)
    }

    fn find_rules(&mut self) {
        let ports = [&self.include_ports, &self.exclude_ports];
        let addrs = [&self.include_addrs, &self.exclude_addrs];
        self.has_rules =
            ports.iter().any(|list| !list.is_empty()) || addrs.iter().any(|list| !list.is_empty());
    }

    #[cold]
    fn rules_allow(&self, bits: u128, port: u16) -> bool {
        let in_ports = |p: Ports| (p.0..=p.1).contains(&port);
        let in_net = |n: Net| n.1 == 0 || (bits ^ n.0) >> (128 - n.1) == 0;
        (self.include_ports.is_empty() || self.include_ports.any(in_ports))
            && !self.exclude_ports.any(in_ports)
            && (self.include_addrs.is_empty() || self.include_addrs.any(in_net))
            && !self.exclude_addrs.any(in_net)
    }
}

#[cold]
fn is_in(peers: &List<Peer>, bits: u128, port: Option<u16>) -> bool {
    peers.any(|p| {
        let in_net = p.0.1 == 0 || (bits ^ p.0.0) >> (128 - p.0.1) == 0;
        in_net && port.is_none_or(|port| p.1.is_none_or(|p| p == port))
    })
}

/// Longest ISM directory: a mailbox' name (`/v5.m.4095`) has to fit into `sun_path` behind it.
const DIR_MAX: usize = 96;

/// Four paths of 127 characters and what stands between them.
const REGIONS_MAX: usize = 511;

/// Four EIDs of 32 characters and what stands between them.
const UEIDS_MAX: usize = 140;

/// Too long means not configured; `usmc run` refuses such a value with words.
fn copy<const MAX: usize>(text: &str) -> ([u8; MAX], usize) {
    let mut bytes = [0; MAX];
    match bytes.get_mut(..text.len()) {
        Some(place) => place.copy_from_slice(text.as_bytes()),
        None => return (bytes, 0),
    }
    (bytes, text.len())
}

fn env(name: &CStr) -> Option<&'static str> {
    // SAFETY: called from the constructor; the environment is not being changed by another thread then.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    if value.is_null() {
        return None;
    }
    // SAFETY: getenv returned a NUL-terminated string of the environment block.
    unsafe { CStr::from_ptr(value.cast_const().cast::<c_char>()) }.to_str().ok()
}

fn ports(text: &str) -> Option<Ports> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    Some(Ports(low.parse().ok()?, high.parse().ok()?))
}

fn net(text: &str) -> Option<Net> {
    let (addr, len) = match text.split_once('/') {
        Some((addr, len)) => (addr, Some(len.parse::<u32>().ok()?)),
        None => (text, None),
    };
    if let Ok(v4) = addr.parse::<Ipv4Addr>() {
        return Some(Net(addr_bits(IpAddr::V4(v4)), 96 + len.unwrap_or(32).min(32)));
    }
    let v6 = addr.parse::<Ipv6Addr>().ok()?;
    Some(Net(addr_bits(IpAddr::V6(v6)), len.unwrap_or(128).min(128)))
}

/// `10.0.0.0/8`, `10.0.0.1:6379`, `fd00::/8`, `[fd00::1]:6379`.
fn peer(text: &str) -> Option<Peer> {
    if let Some((net6, rest)) = text.strip_prefix('[').and_then(|t| t.split_once(']')) {
        let port = rest.strip_prefix(':').map(str::parse);
        return match port {
            Some(port) => Some(Peer(net(net6)?, Some(port.ok()?))),
            None if rest.is_empty() => Some(Peer(net(net6)?, None)),
            None => None,
        };
    }
    match text.split_once(':') {
        Some((net4, port)) if !port.contains(':') => {
            Some(Peer(net(net4)?, Some(port.parse().ok()?)))
        }
        _ => Some(Peer(net(text)?, None)),
    }
}

/// An address as 128 bits, IPv4 in its mapped form.
pub fn addr_bits(addr: IpAddr) -> u128 {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// Program rules: the names are matched against the executable's and the thread's name.
fn program_allowed() -> bool {
    let mut buf = [0u8; 4096];
    let exe = read_exe(&mut buf);
    let matches = |list: &str| list.split(',').any(|rule| glob(rule.trim().as_bytes(), exe));
    let include = env(c"USMC_INCLUDE_PROGRAMS").unwrap_or("");
    let exclude = env(c"USMC_EXCLUDE_PROGRAMS").unwrap_or("");
    (include.is_empty() || matches(include)) && (exclude.is_empty() || !matches(exclude))
}

/// The base name of this process' executable.
fn read_exe(buf: &mut [u8; 4096]) -> &[u8] {
    let len = sys::readlink(c"/proc/self/exe", buf).unwrap_or(0);
    let path = &buf[..len];
    path.rsplit(|&b| b == b'/').next().unwrap_or(&[])
}

/// Shell-like matching with `*` only.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some((b'*', rest)) => (0..=text.len()).any(|skip| glob(rest, &text[skip..])),
        Some((first, rest)) => text.first() == Some(first) && glob(rest, &text[1..]),
    }
}

static mut CONFIG: Config = Config::off();

/// Reads the environment into the process' configuration.
///
/// # Safety
/// Called once, from the constructor, before any other thread exists.
pub unsafe fn load() {
    // SAFETY: the caller's contract.
    unsafe { CONFIG = Config::from_env() };
}

/// The process' configuration.
#[inline(always)]
pub fn get() -> &'static Config {
    let config = &raw const CONFIG;
    // SAFETY: written only by `load`, before anybody else can read.
    unsafe { &*config }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_match_ports_and_networks() {
        let mut config = Config {
            include_ports: List::parse(Some("80, 6000-7000"), ports),
            exclude_ports: List::parse(Some("6379"), ports),
            exclude_addrs: List::parse(Some("10.0.0.0/8,fe80::/10"), net),
            ..Config::off()
        };
        config.find_rules();
        let allows = |addr: &str, port| config.allows(|| addr.parse().unwrap(), port);
        assert!(allows("127.0.0.1", 80));
        assert!(allows("127.0.0.1", 6500));
        assert!(!allows("127.0.0.1", 6379));
        assert!(!allows("127.0.0.1", 81));
        assert!(!allows("10.1.2.3", 80));
        assert!(!allows("::ffff:10.1.2.3", 80));
        assert!(!allows("fe80::1", 80));
        assert!(Config::off().allows(|| unreachable!(), 81));
    }

    #[test]
    fn peers_are_networks_with_or_without_a_port() {
        let text =
            "10.0.0.0/8, 192.0.2.1:6379,[fd00::1]:80,fe80::/10,[fd01::/16], nonsense, 1.2.3.4:x";
        let config = Config { peers: List::parse(Some(text), peer), ..Config::off() };
        let is_peer = |addr: &str, port| config.is_peer(|| addr.parse().unwrap(), port);
        assert!(is_peer("10.1.2.3", Some(1)) && is_peer("::ffff:10.1.2.3", None));
        assert!(is_peer("192.0.2.1", Some(6379)) && is_peer("192.0.2.1", None));
        assert!(!is_peer("192.0.2.1", Some(6380)) && !is_peer("192.0.2.2", Some(6379)));
        assert!(is_peer("fd00::1", Some(80)) && !is_peer("fd00::1", Some(81)));
        assert!(is_peer("fe80::1", Some(9)) && is_peer("fd01::5", Some(9)));
        assert!(!is_peer("1.2.3.4", None) && !config.has_fast_open());
        // A server that is sent a Proposal in the SYN is a peer, and no peer is sent one by that alone.
        let config = Config { fast_open: List::parse(Some(text), peer), ..Config::off() };
        let address = |text: &'static str| move || text.parse().unwrap();
        assert!(config.is_peer(address("192.0.2.1"), Some(6379)));
        assert!(config.opens_fast(address("192.0.2.1"), Some(6379)));
        assert!(!config.opens_fast(address("192.0.2.1"), Some(6380)));
        let config = Config { peers: List::parse(Some(text), peer), ..Config::off() };
        assert!(!config.opens_fast(address("192.0.2.1"), Some(6379)));
    }

    #[test]
    fn globs_match_whole_names() {
        assert!(glob(b"redis-*", b"redis-server"));
        assert!(!glob(b"redis", b"redis-server"));
        assert!(glob(b"*", b""));
    }
}
