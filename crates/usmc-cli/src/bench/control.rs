//! What `usmc bench --vm`, or `--rdma`, and `usmc bench --serve` say to each other: a line of JSON there and one back, over a TCP
//! connection of its own. Nothing is said while a run is on.
//!
//! A request names a case of a fixed list and numbers within bounds: no program, no path, no text that is used otherwise.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::agents::Work;
use super::machine::Machine;
use super::mode::Mode;
use super::proof::Look;
use super::record::Missed;
use super::sweep::Setting;

/// The version of these messages.
pub const FORMAT: u32 = 1;
/// The port that both take if nothing else is said.
pub const PORT: u16 = 18_500;
/// The longest request.
pub const REQUEST_MOST: usize = 1024;
/// The longest reply: a greeting, which names all cases.
pub const REPLY_MOST: usize = 64 << 10;
/// Length of a run, in seconds.
pub const SECONDS: std::ops::RangeInclusive<f64> = 0.01..=3600.0;
/// What is said of a line that is no message, first.
pub const NO_MESSAGE: &str = "this is no message";
/// A peer that reads nothing for so long is given up.
const WRITE_LIMIT: Duration = Duration::from_secs(5);

/// What the client asks for.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// The server of a case; one that runs is ended first.
    Start(Start),
    /// What its connections are, and its CPU time.
    Look,
    /// What the agents of its host have done so far. Versions before `--rdma` do not know the word.
    Agents,
    /// Its end.
    Stop,
}

/// One run, as the server has to know it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// The case's name.
    pub case: String,
    /// What carries its bytes.
    pub mode: Mode,
    /// What the library is told, of a sweep.
    pub setting: Option<Tuning>,
    /// Its length.
    pub seconds: f64,
}

/// A setting of the library that a client may choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    /// Which.
    pub knob: Knob,
    /// Its value; nothing: as the library has it by default.
    pub value: Option<u64>,
}

/// Those settings that are numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knob {
    /// The longest spin.
    BusyPollUs,
    /// Bytes of a ring.
    RingSize,
}

/// What the server answers; and what it says when a client comes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Reply {
    /// To a client that has come.
    Greeting(Box<Greeting>),
    /// The server of the case listens.
    Up(Up),
    /// What was asked for.
    Seen(Box<Sight>),
    /// What was asked for.
    Agents(Box<Work>),
    /// Nothing runs any more.
    Stopped,
    /// It did not work.
    Failed(String),
}

/// How its client reaches a server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Up {
    /// Its port.
    pub port: u16,
    /// The password of a server that others in the network could ask for more than a load.
    pub password: String,
}

/// The serving machine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Greeting {
    /// [`FORMAT`].
    pub format: u32,
    /// The version of uSMC.
    pub usmc: String,
    /// Where.
    pub machine: Machine,
    /// Cases that cannot be served.
    pub obstacles: Vec<Missed>,
}

/// What the server sees of a run.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sight {
    /// Its connections now.
    pub now: Look,
    /// What showed most since the run began.
    pub best: Look,
    /// CPU seconds of the server so far.
    pub cpu: f64,
}

impl Knob {
    const ALL: [Knob; 2] = [Knob::BusyPollUs, Knob::RingSize];

    fn variable(self) -> &'static str {
        match self {
            Knob::BusyPollUs => "USMC_BUSY_POLL_US",
            Knob::RingSize => "USMC_RING_SIZE",
        }
    }

    fn range(self) -> std::ops::RangeInclusive<u64> {
        match self {
            Knob::BusyPollUs => 0..=10_000_000,
            Knob::RingSize => 16 << 10..=4 << 20,
        }
    }
}

