//! What `usmc check` runs under the library: two ends of a connection. Hidden from users.

use std::ffi::c_int;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use anyhow::{Context, Result};

/// Round trips before the client says that it is done.
const ROUNDS: usize = 200;
/// Bytes of one message.
const MESSAGE: usize = 64;

/// The probe's parts.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    part: Part,
}

#[derive(clap::Subcommand, Debug)]
enum Part {
    /// Succeed if the library is loaded
    Loaded,
    /// Print a port, and send back what one client sends
    Serve,
    /// Talk to that port, print a line, and wait for the end of standard input
    Connect {
        /// The port
        port: u16,
    },
}

/// Plays the part.
///
/// # Errors
/// Whatever a socket call says.
pub fn run(args: &Args) -> Result<c_int> {
    match args.part {
        Part::Loaded => {
            let maps = fs::read_to_string("/proc/self/maps").context("cannot read /proc")?;
            Ok(c_int::from(!maps.contains("libusmc_preload.so")))
        }
        Part::Serve => serve(),
        Part::Connect { port } => connect(port),
    }
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

fn say(line: &str) -> Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("cannot answer")
}
