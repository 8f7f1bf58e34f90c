//! The configuration's grammar: keys, each with one name in three spellings (`ring_size` in TOML,
//! `USMC_RING_SIZE` in the environment, `--ring-size` as an option) and one flat text form.
//!
//! Whatever a value comes from, it is brought into the form that `usmc/src/config.rs` reads inside the
//! application, which knows no TOML, allocates nothing and ignores what it does not understand. So
//! everything is refused here, with words, before the program starts.

pub mod agent;
pub mod edit;
pub mod file;
mod near;
pub mod profiles;
pub mod sources;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use near::{distance, mistyped_variables, nearest};
use smc_proto::ids::{Eid, EidError};
pub use sources::{Config, ConfigArgs, DirArgs};

/// What a key's value looks like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Yes or no.
    Switch,
    /// An absolute directory that can hold UNIX sockets.
    Dir,
    /// A level, optionally with a file.
    Log,
    /// A power of two between 16 KiB and 4 MiB.
    RingSize,
    /// Microseconds, at most a second.
    Micros,
    /// Port ranges.
    Ports,
    /// Networks.
    Addrs,
    /// Names of programs.
    Programs,
    /// auto, on or off.
    Choice,
    /// One of two words, of which the first is the default.
    OneOf([&'static str; 2]),
    /// User-defined enterprise IDs.
    Eids,
    /// Yes or no, where yes is the default.
    OnOff,
    /// Networks, each with or without a port.
    Peers,
    /// auto, none, or paths of regions.
    Regions,
    /// The name of a profile.
    Profile,
}

/// One key of the configuration.
#[derive(PartialEq, Eq, Debug)]
pub struct Key {
    /// Its name in TOML.
    pub name: &'static str,
    /// Its name in the environment.
    pub env: &'static str,
    /// Its option, for messages.
    pub option: &'static str,
    /// What it may hold.
    pub kind: Kind,
}

const fn key(name: &'static str, env: &'static str, option: &'static str, kind: Kind) -> Key {
    Key { name, env, option, kind }
}

/// Every key, in the order in which `usmc check` prints them.
pub static KEYS: [Key; 22] = [
    key("profile", "USMC_PROFILE", "--profile", Kind::Profile),
    key("off", "USMC_OFF", "--off", Kind::Switch),
    key("ism_dir", "USMC_ISM_DIR", "--ism-dir", Kind::Dir),
    key("regions", "USMC_REGIONS", "--regions", Kind::Regions),
    key("log", "USMC_LOG", "--log", Kind::Log),
    key("ring_size", "USMC_RING_SIZE", "--ring-size", Kind::RingSize),
    key("busy_poll_us", "USMC_BUSY_POLL_US", "--busy-poll-us", Kind::Micros),
    key("tcp_option", "USMC_TCP_OPTION", "--tcp-option", Kind::Choice),
    key("io_uring", "USMC_IO_URING", "--io-uring", Kind::OneOf(["auto", "deny"])),
    key("change_over", "USMC_CHANGE_OVER", "--change-over", Kind::OneOf(["lasting", "at-once"])),
    key("loopback", "USMC_LOOPBACK", "--loopback", Kind::OneOf(["auto", "off"])),
    key("region_nets", "USMC_REGION_NETS", "--region-net", Kind::Addrs),
    key("include_ports", "USMC_INCLUDE_PORTS", "--include-port", Kind::Ports),
    key("exclude_ports", "USMC_EXCLUDE_PORTS", "--exclude-port", Kind::Ports),
    key("include_addrs", "USMC_INCLUDE_ADDRS", "--include-addr", Kind::Addrs),
    key("exclude_addrs", "USMC_EXCLUDE_ADDRS", "--exclude-addr", Kind::Addrs),
    key("peers", "USMC_PEERS", "--peer", Kind::Peers),
    key("fast_open", "USMC_FAST_OPEN", "--fast-open", Kind::Peers),
    key("include_programs", "USMC_INCLUDE_PROGRAMS", "--include-program", Kind::Programs),
    key("exclude_programs", "USMC_EXCLUDE_PROGRAMS", "--exclude-program", Kind::Programs),
    key("ueids", "USMC_UEIDS", "--ueid", Kind::Eids),
    key("seid", "USMC_SEID", "--seid", Kind::OnOff),
];

/// Rules the library keeps per list (`RULES` in usmc/src/config.rs).
const MAX_RULES: usize = 32;
/// Longest ISM directory: sun_path's 108 bytes less `/v5.m.4095` and its NUL, and one more (usmc's mailbox.rs).
const MAX_DIR: usize = 96;
/// Most regions of a process, and longest path of one (usmc's config.rs has room for as many).
const MAX_REGIONS: usize = 4;
const MAX_REGION: usize = 127;
/// Limits of a ring (`ring_shift` 14..=22).
const RING_SIZES: std::ops::RangeInclusive<u64> = 16_384..=4_194_304;
/// Longest spinning: one second.
const MAX_MICROS: u64 = 1_000_000;

impl Kind {
    /// Whether a TOML array may stand for the value.
    pub const fn is_list(self) -> bool {
        matches!(
            self,
            Kind::Ports | Kind::Addrs | Kind::Programs | Kind::Eids | Kind::Peers | Kind::Regions
        )
    }

    /// Brings `text` into the flat form; the empty form means "as if never said".
    ///
    /// # Errors
    /// What is wrong and what to write instead, to be put after the value's name.
    pub fn normalise(self, text: &str) -> Result<String, String> {
        if text.chars().any(char::is_control) {
            return Err(format!("{text:?} holds control characters; write it without them"));
        }
        let text = text.trim();
        if text.is_empty() {
            return Ok(String::new());
        }
        match self {
            Kind::Switch => switch(text),
            Kind::Dir => dir(text),
            Kind::Log => log(text),
            Kind::RingSize => ring_size(text),
            Kind::Micros => micros(text),
            Kind::Ports => list(text, ports),
            Kind::Addrs => list(text, network),
            Kind::Programs => list(text, program),
            Kind::Choice => choice(text),
            Kind::OneOf(words) => one_of(text, words),
            Kind::Eids => eids(text),
            Kind::OnOff => on_or_off(text),
            Kind::Peers => list(text, peer),
            Kind::Regions => regions(text),
            Kind::Profile => profiles::name(text),
        }
    }
}

fn switch(text: &str) -> Result<String, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok("1".to_owned()),
        "0" | "false" | "no" | "off" => Ok(String::new()),
        _ => Err(format!("{text:?} is neither yes nor no; write 1 or 0")),
    }
}

