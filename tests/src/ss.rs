//! `usmc ss --json`, read.

use std::process::Command;

use serde_json::Value;

/// One socket as `usmc ss --json` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Socket {
    /// Process.
    pub pid: i32,
    /// Program.
    pub comm: String,
    /// `LISTEN`, `ACTIVE`, …
    pub state: String,
    /// Own address with port.
    pub local: String,
    /// The other end's, empty for a listener.
    pub peer: String,
    /// `SMCD` or `TCP`.
    pub mode: String,
    /// Whose memory it is, empty for TCP.
    pub device: String,
    /// In a region the kernel at the other end: its peer's number and its name.
    pub host: Option<(u8, String)>,
    /// Why it is TCP.
    pub fallback_reason: String,
    /// What the TCP option came to, empty where it was not asked for.
    pub tcp_option: String,
    /// Bytes the application sent.
    pub tx_bytes: u64,
    /// Bytes the application received.
    pub rx_bytes: u64,
}

impl Socket {
    /// Own port.
    pub fn local_port(&self) -> u16 {
        port(&self.local)
    }

    /// The other end's port, 0 for a listener.
    pub fn peer_port(&self) -> u16 {
        port(&self.peer)
    }

    /// Whether its bytes move by RDMA.
    pub fn is_smcr(&self) -> bool {
        self.mode == "SMCR"
    }

    /// Whether its bytes move through shared memory.
    pub fn is_smcd(&self) -> bool {
        self.mode == "SMCD"
    }
}

fn port(address: &str) -> u16 {
    address.rsplit_once(':').and_then(|(_, p)| p.parse().ok()).unwrap_or(0)
}

/// All sockets that the `usmc` command shows.
///
/// # Panics
/// When the command fails or its output lacks a documented field.
pub fn list() -> Vec<Socket> {
    let out = Command::new(crate::build::usmc()).args(["ss", "--json"]).output();
    let out = out.expect("running usmc ss --json");
    let text = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "usmc ss --json failed: {errors}");
    parse(&text)
}

/// What the command has printed, wherever it ran.
///
/// # Panics
/// When it lacks a documented field.
pub fn parse(text: &str) -> Vec<Socket> {
    let parsed: Value =
        serde_json::from_str(text).unwrap_or_else(|e| panic!("usmc ss --json: {e}\n{text}"));
    let items = parsed.as_array().unwrap_or_else(|| panic!("not an array: {text}"));
    items.iter().map(socket).collect()
}

fn socket(item: &Value) -> Socket {
    let field = |name: &str| {
        item.get(name).unwrap_or_else(|| panic!("usmc ss --json: no {name} in {item}"))
    };
    let host = |host: &Value| {
        let peer = host.get("peer")?.as_u64()?;
        Some((u8::try_from(peer).ok()?, host.get("name")?.as_str()?.to_owned()))
    };
    // A listener has no peer and TCP by choice no reason: null and "" both say so.
    let text = |name: &str| field(name).as_str().unwrap_or("").to_owned();
    let count = |name: &str| field(name).as_u64().unwrap_or(0);
    Socket {
        pid: i32::try_from(count("pid")).expect("a pid"),
        comm: text("comm"),
        state: text("state"),
        local: text("local"),
        peer: text("peer"),
        mode: text("mode"),
        device: text("device"),
        host: host(field("host")),
        fallback_reason: text("fallback_reason"),
        tcp_option: text("tcp_option"),
        tx_bytes: count("tx_bytes"),
        rx_bytes: count("rx_bytes"),
    }
}