impl Tuning {
    /// As both ends can be told of it.
    ///
    /// # Errors
    /// When the server would not take it.
    pub fn new(setting: &Setting) -> Result<Tuning> {
        let knob = Knob::ALL.into_iter().find(|knob| knob.variable() == setting.name);
        let Some(knob) = knob else {
            bail!(
                "a server in another machine is not told {}, only USMC_BUSY_POLL_US and USMC_RING_SIZE",
                setting.name
            )
        };
        let value = setting.value.as_ref().map(|value| value.parse()).transpose();
        let value = value.with_context(|| format!("{} has to be a number", setting.name))?;
        let tuning = Tuning { knob, value };
        tuning.setting()?;
        Ok(tuning)
    }

    /// As the library is told.
    ///
    /// # Errors
    /// When the number is out of bounds.
    pub fn setting(self) -> Result<Setting> {
        let (name, range) = (self.knob.variable(), self.knob.range());
        if self.value.is_some_and(|value| !range.contains(&value)) {
            bail!("{name} is not between {} and {}", range.start(), range.end());
        }
        Ok(Setting { name: name.to_owned(), value: self.value.map(|value| value.to_string()) })
    }
}

/// One end of the connection.
pub struct Lines {
    stream: TcpStream,
    rest: Vec<u8>,
    most: usize,
}

impl Lines {
    /// Takes a connection whose other end says lines of so many bytes at most.
    ///
    /// # Errors
    /// As setsockopt(2).
    pub fn new(stream: TcpStream, most: usize) -> Result<Lines> {
        stream.set_nodelay(true).context("TCP_NODELAY")?;
        stream.set_write_timeout(Some(WRITE_LIMIT)).context("SO_SNDTIMEO")?;
        Ok(Lines { stream, rest: Vec::new(), most })
    }

    /// Says a message.
    ///
    /// # Errors
    /// When the other end is gone, or does not read.
    pub fn say(&mut self, message: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(message).context("JSON")? + "\n";
        self.stream.write_all(text.as_bytes()).context("the other end does not listen")
    }

    /// Hears a message, if one comes before the end; nothing: the other end has closed. `meanwhile` is called every `tick`.
    ///
    /// # Errors
    /// When something else comes than a message, or nothing in time; those of `meanwhile`.
    pub fn hear<T: DeserializeOwned>(
        &mut self,
        until: Instant,
        tick: Duration,
        meanwhile: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<T>> {
        let tick = Timespec::try_from(tick).context("a time")?;
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return parse(&line).map(Some);
            }
            if self.rest.len() > self.most {
                bail!("the other end says a line of more than {} bytes", self.most);
            }
            meanwhile()?;
            if Instant::now() > until {
                bail!("the other end says nothing");
            }
            // Acknowledged at once: no frame of this connection is on the wire later, when frames are counted.
            let _ = rustix::net::sockopt::set_tcp_quickack(&self.stream, true);
            match poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], Some(&tick)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                other => other.context("poll")?,
            };
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(n) => self.rest.extend(&bytes[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context("the other end is gone"),
            }
        }
    }
}