fn choice(text: &str) -> Result<String, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok("on".to_owned()),
        "0" | "false" | "no" | "off" => Ok("off".to_owned()),
        "auto" => Ok("auto".to_owned()),
        _ => Err(format!("{text:?} is none of auto, on and off; write one of them")),
    }
}

fn one_of(text: &str, words: [&str; 2]) -> Result<String, String> {
    let known = words.into_iter().find(|word| word.eq_ignore_ascii_case(text));
    let [first, second] = words;
    known
        .map(str::to_owned)
        .ok_or_else(|| format!("{text:?} is neither {first} nor {second}; write one of them"))
}

fn on_or_off(text: &str) -> Result<String, String> {
    let on = switch(text)?;
    Ok(if on.is_empty() { "off" } else { "on" }.to_owned())
}

/// One UEID, as the kernel and smcd-ueid(8) want it.
///
/// # Errors
/// What is wrong with it and what to write instead.
pub fn eid(text: &str) -> Result<String, String> {
    // As pnet ids: small letters are taken for capital ones.
    let text = text.to_ascii_uppercase();
    let text = text.as_str();
    let such = "write up to 32 of A-Z, 0-9, - and ., such as EXAMPLE-NET.1";
    match Eid::user(text) {
        _ if text.contains("..") => Err(format!("{text:?} has two dots in a row; {such}")),
        Ok(_) => Ok(text.trim_end().to_owned()),
        Err(EidError::Empty) => Err(format!("a UEID is not empty; {such}")),
        Err(EidError::TooLong { len }) => Err(format!("{text:?} has {len} characters; {such}")),
        Err(EidError::Character { at: 0, byte: b'-' | b'.' }) => {
            Err(format!("{text:?} does not begin with a letter or digit; {such}"))
        }
        Err(EidError::Character { .. }) => {
            Err(format!("{text:?} has characters that no UEID has; {such}"))
        }
    }
}

fn eids(text: &str) -> Result<String, String> {
    let flat = list(text, eid)?;
    let items: Vec<&str> = flat.split(',').collect();
    if items.len() > Eid::MAX_CONFIGURED {
        return Err(format!(
            "{} UEIDs are more than the {} there may be",
            items.len(),
            Eid::MAX_CONFIGURED
        ));
    }
    let twice = (1..items.len()).find(|i| items[..*i].contains(&items[*i]));
    match twice {
        Some(i) => Err(format!("{} is there twice; write it once", items[i])),
        None => Ok(flat),
    }
}

