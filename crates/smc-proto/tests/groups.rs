//! First contact and reuse: connection after connection between two hosts, whose link groups say
//! what each handshake begins with.

mod support;

use std::time::Duration;

use smc_proto::decline::DeclineCode;
use smc_proto::groups::{GroupId, Groups, KEEP_CLIENT, KEEP_SERVER, Need, Peer, PeerPort};
use smc_proto::handshake::{Ending, Path};
use smc_proto::ids::{MacAddr, PeerId, RoceGid, SmcdGid, U24};
use smc_proto::link_group::Role;
use smc_proto::list::{Full, List};
use smc_proto::wire::clc::Answer;
use support::peers::{Faults, Outcome, able, run};

const PATHS: [Path; 4] = [Path::Dv2, Path::Dv1, Path::Rv2, Path::Rv1];

/// Two hosts and the link groups that they have with each other.
struct Hosts {
    /// Client, server.
    groups: [Groups<4>; 2],
    max_conns: u8,
    now: Duration,
}

/// What a side's group of a connection is, and whether it began with it.
type Joined = [(GroupId, bool); 2];

impl Hosts {
    fn new() -> Hosts {
        Hosts { groups: [Groups::new(), Groups::new()], max_conns: 255, now: Duration::ZERO }
    }

    /// One connection, by this path and in this VLAN; or how both ends fell back.
    fn connect(&mut self, path: Path, vlan: u16) -> Result<Joined, [DeclineCode; 2]> {
        let (mut client, mut server) = (able(1), able(2));
        server.paths = vec![path];
        if path != Path::Dv2 {
            server.chids.clear();
        }
        client.host.max_conns = self.max_conns;
        let needs = [need(path, Role::Client, vlan), need(path, Role::Server, vlan)];
        // The server first: it gets the Proposal before the client gets the Accept.
        let server_group = self.groups[1].join(&needs[1]);
        server.has_link_group = server_group.is_some();
        // A client joins none where the server begins one.
        let client_group = server_group.and_then(|_| self.groups[0].join(&needs[0]));
        client.has_link_group = client_group.is_some();
        client.lost_link_group = client_group.is_none();
        let result = run(&client, &server, Faults::default());
        let (client, server) = match (result.client, result.server) {
            (Outcome::Smc(client), Outcome::Smc(server)) => (client, server),
            (Outcome::Ended(Ending::Fallback(c)), Outcome::Ended(Ending::Fallback(s))) => {
                if let (Some(group), true) = (server_group, s.out_of_sync) {
                    self.groups[1].close(group, self.now);
                    self.groups[1].leave(group, self.now);
                }
                return Err([c.reason, s.peer_reason.unwrap()]);
            }
            other => panic!("{other:?}"),
        };
        assert_eq!((client.path, server.path), (path, path));
        assert_eq!(client.first_contact, server_group.is_none());
        if let Answer::R(accept) = &client.peer {
            // What the client looked for is what the server said.
            let Peer::R { id, port } = needs[0].peer else { panic!() };
            assert_eq!((accept.local.peer_id, accept.qpn), (id, port.qpn));
        }
        let mut begin = |who: usize, known: Option<GroupId>, max_conns| {
            let begun = || self.groups[who].begin(&needs[who], max_conns).unwrap();
            (known.unwrap_or_else(begun), known.is_none())
        };
        let client_group = begin(0, client_group, client.max_conns);
        let server_group = begin(1, server_group, server.max_conns);
        Ok([client_group, server_group])
    }

    fn leave(&mut self, joined: Joined) {
        for (groups, (id, _)) in self.groups.iter_mut().zip(joined) {
            groups.leave(id, self.now);
        }
    }
}

fn port(host: u8, qpn: u32) -> PeerPort {
    let (gid, mac) = (RoceGid([host; 16]), MacAddr([host; 6]));
    PeerPort { gid, mac, qpn: U24::truncate(qpn) }
}

/// What a side needs, as it reads it out of the other's message.
fn need(path: Path, role: Role, vlan: u16) -> Need {
    let peer = match (path.is_smcr(), role) {
        (true, Role::Client) => Peer::R { id: PeerId([2; 8]), port: port(2, 17) },
        (true, Role::Server) => Peer::R { id: PeerId([1; 8]), port: port(1, 0) },
        (false, Role::Client) => Peer::D { device: ism(1), peer: ism(2) },
        (false, Role::Server) => Peer::D { device: ism(2), peer: ism(1) },
    };
    Need { path, role, vlan, peer }
}

fn ism(host: u64) -> SmcdGid {
    SmcdGid { gid: host, ext: 7 }
}

