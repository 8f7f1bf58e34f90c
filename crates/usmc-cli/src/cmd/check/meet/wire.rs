//! What both ends say to each other: lines of JSON, of a bounded length, each within a bounded time.

use std::io::{self, ErrorKind, Read, Write};
use std::mem;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::facts::Facts;
use super::trial::End;

/// The version of what is said here. Another one is not understood.
pub const PROTOCOL: u32 = 1;
/// Bytes of a line at most.
const LINE: usize = 16 << 10;
/// Bytes of what a stranger has said that are shown.
const SHOWN: usize = 80;

/// The first line of whoever connects.
#[derive(Serialize, Deserialize, Debug)]
pub struct Hello {
    /// [`PROTOCOL`].
    pub usmc_check: u32,
    /// What for.
    pub wants: Wants,
}

/// What a connection is for.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Wants {
    /// A check.
    Check(Box<Side>),
    /// The connection that is tried, of the check that was given this token.
    Trial(String),
}

/// An end of a check.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub struct Side {
    /// What it is.
    pub facts: Facts,
    /// Its own address, as it sees it.
    pub local: SocketAddr,
    /// The other end's, as it sees it.
    pub peer: SocketAddr,
}

/// The answer to [`Wants::Check`].
#[derive(Serialize, Deserialize, Debug)]
pub struct Welcome {
    /// [`PROTOCOL`].
    pub usmc_check: u32,
    /// Who serves.
    pub side: Side,
    /// For the connection that is tried.
    pub token: String,
}

/// What goes on by the first connection, each answered in turn.
#[derive(Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Answered by the same, to measure.
    Ping(String),
    /// The end of it; answered by [`Answer`].
    Done(Box<Outcome>),
}

/// What the connecting end has seen.
#[derive(Clone, Serialize, Deserialize, Debug)]
pub struct Outcome {
    /// Its end of the connection that was tried.
    pub end: Option<End>,
    /// A round trip by TCP, in nanoseconds: the median.
    pub tcp_ns: Option<u64>,
    /// A round trip by the connection that was tried.
    pub ns: Option<u64>,
    /// Bytes that came back as they were sent.
    pub bytes: u64,
    /// Why not, if they did not.
    pub problem: Option<String>,
}

/// What the serving end has seen.
#[derive(Serialize, Deserialize, Debug)]
pub struct Answer {
    /// Its end of the connection that was tried.
    pub end: Option<End>,
}

/// Why the other end was not understood.
#[derive(Debug)]
pub enum Trouble {
    /// It said nothing in time.
    Silent,
    /// It went away.
    Ended,
    /// It said something else.
    Foreign(String),
    /// The connection failed.
    Failed(io::Error),
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Silent => f.write_str("it says nothing"),
            Trouble::Ended => f.write_str("it closes the connection"),
            Trouble::Foreign(said) => write!(f, "it says \"{said}\""),
            Trouble::Failed(e) => write!(f, "{e}"),
        }
    }
}

impl std::error::Error for Trouble {}

impl From<io::Error> for Trouble {
    fn from(e: io::Error) -> Trouble {
        match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Trouble::Silent,
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::UnexpectedEof => {
                Trouble::Ended
            }
            _ => Trouble::Failed(e),
        }
    }
}

/// A connection to the other end.
pub struct Talk {
    /// The socket.
    pub stream: TcpStream,
    /// Received, and not taken.
    unread: Vec<u8>,
    /// The socket's limits of time, for receiving and sending.
    limits: [Duration; 2],
}

/// Limits of time that differ by less are not set anew, which would cost two calls for each message.
const SLACK: Duration = Duration::from_millis(250);

impl Talk {
    /// By this connection.
    ///
    /// # Errors
    /// When it is gone.
    pub fn new(stream: TcpStream) -> io::Result<Talk> {
        stream.set_nodelay(true)?;
        Ok(Talk { stream, unread: Vec::new(), limits: [Duration::MAX; 2] })
    }

    /// One end, and the other end's socket.
    #[cfg(test)]
    pub fn pair() -> (Talk, TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let one =
            TcpStream::connect(listener.local_addr().expect("its name")).expect("a connection");
        let (other, _) = listener.accept().expect("it");
        (Talk::new(one).expect("a socket"), other)
    }