fn dir(text: &str) -> Result<String, String> {
    if !text.starts_with('/') {
        return Err(format!("{text:?} is not absolute; write a path such as /dev/shm/usmc-team"));
    }
    let trimmed = text.trim_end_matches('/');
    if trimmed.is_empty() {
        return Err("/ cannot be an ISM directory; name a directory of its own, \
                    such as /dev/shm/usmc-team"
            .to_owned());
    }
    if trimmed.len() > MAX_DIR {
        return Err(format!(
            "{text:?} has {} bytes and leaves no room for the names of UNIX sockets in it; \
             choose a path of at most {MAX_DIR} bytes",
            trimmed.len()
        ));
    }
    Ok(trimmed.to_owned())
}

fn regions(text: &str) -> Result<String, String> {
    let word = text.to_ascii_lowercase();
    if matches!(word.as_str(), "auto" | "none") {
        return Ok(word);
    }
    let flat = list(text, region)?;
    let items: Vec<&str> = flat.split(',').collect();
    if items.len() > MAX_REGIONS {
        return Err(format!(
            "{} regions are more than the {MAX_REGIONS} there may be; name those that programs need",
            items.len()
        ));
    }
    match (1..items.len()).find(|i| items[..*i].contains(&items[*i])) {
        Some(i) => Err(format!("{} is there twice; write it once", items[i])),
        None => Ok(flat),
    }
}

fn region(text: &str) -> Result<String, String> {
    if !text.starts_with('/') {
        return Err(format!(
            "{text:?} is no absolute path; write auto or none alone, or paths such as /dev/shm/usmc0"
        ));
    }
    if text.len() > MAX_REGION {
        return Err(format!(
            "{text:?} has {} bytes; choose a path of at most {MAX_REGION}",
            text.len()
        ));
    }
    Ok(text.to_owned())
}

fn log(text: &str) -> Result<String, String> {
    let (level, path) = match text.split_once(':') {
        Some((level, path)) => (level, Some(path)),
        None => (text, None),
    };
    let level = level.to_ascii_lowercase();
    if !matches!(level.as_str(), "error" | "warn" | "info" | "debug") {
        return Err(format!("{level:?} is not a level; write error, warn, info or debug"));
    }
    match path {
        None => Ok(level),
        Some(path) if path.starts_with('/') => Ok(format!("{level}:{path}")),
        Some(path) => Err(format!(
            "the file {path:?} is not absolute, and programs change their directory; \
             write {level}:/path/to/file"
        )),
    }
}

fn ring_size(text: &str) -> Result<String, String> {
    let bytes = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => text[..at].parse().ok().and_then(|n: u64| n.checked_mul(1 << 10)),
        Some((at, 'm' | 'M')) => text[..at].parse().ok().and_then(|n: u64| n.checked_mul(1 << 20)),
        _ => text.parse().ok(),
    };
    let limits = "a power of two from 16K to 4M";
    match bytes {
        None => Err(format!("{text:?} is not a size; write {limits}, such as 256K")),
        Some(n) if RING_SIZES.contains(&n) && n.is_power_of_two() => Ok(n.to_string()),
        Some(n) => {
            let (low, high) = (*RING_SIZES.start(), *RING_SIZES.end());
            let nearest = n.clamp(low, high).next_power_of_two();
            let (unit, div) = if nearest < 1 << 20 { ("K", 1 << 10) } else { ("M", 1 << 20) };
            Err(format!("{text} is not {limits}; write {}{unit}", nearest / div))
        }
    }
}

fn micros(text: &str) -> Result<String, String> {
    match text.parse::<u64>() {
        Ok(us) if us <= MAX_MICROS => Ok(us.to_string()),
        _ => Err(format!(
            "{text:?} is not a number of microseconds from 0 (never spin) to {MAX_MICROS}; \
             write one, such as 50"
        )),
    }
}

/// Brings each item of a comma list into its flat form.
fn list(text: &str, item: fn(&str) -> Result<String, String>) -> Result<String, String> {
    let items = text.split(',').map(str::trim).filter(|s| !s.is_empty());
    let items = items.map(item).collect::<Result<Vec<_>, _>>()?;
    if items.len() > MAX_RULES {
        return Err(format!(
            "{} rules are more than the {MAX_RULES} there is room for; \
             join neighbours into ranges, networks or patterns",
            items.len()
        ));
    }
    Ok(items.join(","))
}

