//! What `usmc check` runs under the library: two ends of a connection. Hidden from users.

use std::env;
use std::ffi::c_int;
use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use super::check::meet;

/// Round trips before the client says that it is done.
const ROUNDS: usize = 200;
/// Bytes of one message.
const MESSAGE: usize = 64;

/// How long a connection may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long one look at it takes.
const LOOK: Duration = Duration::from_millis(20);

/// Plays a part, if the command line is `usmc probe PART`, which is not for users and so not for clap:
///
/// - `alone` succeeds if it runs at all;
/// - `loaded` succeeds if the library is loaded;
/// - `serve` prints a port and sends back what one client sends;
/// - `connect PORT` talks to it, prints a line and waits for the end of its standard input;
/// - `host PLAN` serves checks, and `trial PLAN` makes the connection that one tries (`check/meet`);
/// - `reach ADDRESS:PORT` connects there, prints a line, and looks at the connection until the end of its standard input.
pub fn requested() -> Option<Result<c_int>> {
    let args: Vec<String> =
        env::args_os().skip(1).map_while(|arg| arg.into_string().ok()).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    Some(match args[..] {
        ["probe", "alone"] => Ok(0),
        ["probe", "loaded"] => loaded(),
        ["probe", "serve"] => serve(),
        ["probe", "connect", port] => connect(port.parse().ok()?),
        ["probe", "host", plan] => meet::host(plan),
        ["probe", "trial", plan] => meet::trial(plan),
        ["probe", "reach", place] => reach(place.parse().ok()?),
        _ => return None,
    })
}

fn loaded() -> Result<c_int> {
    let maps = fs::read_to_string("/proc/self/maps").context("cannot read /proc")?;
    Ok(c_int::from(!maps.contains("libusmc_preload.so")))
}

fn serve() -> Result<c_int> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    say(&listener.local_addr().context("the listener has no address")?.port().to_string())?;
    let (mut stream, _) = listener.accept().context("cannot accept")?;
    let mut message = [0; MESSAGE];
    loop {
        let n = stream.read(&mut message).context("cannot receive")?;
        if n == 0 {
            return Ok(0);
        }
        stream.write_all(&message[..n]).context("cannot send")?;
    }
}

fn connect(port: u16) -> Result<c_int> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))
        .context("cannot connect to 127.0.0.1; is the interface lo up? (ip link set lo up)")?;
    let mut answer = [0; MESSAGE];
    for _ in 0..ROUNDS {
        stream.write_all(&[b'u'; MESSAGE]).context("cannot send")?;
        stream.read_exact(&mut answer).context("cannot receive")?;
    }
    say("done")?;
    io::copy(&mut io::stdin(), &mut io::sink()).context("cannot wait")?;
    Ok(0)
}

fn reach(place: SocketAddr) -> Result<c_int> {
    let stream = TcpStream::connect_timeout(&place, PATIENCE)?;
    stream.set_read_timeout(Some(LOOK)).context("cannot set a time limit")?;
    say("connected")?;
    let input = thread::spawn(|| io::copy(&mut io::stdin(), &mut io::sink()));
    // A connection takes notice of what becomes of it in calls.
    let is_quiet = |e: &io::Error| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
    while !input.is_finished() && stream.peek(&mut [0]).is_err_and(|e| is_quiet(&e)) {}
    let _ = input.join();
    Ok(0)
}

fn say(line: &str) -> Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot answer")
}
