//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use smc_proto::handshake::MIN_CONNS;
use smc_proto::ids::{Eid, MtuCode};
use usmc_agent::adapter::{Queues, Settings};
use usmc_agent::pnet::Pnet;
use usmc_agent::rest::Spin;
use usmc_shm::layout::rings_word;

pub(crate) const HELP: &str = "\
The owner of a host's RDMA devices, for programs under `usmc run`.

Usage: usmc-agent --socket PATH [OPTION]...

  --socket PATH         where programs find it
  --socket-mode MODE    who may hand connections over, in octal [600]: 666 is all users
  --device NAME         an RDMA device to use, may be repeated [all]
  --pnet ID=NAME        a network device that is in the physical network ID, repeated
  --pnet-device ID=NAME an RDMA device that is in it, repeated
  --ueid NAME           a user-defined EID, may be repeated
  --spin TIME           how long it looks for work before it sleeps: never, always,
                        or microseconds [50]
  --ring-size BYTES     of each buffer: a power of two, 16K to 4M [256K]
  --sndbuf BYTES        of send buffers alone, in the same steps
  --rcvbuf BYTES        of receive buffers (RMBs) alone, in the same steps
  --ctrl-buffer-count N messages under way on a link, 4 to 512 [16]; three times as many
                        receives are posted
  --mtu BYTES           largest path MTU: 256, 512, 1024, 2048 or 4096 [the port's]
  --port-add-delay SECS before a port is used that has come up, to 3600 [0]
  --max-links N         links of a group, 1 or 2 [1]
  --max-conns N         connections of a group, 16 to 255 [255]
  --testlink-time SECS  after which an idle link is tested, 0 never [30]
  --verbose             tell what happens
  --help

A socket that systemd has made for it comes before --socket and --socket-mode.
It says `ready` once it listens. SIGTERM ends it when its last connection is over;
a second SIGTERM aborts what is left.
";

/// log2 of the smallest and the largest ring.
const SHIFTS: std::ops::RangeInclusive<u32> = 14..=22;

#[derive(Debug)]
pub(crate) struct Options {
    /// Empty: none was named.
    pub(crate) socket: PathBuf,
    /// Permission bits.
    pub(crate) mode: u32,
    pub(crate) devices: Vec<String>,
    pub(crate) pnet: Pnet,
    pub(crate) ueids: Vec<Eid>,
    pub(crate) spin: Spin,
    /// log2 of the bytes of a connection's buffers.
    shift: u32,
    /// The same of its send buffer, and of its RMB, where that was said.
    sndbuf: Option<u32>,
    rcvbuf: Option<u32>,
    /// What devices are told.
    pub(crate) settings: Settings,
    pub(crate) port_delay: Duration,
    pub(crate) max_links: u8,
    pub(crate) max_conns: u8,
    pub(crate) test_interval: Duration,
    pub(crate) is_verbose: bool,
}

impl Options {
    /// The rings of a connection: of a slot the agent, which is its client, writes the RMB, and the application the send buffer.
    pub(crate) fn rings(&self) -> u32 {
        rings_word([self.rcvbuf, self.sndbuf].map(|of| of.unwrap_or(self.shift)))
    }
}

/// What the command line asks for. `None`: its help.
///
/// # Errors
/// What is wrong, and what would be right.
pub(crate) fn parse(words: impl Iterator<Item = OsString>) -> Result<Option<Options>, String> {
    let mut options = Options {
        socket: PathBuf::new(),
        mode: 0o600,
        devices: Vec::new(),
        pnet: Pnet::default(),
        ueids: Vec::new(),
        spin: Spin::default(),
        shift: 18,
        sndbuf: None,
        rcvbuf: None,
        settings: Settings::default(),
        port_delay: Duration::ZERO,
        max_links: 1,
        max_conns: 255,
        test_interval: Duration::from_secs(30),
        is_verbose: false,
    };
    let mut words = words.peekable();
    while let Some(word) = words.next() {
        let name = word.to_string_lossy().into_owned();
        // --name=value as well as --name value.
        let (name, joined) = match name.split_once('=') {
            Some((name, value)) => (name.to_string(), Some(OsString::from(value))),
            None => (name, None),
        };
        match name.as_str() {
            "--help" | "-h" => return Ok(None),
            "--verbose" | "-v" => {
                options.is_verbose = true;
                continue;
            }
            _ => {}
        }
        let mut value =
            || joined.clone().or_else(|| words.next()).ok_or(format!("{name} takes a value"));
        let mut text =
            || value()?.into_string().map_err(|_| format!("the value of {name} is no UTF-8 text"));
        match name.as_str() {
            "--socket" => options.socket = value()?.into(),
            "--socket-mode" => {
                let mode = u32::from_str_radix(&text()?, 8).ok().filter(|mode| *mode <= 0o777);
                options.mode = mode.ok_or("--socket-mode takes octal digits such as 660")?;
            }
            "--device" => options.devices.push(text()?),
            "--pnet" | "--pnet-device" => {
                let said = text()?;
                let wrong = || format!("{name} takes ID=NAME, such as NET1=eth0, not {said}");
                let (id, device) = said.split_once('=').ok_or_else(wrong)?;
                match name.as_str() {
                    "--pnet" => options.pnet.add_interface(id, device),
                    _ => options.pnet.add_device(id, device),
                }
            }
            "--ueid" => {
                let eid = Eid::user(&text()?);
                options.ueids.push(eid.map_err(|_| {
                    "--ueid takes up to 32 letters, digits, and . - of an EID".to_string()
                })?);
            }
            "--spin" => options.spin = spin(&text()?)?,
            "--ring-size" => options.shift = shift(&name, &text()?)?,
            "--sndbuf" => options.sndbuf = Some(shift(&name, &text()?)?),
            "--rcvbuf" => options.rcvbuf = Some(shift(&name, &text()?)?),
            "--ctrl-buffer-count" => {
                let (least, most) = (*Queues::LIMITS.start(), *Queues::LIMITS.end());
                let count = number(&name, &text()?, least.into(), most.into())?;
                options.settings.queues = Queues::new(count as u16).unwrap_or_default();
            }
            "--mtu" => options.settings.mtu = mtu(&text()?)?,
            "--port-add-delay" => {
                options.port_delay = Duration::from_secs(number(&name, &text()?, 0, 3600)?);
            }
            "--max-links" => options.max_links = number(&name, &text()?, 1, 2)? as u8,
            "--max-conns" => {
                // A peer declines fewer.
                options.max_conns = number(&name, &text()?, MIN_CONNS.into(), 255)? as u8;
            }
            "--testlink-time" => {
                let seconds = number(&name, &text()?, 0, i32::MAX as u64)?;
                // As the kernel has it, 0 is never: in 136 years.
                let seconds = if seconds == 0 { u32::MAX.into() } else { seconds };
                options.test_interval = Duration::from_secs(seconds);
            }
            _ => return Err(format!("{name} is no option: --help lists them")),
        }
    }
    Ok(Some(options))
}

fn number(name: &str, text: &str, least: u64, most: u64) -> Result<u64, String> {
    let fits = |number: &u64| (least..=most).contains(number);
    let number = text.parse().ok().filter(fits);
    number.ok_or(format!("{name} takes a number from {least} to {most}, not {text}"))
}

fn spin(text: &str) -> Result<Spin, String> {
    match text {
        "never" => Ok(Spin::For(Duration::ZERO)),
        "always" => Ok(Spin::Always),
        _ => {
            let time = text.parse().map(Duration::from_micros);
            let wrong = format!("--spin takes never, always, or microseconds, not {text}");
            time.map(Spin::For).map_err(|_| wrong)
        }
    }
}

/// A path MTU in bytes.
fn mtu(text: &str) -> Result<MtuCode, String> {
    let bytes = text.parse().ok();
    let code = (1..=5).filter_map(MtuCode::from_code).find(|code| code.bytes() == bytes);
    code.filter(|_| bytes.is_some())
        .ok_or(format!("--mtu takes 256, 512, 1024, 2048 or 4096, not {text}"))
}

/// log2 of a ring's size: bytes, or with K or M.
fn shift(name: &str, text: &str) -> Result<u32, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (text.get(..text.len() - 1), 10),
        Some(b'M' | b'm') => (text.get(..text.len() - 1), 20),
        _ => (Some(text), 0),
    };
    let bytes = digits.and_then(|digits| digits.parse::<u64>().ok());
    let bytes = bytes.and_then(|bytes| bytes.checked_mul(1 << unit));
    let shift = bytes.filter(|bytes| bytes.is_power_of_two()).map(u64::trailing_zeros);
    let wrong = format!("{name} takes a power of two from 16K to 4M, not {text}");
    shift.filter(|shift| SHIFTS.contains(shift)).ok_or(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Option<Options>, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn all_options_are_understood() {
        let line = "--socket /run/a --device one --device=two --ueid AGENT --spin never \
                    --ring-size 64K --max-links 2 --max-conns 16 --testlink-time 60 -v \
                    --pnet NET=eth0 --pnet-device NET=two";
        let options = parsed(line).expect("options").expect("no help");
        assert_eq!((options.socket.to_str(), options.shift), (Some("/run/a"), 16));
        assert_eq!((options.devices.join(" "), options.ueids.len()), ("one two".into(), 1));
        assert_eq!((options.max_links, options.max_conns, options.is_verbose), (2, 16, true));
        assert_eq!(options.spin, Spin::For(Duration::ZERO));
        let pnet = &options.pnet;
        assert_eq!((pnet.of_interface("eth0"), pnet.of_device("two")), (Some("NET"), Some("NET")));
        assert_eq!((pnet.of_interface("two"), pnet.of_device("eth0")), (None, None));
        assert_eq!(options.test_interval, Duration::from_secs(60));
        let options = parsed("--socket x --spin 7 --ring-size 4M").expect("options");
        let options = options.expect("no help");
        assert_eq!((options.spin, options.rings()), (Spin::For(Duration::from_micros(7)), 22));
        let line = "--socket x --sndbuf 64K --ring-size 1M --ctrl-buffer-count 8 --mtu 2048 \
                    --port-add-delay 30 --testlink-time 0";
        let options = parsed(line).expect("options").expect("no help");
        assert_eq!(options.rings(), rings_word([20, 16]));
        let Settings { queues, mtu } = options.settings;
        assert_eq!((queues.sends(), queues.receives(), mtu.bytes()), (8, 24, Some(2048)));
        assert_eq!(options.port_delay, Duration::from_secs(30));
        assert!(options.test_interval > Duration::from_secs(1 << 31));
        let options = parsed("--socket x --rcvbuf 16K").expect("options").expect("no help");
        assert_eq!(options.rings(), rings_word([14, 18]));
        assert!(parsed("--help").expect("help").is_none());
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (line, about) in [
            ("--socket", "value"),
            ("--socket x --spin often", "often"),
            ("--socket x --ring-size 65000", "power of two"),
            ("--socket x --ring-size 8K", "16K"),
            ("--socket x --sndbuf 8M", "--sndbuf takes"),
            ("--socket x --rcvbuf 1", "--rcvbuf takes"),
            ("--socket x --ctrl-buffer-count 3", "from 4 to 512"),
            ("--socket x --ctrl-buffer-count 513", "from 4 to 512"),
            ("--socket x --mtu 1500", "1024, 2048"),
            ("--socket x --mtu 0", "1024, 2048"),
            ("--socket x --port-add-delay 3601", "3600"),
            ("--socket x --max-conns 256", "255"),
            ("--socket x --max-conns 15", "16 to 255"),
            ("--socket x --max-links 0", "1 to 2"),
            ("--socket x --ueid !", "EID"),
            ("--socket x --pnet eth0", "NET1=eth0"),
            ("--socket x --port 1", "--port"),
        ] {
            let said = parsed(line).expect_err(line);
            assert!(said.contains(about), "{line}: {said}");
        }
    }
}