fn ports(text: &str) -> Result<String, String> {
    let bad = || format!("{text:?} is neither a port nor a range; write 6379 or 8000-8999");
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let port = |s: &str| s.trim().parse::<u16>().map_err(|_| bad());
    let (low, high) = (port(low)?, port(high)?);
    match low.cmp(&high) {
        std::cmp::Ordering::Less => Ok(format!("{low}-{high}")),
        std::cmp::Ordering::Equal => Ok(low.to_string()),
        std::cmp::Ordering::Greater => {
            Err(format!("{text:?} is a range that ends before it starts; write {high}-{low}"))
        }
    }
}

fn network(text: &str) -> Result<String, String> {
    let (addr, len) = match text.split_once('/') {
        Some((addr, len)) => (addr, Some(len)),
        None => (text, None),
    };
    let Ok(addr) = addr.parse::<IpAddr>() else {
        return Err(format!("{text:?} is not an address or network; write 10.0.0.0/8 or ::1"));
    };
    let width = if addr.is_ipv4() { 32 } else { 128 };
    let len = match len.map(str::parse::<u32>) {
        None => width,
        Some(Ok(len)) if len <= width => len,
        Some(_) => {
            return Err(format!(
                "{text:?} has no prefix length from 0 to {width}; write {addr}/24"
            ));
        }
    };
    Ok(match addr {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - len).unwrap_or(0);
            format!("{}/{len}", Ipv4Addr::from_bits(v4.to_bits() & mask))
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - len).unwrap_or(0);
            let v6 = Ipv6Addr::from_bits(v6.to_bits() & mask);
            match v6.to_ipv4_mapped() {
                Some(v4) if len >= 96 => format!("{v4}/{}", len - 96),
                _ => format!("{v6}/{len}"),
            }
        }
    })
}

/// A network, or `NETWORK:PORT`; IPv6 in brackets where a port follows.
fn peer(text: &str) -> Result<String, String> {
    let port = |port: &str| {
        port.parse::<u16>().ok().filter(|&p| p > 0).ok_or_else(|| {
            format!("{text:?} has no port behind the colon; write 10.0.0.1:6379 or [fd00::1]:6379")
        })
    };
    if let Some((addr, rest)) = text.strip_prefix('[').and_then(|t| t.split_once(']')) {
        let net = network(addr)?;
        return match rest.strip_prefix(':') {
            Some(number) => Ok(format!("[{net}]:{}", port(number)?)),
            None if rest.is_empty() => Ok(net),
            None => Err(format!("{text:?} goes on behind the bracket; write [fd00::1]:6379")),
        };
    }
    match text.split_once(':') {
        Some((net, number)) if !number.contains(':') => {
            Ok(format!("{}:{}", network(net)?, port(number)?))
        }
        _ => network(text),
    }
}