#[test]
fn connections_share_a_group_up_to_what_was_negotiated() {
    for (path, max_conns, most) in [
        (Path::Rv2, 16, 16),
        (Path::Rv2, 255, 255),
        // Nothing is negotiated in version 1, and SMC-D has no limit.
        (Path::Rv1, 16, 255),
        (Path::Dv1, 16, 1_000),
        (Path::Dv2, 16, 1_000),
    ] {
        let mut hosts = Hosts { max_conns, ..Hosts::new() };
        let first = hosts.connect(path, 0).unwrap();
        assert!(first.iter().all(|(_, begun)| *begun), "first contact");
        for n in 2..=most {
            let next = hosts.connect(path, 0).unwrap();
            assert_eq!(next, first.map(|(id, _)| (id, false)), "{path:?} {n}");
        }
        assert_eq!(hosts.groups[1].connections(first[1].0), most);
        if path.is_smcr() {
            let second = hosts.connect(path, 0).unwrap();
            assert!(second.iter().zip(first).all(|(two, one)| two.1 && two.0 != one.0));
            hosts.leave(first);
            let [_, (server, begun)] = hosts.connect(path, 0).unwrap();
            assert_eq!((server, begun), (first[1].0, false), "there is room again");
        }
    }
}

#[test]
fn vlans_have_groups_of_their_own_but_for_smcd_v2() {
    for path in PATHS {
        let mut hosts = Hosts::new();
        let one = hosts.connect(path, 100).unwrap();
        let other = hosts.connect(path, 200).unwrap();
        let shared = path == Path::Dv2;
        assert!(other.iter().zip(one).all(|(b, a)| b.1 != shared && (b.0 == a.0) == shared));
        assert_eq!(hosts.connect(path, 100).unwrap(), one.map(|(id, _)| (id, false)));
    }
}

#[test]
fn peers_devices_links_and_roles_are_told_apart() {
    let mut groups = Groups::<4>::new();
    for path in PATHS {
        for role in [Role::Client, Role::Server] {
            let need = need(path, role, 0);
            let id = groups.begin(&need, 255).unwrap();
            let serves =
                |groups: &mut Groups<4>, peer| groups.join(&Need { peer, ..need }).is_some();
            let others = match need.peer {
                Peer::R { id, port } => vec![
                    (Peer::R { id: PeerId([9; 8]), port }, false),
                    (Peer::R { id, port: PeerPort { gid: RoceGid([9; 16]), ..port } }, false),
                    // A gateway's, in version 2.
                    (
                        Peer::R { id, port: PeerPort { mac: MacAddr([9; 6]), ..port } },
                        path == Path::Rv2,
                    ),
                    // The server learns the client's queue pair later.
                    (
                        Peer::R { id, port: PeerPort { qpn: U24::MAX, ..port } },
                        role == Role::Server,
                    ),
                    (Peer::D { device: ism(1), peer: ism(2) }, false),
                ],
                Peer::D { device, peer } => vec![
                    (Peer::D { device: ism(9), peer }, false),
                    (Peer::D { device, peer: ism(9) }, false),
                    (Peer::D { device, peer: SmcdGid { ext: 8, ..peer } }, false),
                ],
            };
            for (peer, expected) in others {
                assert_eq!(serves(&mut groups, peer), expected, "{path:?} {role:?} {peer:?}");
            }
            let other_role = if role == Role::Client { Role::Server } else { Role::Client };
            assert_eq!(groups.join(&Need { role: other_role, ..need }), None);
            assert_eq!(groups.join(&need), Some(id));
            groups.remove(id);
            assert_eq!(groups.join(&need), None);
        }
    }
}

/// After a link was lost a connection joins by another one.
#[test]
fn a_group_is_found_by_any_of_its_links_and_by_none_that_is_gone() {
    let mut groups = Groups::<1>::new();
    let need = |port| Need {
        peer: Peer::R { id: PeerId([2; 8]), port },
        ..need(Path::Rv1, Role::Client, 0)
    };
    let (first, second) = (port(2, 17), port(3, 18));
    let id = groups.begin(&need(first), 255).unwrap();
    assert_eq!(groups.join(&need(second)), None);
    groups.set_links(id, List::from_slice(&[first, second]).unwrap());
    assert_eq!([groups.join(&need(first)), groups.join(&need(second))], [Some(id); 2]);
    groups.set_links(id, List::from_slice(&[second]).unwrap());
    assert_eq!([groups.join(&need(first)), groups.join(&need(second))], [None, Some(id)]);
    groups.set_links(id, List::new());
    assert_eq!(groups.join(&need(second)), None);
    assert_eq!(groups.begin(&need(first), 255), Err(Full { capacity: 1 }));
}

