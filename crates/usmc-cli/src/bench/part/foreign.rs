//! `foreign`: what read(2) and write(2) cost on a descriptor that is no socket.

use std::fs::OpenOptions;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::time::Instant;

use anyhow::{Context, Result};
use nix::unistd::{read, write};

use super::line::{self, Line};
use super::spec::{Address, Done, Spec, Wait};

/// Calls that are timed together.
const BATCH: u32 = 2000;
/// Exchanges on a connection of this process to itself, by which the driver sees that the library is at work.
const EXCHANGES: usize = 200;

/// Times calls on /dev/null. The quickest batch counts: what others do on the machine only adds to it.
pub fn play(spec: &Spec, seconds: f64) -> Result<()> {
    let ends = connection(spec)?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").context("/dev/null")?;
    super::start(|| Ok(()))?;
    let (cpu, begin) = (super::cpu_time(), Instant::now());
    let mut least = [f64::MAX; 2];
    let mut batches = 0;
    let mut byte = [0];
    while begin.elapsed().as_secs_f64() < seconds || batches < 10 {
        let start = Instant::now();
        for _ in 0..BATCH {
            read(null.as_fd(), &mut byte).context("read")?;
        }
        let between = Instant::now();
        for _ in 0..BATCH {
            write(null.as_fd(), &byte).context("write")?;
        }
        let times = [between - start, between.elapsed()];
        for (least, time) in least.iter_mut().zip(times) {
            *least = least.min(time.as_nanos() as f64 / f64::from(BATCH));
        }
        batches += 1;
    }
    let done = Done {
        operations: batches * u64::from(BATCH) * 2,
        seconds: begin.elapsed().as_secs_f64(),
        cpu_seconds: (super::cpu_time() - cpu).as_secs_f64(),
        further: least.to_vec(),
        ..Done::default()
    };
    super::say("measured", &())?;
    super::hear()?;
    super::say("done", &done)?;
    super::rest()?;
    drop(ends);
    Ok(())
}

/// Both ends of a connection that had some use.
fn connection(spec: &Spec) -> Result<[Line; 2]> {
    let spec = Spec { wait: Wait::Blocking, ..spec.clone() };
    let (listener, port) = line::listen(&spec.at)?;
    let at = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    let client = line::connect(&Address::Tcp(at))?;
    let (server, _) = listener.accept().context("cannot accept")?;
    let mut ends = [Line::new(client, &spec)?, Line::new(server, &spec)?];
    let mut message = vec![b'x'; spec.request];
    for i in 0..EXCHANGES {
        ends[i % 2].send(&message).context("cannot send")?;
        ends[(i + 1) % 2].receive(&mut message).context("cannot receive")?;
    }
    Ok(ends)
}