fn program(text: &str) -> Result<String, String> {
    match text.rsplit_once('/') {
        None => Ok(text.to_owned()),
        Some((_, "")) => {
            Err(format!("{text:?} names a directory; write a program's file name, such as nginx"))
        }
        Some((_, name)) => {
            Err(format!("{text:?} has a directory; write the file name alone: {name}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_reach_their_flat_form() {
        for (kind, text, flat) in [
            (Kind::Switch, "Yes", "1"),
            (Kind::Choice, "On", "on"),
            (Kind::Choice, "0", "off"),
            (Kind::Choice, "auto", "auto"),
            (Kind::OneOf(["auto", "deny"]), "Deny", "deny"),
            (Kind::Switch, "off", ""),
            (Kind::Switch, "", ""),
            (Kind::Dir, "/dev/shm/x/", "/dev/shm/x"),
            (Kind::Regions, "Auto", "auto"),
            (Kind::Regions, "none", "none"),
            (Kind::Regions, "/dev/shm/a, /a:b/c", "/dev/shm/a,/a:b/c"),
            (Kind::Log, "WARN", "warn"),
            (Kind::Log, "debug:/tmp/a:b", "debug:/tmp/a:b"),
            (Kind::RingSize, "16384", "16384"),
            (Kind::RingSize, "256k", "262144"),
            (Kind::RingSize, "4M", "4194304"),
            (Kind::Micros, "0", "0"),
            (Kind::Micros, "1000000", "1000000"),
            (Kind::Ports, "80, 6000-7000,", "80,6000-7000"),
            (Kind::Ports, "9-9", "9"),
            (Kind::Addrs, "10.1.2.3", "10.1.2.3/32"),
            (Kind::Addrs, "10.1.2.3/8", "10.0.0.0/8"),
            (Kind::Addrs, "0.0.0.0/0", "0.0.0.0/0"),
            (Kind::Addrs, "::/0, FE80::1/10", "::/0,fe80::/10"),
            (Kind::Addrs, "::1", "::1/128"),
            (Kind::Addrs, "::ffff:10.0.0.9/104", "10.0.0.0/8"),
            (Kind::Peers, "10.1.2.3:80, fd00::/8", "10.1.2.3/32:80,fd00::/8"),
            (Kind::Peers, "[fd00::1]:80,[::1]", "[fd00::1/128]:80,::1/128"),
            (Kind::Programs, "redis-*, nginx", "redis-*,nginx"),
            (Kind::Eids, "a, B.1-c", "A,B.1-C"),
            (Kind::OnOff, "1", "on"),
            (Kind::OnOff, "No", "off"),
        ] {
            assert_eq!(kind.normalise(text).as_deref(), Ok(flat), "{kind:?} {text:?}");
        }
    }

    #[test]
    fn refusals_say_what_to_write() {
        for (kind, text, advice) in [
            (Kind::Switch, "maybe", "write 1 or 0"),
            (Kind::Choice, "maybe", "auto, on and off"),
            (Kind::OneOf(["auto", "deny"]), "off", "neither auto nor deny"),
            (Kind::Dir, "shm", "write a path such as"),
            (Kind::Dir, "//", "name a directory of its own"),
            (Kind::Regions, "usmc0", "write auto or none alone"),
            (Kind::Regions, "/a,auto", "write auto or none alone"),
            (Kind::Regions, "/a,/b,/c,/d,/e", "more than the 4"),
            (Kind::Regions, "/a,/b,/a", "write it once"),
            (Kind::Log, "trace", "write error, warn, info or debug"),
            (Kind::Log, "info:log", "write info:/path/to/file"),
            (Kind::RingSize, "300", "write 16K"),
            (Kind::RingSize, "200K", "write 256K"),
            (Kind::RingSize, "1G", "such as 256K"),
            (Kind::RingSize, "8M", "write 4M"),
            (Kind::RingSize, "99999999999999999999M", "such as 256K"),
            (Kind::RingSize, "18446744073709551615", "write 4M"),
            (Kind::RingSize, "K", "such as 256K"),
            (Kind::Micros, "-1", "such as 50"),
            (Kind::Micros, "1000001", "such as 50"),
            (Kind::Ports, "http", "write 6379 or 8000-8999"),
            (Kind::Ports, "65536", "write 6379"),
            (Kind::Ports, "9-8", "write 8-9"),
            (Kind::Addrs, "localhost", "write 10.0.0.0/8 or ::1"),
            (Kind::Addrs, "10.0.0.0/33", "from 0 to 32"),
            (Kind::Peers, "10.0.0.1:http", "write 10.0.0.1:6379"),
            (Kind::Peers, "[::1]80", "write [fd00::1]:6379"),
            (Kind::Programs, "/usr/bin/redis-server", "alone: redis-server"),
            (Kind::Programs, "bin/", "such as nginx"),
            (Kind::Programs, "a\nb", "without them"),
        ] {
            let refusal = kind.normalise(text).expect_err(text);
            assert!(refusal.contains(advice), "{kind:?} {text:?}: {refusal}");
        }
        let refusal = Kind::Dir.normalise(&format!("/{}", "x".repeat(96))).expect_err("97 bytes");
        assert!(refusal.contains("at most 96 bytes"), "{refusal}");
        let many = vec!["1"; 33].join(",");
        assert!(Kind::Ports.normalise(&many).expect_err("33 rules").contains("join neighbours"));
    }

    #[test]
    fn a_flat_form_is_its_own_flat_form() {
        for (kind, flat) in [
            (Kind::Switch, "1"),
            (Kind::Addrs, "fe80::/10,10.0.0.0/8"),
            (Kind::Ports, "1,2-3"),
            (Kind::RingSize, "65536"),
        ] {
            assert_eq!(kind.normalise(flat).as_deref(), Ok(flat));
        }
    }
}