#[test]
fn a_client_that_forgot_its_group_is_out_of_sync_once() {
    for path in PATHS {
        let mut hosts = Hosts::new();
        let first = hosts.connect(path, 0).unwrap();
        hosts.groups[0].remove(first[0].0);
        let codes = hosts.connect(path, 0).unwrap_err();
        assert_eq!(codes, [DeclineCode::SYNCERR; 2], "{path:?}");
        let again = hosts.connect(path, 0).unwrap();
        assert!(again.iter().all(|(_, begun)| *begun), "{path:?}");
        // The old one goes with its last connection.
        assert_ne!(again[1].0, first[1].0);
        hosts.groups[1].leave(first[1].0, hosts.now);
        assert_eq!(hosts.groups[1].poll_expired(hosts.now), Some(first[1].0));
        // A server that forgot it begins a new one, and the client does, too.
        let mut hosts = Hosts::new();
        let first = hosts.connect(path, 0).unwrap();
        hosts.groups[1].remove(first[1].0);
        let again = hosts.connect(path, 0).unwrap();
        assert!(again.iter().all(|(_, begun)| *begun), "{path:?}");
        assert_ne!(again[0].0, first[0].0);
    }
}

#[test]
fn a_group_without_connections_is_kept_for_ten_minutes() {
    let mut hosts = Hosts::new();
    let joined = hosts.connect(Path::Rv1, 0).unwrap();
    assert_eq!(hosts.groups.each_ref().map(Groups::next_timeout), [None; 2]);
    hosts.leave(joined);
    let kept = [KEEP_CLIENT, KEEP_SERVER];
    assert_eq!(kept.map(|kept| kept.as_secs()), [610, 600]);
    assert_eq!(hosts.groups.each_ref().map(Groups::next_timeout), kept.map(Some));
    hosts.now = KEEP_SERVER - Duration::from_secs(1);
    let again = hosts.connect(Path::Rv1, 0).unwrap();
    assert_eq!(again, joined.map(|(id, _)| (id, false)));
    assert_eq!(hosts.groups.each_ref().map(Groups::next_timeout), [None; 2]);
    hosts.leave(again);
    hosts.now += KEEP_SERVER;
    assert_eq!(hosts.groups[0].poll_expired(hosts.now), None);
    assert_eq!(hosts.groups[1].poll_expired(hosts.now), Some(again[1].0));
    assert_eq!(hosts.groups[1].poll_expired(hosts.now), None);
    let new = hosts.connect(Path::Rv1, 0).unwrap();
    assert!(new.iter().all(|(_, begun)| *begun));
    // What comes to its end goes at once.
    hosts.groups[1].close(new[1].0, hosts.now);
    assert_eq!(hosts.groups[1].poll_expired(hosts.now), None, "not under its connection");
    hosts.leave(new);
    assert_eq!(hosts.groups[1].next_timeout(), Some(hosts.now));
}

/// The server spreads connections over two links; queue pairs of two ports may have one number.
#[test]
fn a_connection_is_told_its_link() {
    let links = List::from_slice(&[port(2, 17), port(3, 17)]).unwrap();
    for (role, named, expected) in [
        (Role::Server, port(2, 0), [0, 1, 0, 1]),
        (Role::Client, port(2, 17), [0; 4]),
        (Role::Client, port(3, 17), [1; 4]),
    ] {
        let mut groups = Groups::<1>::new();
        let peer = Peer::R { id: PeerId([2; 8]), port: named };
        let need = Need { peer, ..need(Path::Rv2, role, 0) };
        let id = groups.begin(&need, 255).unwrap();
        assert_eq!(groups.link(id, &need), Some(0));
        groups.set_links(id, links);
        groups.leave(id, Duration::ZERO);
        for link in expected {
            assert_eq!(groups.join(&need), Some(id));
            assert_eq!(groups.link(id, &need), Some(link), "{role:?} {named:?}");
        }
        groups.set_links(id, List::new());
        assert_eq!(groups.link(id, &need), None);
    }
}

#[test]
fn a_server_begins_a_group_before_the_keys_run_out() {
    for (role, joins) in [(Role::Server, false), (Role::Client, true)] {
        let mut groups = Groups::<1>::new();
        let need = need(Path::Rv2, role, 0);
        let id = groups.begin(&need, 255).unwrap();
        groups.set_keys_left(id, 1);
        assert_eq!(groups.join(&need), Some(id));
        groups.set_keys_left(id, 0);
        assert_eq!(groups.join(&need).is_some(), joins, "{role:?}");
        groups.set_keys_left(id, 2);
        assert_eq!(groups.join(&need), Some(id), "a key was withdrawn");
    }
}

/// Linux names itself in a Proposal only if that offers version 1.
#[test]
fn a_peer_without_an_id_is_a_peer() {
    let mut groups = Groups::<2>::new();
    let of = |id| Need {
        peer: Peer::R { id: PeerId([id; 8]), port: port(2, 0) },
        ..need(Path::Rv2, Role::Server, 0)
    };
    let nameless = groups.begin(&of(0), 255).unwrap();
    assert_eq!(groups.join(&of(3)), None);
    let named = groups.begin(&of(3), 255).unwrap();
    assert_eq!([groups.join(&of(0)), groups.join(&of(3))], [Some(nameless), Some(named)]);
}
