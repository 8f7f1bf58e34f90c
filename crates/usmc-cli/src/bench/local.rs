//! What a run takes of its machine: directories, ports, users.

use std::fs::{self, DirBuilder};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};
use procfs::net::{self, TcpState};
use rustix::rand::{GetRandomFlags, getrandom};

/// User and group of this name (passwd(5)).
pub fn ids(user: &str) -> Option<(u32, u32)> {
    let passwd = fs::read_to_string("/etc/passwd").ok()?;
    let line = passwd.lines().find(|line| line.split(':').next() == Some(user))?;
    let mut fields = line.split(':').skip(2);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// A new directory for files of a run.
///
/// # Errors
/// When it cannot be made.
pub fn directory(place: &Path) -> Result<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = place.join(format!("usmc-bench-{}-{number}", std::process::id()));
    let made = DirBuilder::new().mode(0o700).create(&path);
    made.with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

/// Something that nobody guesses.
///
/// # Errors
/// As getrandom(2).
pub fn password() -> Result<String> {
    let mut bytes = [0; 16];
    let got = getrandom(&mut bytes, GetRandomFlags::empty()).context("getrandom")?;
    ensure!(got == bytes.len(), "getrandom gives {got} bytes only");
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}

/// A port of this address that nobody uses, below those the kernel gives to clients.
///
/// # Errors
/// When there is none.
pub fn free_port(address: Ipv4Addr) -> Result<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(7919);
    for _ in 0..1000 {
        let number = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (number % 20_000) as u16;
        if TcpListener::bind((address, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no port of {address} is free; is its interface up? (ip link set lo up)")
}

/// Does anyone listen there? Asked of the kernel, so that servers see no connection of ours.
pub fn listens(port: u16) -> bool {
    let sockets = [net::tcp(), net::tcp6()].into_iter().flatten().flatten();
    let mut listeners = sockets.filter(|socket| socket.state == TcpState::Listen);
    listeners.any(|listener| listener.local_address.port() == port)
}