    /// Says a line.
    ///
    /// # Errors
    /// It was not taken in time.
    pub fn say(&mut self, message: &impl Serialize, deadline: Instant) -> Result<(), Trouble> {
        let mut line = serde_json::to_vec(message).map_err(io::Error::from)?;
        line.push(b'\n');
        self.send(&line, deadline)
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// They were not taken in time.
    pub fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), Trouble> {
        // A part that was taken gives the rest no more time.
        while !bytes.is_empty() {
            let left = left(deadline)?;
            if self.limits[1].abs_diff(left) > SLACK {
                self.stream.set_write_timeout(Some(left))?;
                self.limits[1] = left;
            }
            match self.stream.write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// Hears a line.
    ///
    /// # Errors
    /// None came in time, or another one.
    pub fn hear<T: DeserializeOwned>(&mut self, deadline: Instant) -> Result<T, Trouble> {
        let line = self.line(deadline)?;
        serde_json::from_slice(&line).map_err(|_| Trouble::Foreign(shown_bytes(&line)))
    }

    fn line(&mut self, deadline: Instant) -> Result<Vec<u8>, Trouble> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let mut line: Vec<u8> = self.unread.drain(..=end).collect();
                line.pop();
                return Ok(line);
            }
            if self.unread.len() >= LINE {
                return Err(Trouble::Foreign(shown_bytes(&mem::take(&mut self.unread))));
            }
            match self.more(deadline) {
                Ok(()) => {}
                // Who speaks first in another protocol waits then.
                Err(Trouble::Silent | Trouble::Ended) if !self.unread.is_empty() => {
                    return Err(Trouble::Foreign(shown_bytes(&mem::take(&mut self.unread))));
                }
                Err(trouble) => return Err(trouble),
            }
        }
    }

    /// Receives so many bytes.
    ///
    /// # Errors
    /// They did not come in time.
    pub fn exactly(&mut self, bytes: &mut [u8], deadline: Instant) -> Result<(), Trouble> {
        let mut done = 0;
        while done < bytes.len() {
            if self.unread.is_empty() {
                self.more(deadline)?;
            }
            let n = self.unread.len().min(bytes.len() - done);
            bytes[done..done + n].copy_from_slice(&self.unread[..n]);
            self.unread.drain(..n);
            done += n;
        }
        Ok(())
    }

    fn more(&mut self, deadline: Instant) -> Result<(), Trouble> {
        let mut bytes = [0; 4096];
        let left = left(deadline)?;
        if self.limits[0].abs_diff(left) > SLACK {
            self.stream.set_read_timeout(Some(left))?;
            self.limits[0] = left;
        }
        match self.stream.read(&mut bytes) {
            Ok(0) => Err(Trouble::Ended),
            Ok(n) => {
                self.unread.extend_from_slice(&bytes[..n]);
                Ok(())
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// What is left until then, and not nothing, which would be no limit.
fn left(deadline: Instant) -> Result<Duration, Trouble> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Trouble::Silent) } else { Ok(left) }
}

/// What another machine says, harmless to a terminal.
pub fn shown(text: &str) -> String {
    text.chars().take(SHOWN * 2).flat_map(char::escape_default).collect()
}

fn shown_bytes(bytes: &[u8]) -> String {
    let more = if bytes.len() > SHOWN { "…" } else { "" };
    format!("{}{more}", bytes[..bytes.len().min(SHOWN)].escape_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn lines_are_cut_and_strangers_quoted() {
        let (mut talk, mut other) = Talk::pair();
        other.write_all(b"\"one\"\n\"tw").expect("room");
        assert_eq!(talk.hear::<String>(soon()).expect("a line"), "one");
        other.write_all(b"o\"\nab").expect("room");
        assert_eq!(talk.hear::<String>(soon()).expect("a line"), "two");
        let mut bytes = [0; 2];
        talk.exactly(&mut bytes, soon()).expect("two bytes");
        assert_eq!(&bytes, b"ab");
        other.write_all(b"-ERR \x1b[2Jwhat\r\n").expect("room");
        let said = talk.hear::<Welcome>(soon()).expect_err("another protocol");
        assert_eq!(said.to_string(), "it says \"-ERR \\x1b[2Jwhat\\r\"");
        other.write_all(b"220 mail").expect("room");
        drop(other);
        assert_eq!(
            talk.hear::<Welcome>(soon()).expect_err("half a line").to_string(),
            "it says \"220 mail\""
        );
        assert!(matches!(talk.hear::<Welcome>(soon()), Err(Trouble::Ended)));
    }

    #[test]
    fn who_says_nothing_or_too_much_is_not_waited_for() {
        let (mut talk, mut other) = Talk::pair();
        let begun = Instant::now();
        let silent = talk.hear::<Welcome>(begun + Duration::from_millis(50));
        assert!(matches!(silent, Err(Trouble::Silent)) && begun.elapsed() < Duration::from_secs(4));
        let writer = thread::spawn(move || while other.write_all(&[b'['; 4096]).is_ok() {});
        let said = talk.hear::<Welcome>(soon()).expect_err("a line without an end").to_string();
        assert!(said.starts_with("it says \"[[[") && said.len() < 2 * SHOWN, "{said}");
        drop(talk);
        writer.join().expect("the writer");
    }

    #[test]
    fn who_takes_little_at_a_time_is_not_waited_for() {
        let (mut talk, mut other) = Talk::pair();
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while other.read(&mut bytes).is_ok_and(|n| n > 0) {
                thread::park_timeout(Duration::from_millis(5));
            }
        });
        let begun = Instant::now();
        let sent = talk.send(&vec![0; 32 << 20], begun + Duration::from_millis(300));
        assert!(matches!(sent, Err(Trouble::Silent)) && begun.elapsed() < Duration::from_secs(5));
        drop(talk);
        reader.thread().unpark();
        reader.join().expect("the reader");
    }

    #[test]
    fn what_is_deep_or_wrong_is_refused() {
        let (mut talk, mut other) = Talk::pair();
        for line in [
            "[".repeat(9000),
            "{\"usmc_check\":-1}".to_owned(),
            "null".to_owned(),
            String::new(),
            "{\"wants\":{\"trial\":7}}".to_owned(),
        ] {
            other.write_all(format!("{line}\n").as_bytes()).expect("room");
            assert!(matches!(talk.hear::<Hello>(soon()), Err(Trouble::Foreign(_))), "{line}");
        }
    }
}
