//! What the host's processes can ask at the second socket: the region, and how the server is.
//!
//! Whoever connects is sent one byte, [`GREETING`], and the region's descriptor with it. It may then send [`ASK`], and is sent a
//! [`Report`] as JSON.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::socket;

/// The version of this protocol.
pub const GREETING: u8 = 1;
/// Asks for a report.
pub const ASK: u8 = b's';
/// A server answers at once. This one does not.
const PATIENCE: Duration = Duration::from_secs(10);

/// The memory.
#[derive(Serialize, Deserialize, Debug)]
pub struct Memory {
    /// Bytes.
    pub bytes: u64,
    /// Its file, where it has a name.
    pub file: Option<PathBuf>,
    /// The region's id. This and the following are missing where an earlier server's region has another version.
    pub gid: Option<String>,
    /// All units.
    pub units: Option<usize>,
    /// Those that nobody has.
    pub free: Option<usize>,
}

/// One client.
#[derive(Serialize, Deserialize, Debug)]
pub struct Client {
    /// Its id, which the virtual machine reads from the device.
    pub id: u16,
    /// Its interrupts.
    pub vectors: u8,
    /// The process that has connected; `None` where it is in another namespace.
    pub pid: Option<i32>,
    /// Its user.
    pub uid: Option<u32>,
    /// Messages that it has no room for yet.
    pub behind: usize,
    /// It is closed, but its process lives: its id and its memory are not free.
    pub closed: bool,
    /// Its peers in the region.
    pub peers: Vec<u8>,
}

/// How the server is.
#[derive(Serialize, Deserialize, Debug)]
pub struct Report {
    /// The server's process.
    pub pid: u32,
    /// The memory.
    pub memory: Memory,
    /// Vectors of new clients.
    pub vectors: u8,
    /// The clients, in the order of arrival.
    pub clients: Vec<Client>,
    /// Ids of closed clients, of which it cannot be known whether they live.
    pub unproven: Vec<u16>,
}

fn connect(path: &Path) -> Result<(UnixStream, OwnedFd)> {
    let what = path.display();
    let socket = UnixStream::connect(path).with_context(|| {
        format!("{what}: no server; `usmc ivshmem-server --host-socket {what}` starts one")
    })?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let region = socket::receive(&socket).with_context(|| {
        format!("{what}: no region comes from it; is it the socket for the host's processes?")
    })?;
    Ok((socket, region))
}

/// The region's descriptor.
///
/// # Errors
/// There is no server, or it is the wrong socket.
pub fn region(path: &Path) -> Result<OwnedFd> {
    connect(path).map(|(_, region)| region)
}

/// Asks the server.
///
/// # Errors
/// There is no server, or it is the wrong socket.
pub fn ask(path: &Path) -> Result<Report> {
    let (mut socket, _) = connect(path)?;
    socket.write_all(&[ASK])?;
    let mut text = Vec::new();
    socket.read_to_end(&mut text).context("the server does not answer")?;
    serde_json::from_slice(&text).context("another version of usmc is the server")
}
