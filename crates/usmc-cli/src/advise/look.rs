//! One look at all TCP sockets of the host that can be seen, and at the processes that have them.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::proc;
use crate::sock_diag::{self, Kernel};

/// What was seen at one moment.
#[derive(Default, Debug)]
pub struct Look {
    /// Sockets by network namespace and number. Numbers are the host's, not the namespace's.
    pub sockets: BTreeMap<u64, HashMap<u64, Kernel>>,
    /// The processes that have a socket.
    pub owners: HashMap<u64, Vec<u32>>,
    /// How often the threads of a process have gone to sleep.
    pub sleeps: HashMap<u32, u64>,
    /// Network namespaces that nobody lets us into.
    pub hidden_nets: usize,
    /// Processes whose descriptors nobody lets us see.
    pub hidden: usize,
}

/// Looks at all.
pub fn look() -> Look {
    let mut seen = Look::default();
    let mut nets: BTreeMap<u64, u32> = BTreeMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids {
        if let Ok(net) = fs::metadata(format!("/proc/{pid}/ns/net")) {
            nets.entry(net.ino()).or_insert(pid);
        }
        if !owns(pid, &mut seen.owners) {
            seen.hidden += 1;
        }
    }
    let with_sockets = seen.owners.values().flatten();
    seen.sleeps = with_sockets.map(|pid| (*pid, sleeps(*pid))).collect();
    let own = fs::metadata("/proc/self/ns/net").map(|meta| meta.ino()).unwrap_or(0);
    seen.sockets.insert(own, sock_diag::tcp_sockets());
    for (net, pid) in nets.into_iter().filter(|(net, _)| *net != own) {
        match in_net(net, pid) {
            Some(sockets) => drop(seen.sockets.insert(net, sockets)),
            None => seen.hidden_nets += 1,
        }
    }
    seen
}

/// The sockets of a network namespace, by a thread that goes there and ends.
fn in_net(net: u64, pid: u32) -> Option<HashMap<u64, Kernel>> {
    let file = File::open(format!("/proc/{pid}/ns/net")).ok()?;
    // The process may have gone, and its number to another one.
    if file.metadata().ok()?.ino() != net {
        return None;
    }
    let there = move || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).ok()?;
        Some(sock_diag::tcp_sockets())
    };
    thread::Builder::new().spawn(there).ok()?.join().ok()?
}

/// Notes which sockets a process has; false where that may not be seen.
fn owns(pid: u32, owners: &mut HashMap<u64, Vec<u32>>) -> bool {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    for link in entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()) {
        let Ok(target) = std::ffi::CString::new(link.as_os_str().as_bytes()) else { continue };
        if let Some(inode) = proc::socket_inode(&target) {
            let holders = owners.entry(inode).or_default();
            if holders.last() != Some(&pid) {
                holders.push(pid);
            }
        }
    }
    true
}

/// Of all threads of a process (`voluntary_ctxt_switches`).
fn sleeps(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let count = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    let texts = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    texts.filter_map(count).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn a_connection_is_seen_with_its_owner() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let client = TcpStream::connect(listener.local_addr().expect("name")).expect("connect");
        let seen = look();
        let inode = rustix::fs::fstat(&client).expect("fstat").st_ino;
        assert!(seen.owners[&inode].contains(&std::process::id()));
        let own = fs::metadata("/proc/self/ns/net").expect("a namespace").ino();
        let kernel = seen.sockets[&own][&inode];
        assert_eq!(Some(kernel.peer), listener.local_addr().ok());
        assert_eq!(kernel.state, sock_diag::ESTABLISHED);
        assert!(seen.sleeps.contains_key(&std::process::id()));
    }
}
