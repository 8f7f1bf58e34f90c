//! What the agent tells of itself (`usmc linkgroup`, `usmc device`): lines of words, as [`usmc_shm::agent::Request::Show`] has them.

use std::fmt::Write;
use std::io::{self, Write as _};
use std::net::Ipv6Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::time::{ClockId, clock_gettime};
use smc_proto::link_group::{Port, Role};
use smc_proto::wire::llc::Version;
use usmc_rdma::buffers::Buffers;
use usmc_rdma::view::{Group, Link};

use crate::adapter::{Adapter, Counts};
use crate::driver::{self, Driver};

/// A file with the report.
///
/// # Errors
/// memfd_create(2), write(2).
pub fn file<B: Buffers>(driver: &Driver<B>) -> io::Result<OwnedFd> {
    let mut file = std::fs::File::from(memfd_create("usmc-report", MemfdFlags::CLOEXEC)?);
    file.write_all(text(driver).as_bytes())?;
    Ok(file.into())
}

/// The report.
pub fn text<B: Buffers>(driver: &Driver<B>) -> String {
    let groups = driver.engine.view();
    let mut text = String::new();
    let adapters = &driver.adapters;
    let all = adapters.ids().filter_map(|device| Some((device, adapters.get(device)?)));
    for (device, adapter) in all {
        let links = groups.iter().flat_map(|group| &group.links);
        let links = links.filter(|link| link.device == Some(device)).count();
        let state = if adapter.is_up() { "ACTIVE" } else { "DOWN" };
        let (name, gid) = (adapter.name(), adapter.address());
        let network = adapters.network(device).unwrap_or("-");
        let Counts { posts, requests, tx_bytes, completions, messages, errors } = adapter.counts();
        let _ = writeln!(
            text,
            "device name={name} port=1 state={state} links={links} gid={gid} pnetid={network} posts={posts} requests={requests} tx-bytes={tx_bytes} completions={completions} messages={messages} errors={errors}"
        );
    }
    let driver::Counts { established, fallbacks, failures } = driver.counts();
    let _ = writeln!(
        text,
        "agent established={established} fallbacks={fallbacks} failures={failures} cpu-ns={}",
        cpu_ns()
    );
    for group in &groups {
        let Group { id, conns, rmbs, peer_rmbs, .. } = group;
        let (role, kind) = (role(group.role), kind(group));
        let device = group.links.iter().find_map(|link| link.device);
        let network = device.and_then(|device| adapters.network(device)).unwrap_or("-");
        let version = if group.version == Version::V1 { 1 } else { 2 };
        let _ = writeln!(
            text,
            "group id={id:08x} role={role} type={kind} version={version} conns={conns} rmbs={rmbs} peer-rmbs={peer_rmbs} pnetid={network}"
        );
        for link in &group.links {
            let adapter = link.device.and_then(|device| adapters.get(device));
            let device = adapter.map(Adapter::name);
            let queues = adapter.map(Adapter::queues).unwrap_or_default();
            let (sends, receives) = (queues.sends(), queues.receives());
            let state = if link.is_active { "LINK_ACTIVE" } else { "LINK_ACTIVATING" };
            let Link { id: link_id, local, remote, .. } = link;
            let conns = link.conns.len();
            let mtu = local.mtu.min(remote.mtu).bytes().unwrap_or(0);
            let _ = writeln!(
                text,
                "link group={id:08x} id={link_id} device={} port=1 state={state} conns={conns} mtu={mtu} send-wr={sends} recv-wr={receives} gid={} peer-gid={} qpn={} peer-qpn={}",
                device.unwrap_or("-"),
                gid(local),
                gid(remote),
                local.qpn.value(),
                remote.qpn.value()
            );
            for [local, peer] in link.conns.iter().filter_map(|conn| driver.ends(*conn)) {
                let _ = writeln!(
                    text,
                    "conn local={local} peer={peer} state=ACTIVE group={id:08x} link={link_id}"
                );
            }
        }
    }
    for [local, peer] in driver.in_handshake() {
        let _ = writeln!(text, "conn local={local} peer={peer} state=INIT");
    }
    text
}

/// CPU time of this process so far, in nanoseconds.
fn cpu_ns() -> u128 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default().as_nanos()
}

fn gid(port: &Port) -> Ipv6Addr {
    port.gid.0.into()
}

/// In smcr's words.
fn role(role: Role) -> &'static str {
    match role {
        Role::Client => "CLNT",
        Role::Server => "SERV",
    }
}

/// As smcr has it: by how many ports either side has (RFC 7609, section 2.3; `enum smc_lgr_type` of net/smc).
fn kind(group: &Group) -> &'static str {
    let mut active = group.links.iter().filter(|link| link.is_active);
    match (active.next(), active.next()) {
        (None, _) => "NONE",
        (Some(_), None) => "SINGLE",
        (Some(one), Some(other)) if one.local.gid == other.local.gid => "ASYML",
        (Some(one), Some(other)) if one.remote.gid == other.remote.gid => "ASYMP",
        _ => "SYM",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smc_proto::ids::RoceGid;

    #[test]
    fn a_group_is_what_its_active_links_make_of_it() {
        let link = |gids: [u8; 2], is_active| Link {
            id: 1,
            device: None,
            is_active,
            conns: Vec::new(),
            local: Port { gid: RoceGid([gids[0]; 16]), ..Port::default() },
            remote: Port { gid: RoceGid([gids[1]; 16]), ..Port::default() },
        };
        let of = |second: Option<([u8; 2], bool)>| {
            let links =
                [Some(link([1, 2], true)), second.map(|(gids, is_active)| link(gids, is_active))];
            kind(&Group {
                id: 1,
                role: Role::Client,
                version: Version::V2,
                conns: 0,
                rmbs: 0,
                peer_rmbs: 0,
                links: links.into_iter().flatten().collect(),
            })
        };
        assert_eq!(of(None), "SINGLE");
        assert_eq!(of(Some(([3, 4], false))), "SINGLE");
        assert_eq!(of(Some(([3, 4], true))), "SYM");
        assert_eq!(of(Some(([1, 4], true))), "ASYML");
        assert_eq!(of(Some(([3, 2], true))), "ASYMP");
    }
}