fn parse<T: DeserializeOwned>(line: &[u8]) -> Result<T> {
    let shown = || String::from_utf8_lossy(&line[..line.len().min(80)]).trim_end().to_owned();
    serde_json::from_slice(line).with_context(|| format!("{NO_MESSAGE}: {:?}", shown()))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn start(seconds: f64) -> Request {
        let setting = Some(Tuning { knob: Knob::BusyPollUs, value: Some(7) });
        Request::Start(Start { case: "redis/c1".to_owned(), mode: Mode::Usmc, setting, seconds })
    }

    #[test]
    fn messages_are_heard_as_they_were_said() {
        for request in [start(0.2), Request::Look, Request::Agents, Request::Stop] {
            let text = serde_json::to_string(&request).expect("JSON");
            assert!(text.len() < REQUEST_MOST && !text.contains('\n'));
            assert_eq!(parse::<Request>(text.as_bytes()).expect("a request"), request);
        }
        let text = r#"{"start":{"case":"redis/c1","mode":"usmc","setting":{"knob":"busy_poll_us","value":7},"seconds":0.2}}"#;
        assert_eq!(parse::<Request>(text.as_bytes()).expect("a request"), start(0.2));
    }

    #[test]
    fn what_is_no_request_is_none() {
        for text in [
            "",
            "\n",
            "GET / HTTP/1.1\r",
            "null",
            "[]",
            "\"run\"",
            "{\"look\":1}",
            "{\"agents\":\"/etc\"}",
            r#"{"start":{}}"#,
            r#"{"start":{"case":"ipc","mode":"usmc","setting":null,"seconds":1,"command":"sh"}}"#,
            r#"{"start":{"case":["sh"],"mode":"usmc","setting":null,"seconds":1}}"#,
            r#"{"start":{"case":"ipc","mode":"rdma","setting":null,"seconds":1}}"#,
            r#"{"start":{"case":"ipc","mode":"usmc","setting":{"knob":"log","value":1},"seconds":1}}"#,
            r#"{"start":{"case":"ipc","mode":"usmc","setting":{"knob":"ring_size","value":-1},"seconds":1}}"#,
            r#"{"start":{"case":"ipc","mode":"usmc","setting":null,"seconds":1e999}}"#,
            &"[".repeat(100_000),
        ] {
            assert!(parse::<Request>(text.as_bytes()).is_err(), "{text:.80}");
        }
        let bytes: Vec<u8> = (0..=255).collect();
        let problem = parse::<Request>(&bytes).expect_err("no request");
        assert!(problem.to_string().starts_with(NO_MESSAGE), "{problem}");
    }

    #[test]
    fn settings_are_numbers_within_bounds() {
        let told = |name: &str, value: Option<&str>| {
            let (name, value) = (name.to_owned(), value.map(str::to_owned));
            Tuning::new(&Setting { name, value })
        };
        for (name, value, fits) in [
            ("USMC_BUSY_POLL_US", Some("0"), true),
            ("USMC_BUSY_POLL_US", Some("1000000"), true),
            ("USMC_BUSY_POLL_US", None, true),
            ("USMC_BUSY_POLL_US", Some("10000001"), false),
            ("USMC_BUSY_POLL_US", Some("-1"), false),
            ("USMC_RING_SIZE", Some("65536"), true),
            ("USMC_RING_SIZE", Some("1"), false),
            ("USMC_LOG", Some("/etc/passwd"), false),
        ] {
            assert_eq!(told(name, value).is_ok(), fits, "{name} {value:?}");
        }
        let there_and_back = told("USMC_RING_SIZE", Some("65536")).and_then(Tuning::setting);
        assert_eq!(there_and_back.expect("a setting").to_string(), "ring_size=64KB");
    }

    #[test]
    fn a_line_is_bounded_in_length_and_time() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let mut talker = TcpStream::connect(listener.local_addr().expect("it")).expect("a way");
        let (socket, _) = listener.accept().expect("it");
        let mut lines = Lines::new(socket, 64).expect("a socket");
        let tick = Duration::from_millis(1);
        let soon = || Instant::now() + Duration::from_secs(20);
        talker.write_all(b"\"look\"\n\"stop\"\n").expect("room");
        for expected in [Request::Look, Request::Stop] {
            let heard = lines.hear::<Request>(soon(), tick, &mut || Ok(())).expect("a line");
            assert_eq!(heard, Some(expected));
        }
        let late = lines.hear::<Request>(Instant::now(), tick, &mut || Ok(()));
        assert_eq!(late.expect_err("nothing came").to_string(), "the other end says nothing");
        let ended = lines.hear::<Request>(soon(), tick, &mut || bail!("asked to end"));
        assert_eq!(ended.expect_err("meanwhile").to_string(), "asked to end");
        let writer = thread::spawn(move || talker.write_all(&[b'x'; 100]));
        let long = lines.hear::<Request>(soon(), tick, &mut || Ok(())).expect_err("too long");
        assert!(long.to_string().contains("more than 64 bytes"), "{long}");
        writer.join().expect("a thread").expect("room");
        lines.rest.clear();
        let closed = lines.hear::<Request>(soon(), tick, &mut || Ok(())).expect("an end");
        assert_eq!(closed, None);
    }
}
