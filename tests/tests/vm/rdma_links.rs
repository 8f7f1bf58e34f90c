//! A link group with two links, by two devices of each machine, both of which are cut in turn while connections are full of bytes.

use serde_json::Value;
use usmc_tests::build::tests_dir;
use usmc_tests::vm::Guest;

use crate::programs::{End, Smc, end_agent, for_each, pairs, smcr, start_agent, state};
use crate::test_links_each;
use Smc::{Kernels, Ours};

/// Where the servers listen.
const PORT: u16 = 9500;
const CONNECTIONS: usize = 3;

/// What its program says at either end.
const SAID: &str = "/tmp/served /tmp/called";

/// The network devices, and the RDMA devices on them.
const NETDEVS: [&str; 2] = ["eth0", "eth1"];
const DEVICES: [&str; 2] = ["rxe0", "rxe1"];

/// An active link: its RDMA device, and how many connections it has.
type Link = (String, u64);

/// Which ends lose the port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cut {
    Servers,
    Clients,
    Both,
}

pub(crate) fn are_cut(one: &mut Guest, other: &mut Guest) {
    for guest in [&mut *one, &mut *other] {
        guest.run(
            "for what in arp_ignore=1 arp_announce=2; do sysctl -qw net.ipv4.conf.all.$what; done
            ip address add 10.0.0.1$GUEST/24 dev eth1 metric 200; ip link set eth1 up
            rdma link add rxe1 type rxe netdev eth1",
        );
        let pnet = |netdev: &str, device: &str| {
            format!("[[pnet]]\nid = 'NET'\ninterface = '{netdev}'\nibdevice = '{device}'\n")
        };
        let [one, other] = [0, 1].map(|at| pnet(NETDEVS[at], DEVICES[at]));
        start_agent(guest, &format!("max_links = 2\ntestlink_time = 1\n{one}{other}"));
    }
    test_links_each(other, 1);
    // The kernel offers a second link to a peer of the same physical network.
    for (netdev, device) in NETDEVS.into_iter().zip(DEVICES) {
        other.run(&smcr(&format!("pnet NET {netdev} {device}")));
    }
    // In `make test` the kernel is the client.
    for_each(pairs(&[(Ours, Kernels)]), (&mut *one, &mut *other), |server, client| {
        let ends = [Cut::Servers, Cut::Clients, Cut::Both].into_iter();
        let ends = ends.filter(|cut| is_seen(*cut, server, client));
        let cuts: Vec<_> = ends.enumerate().map(|(at, cut)| (at % 2, cut)).collect();
        under_load(server, client, &cuts);
    });
    test_links_each(other, 30);
    for guest in [one, other] {
        end_agent(guest);
        guest.run("rdma link delete rxe1; ip link set eth1 down; ip address flush dev eth1");
    }
}

/// A kernel's end has to see that its port is lost: soft-RoCE repeats for ever what nobody acknowledges, and the kernel waits for that before it
/// deletes a link (`smc_wr_tx_wait_no_pending_sends`).
fn is_seen(cut: Cut, server: &End, client: &End) -> bool {
    match cut {
        Cut::Both => true,
        Cut::Servers => client.smc == Ours,
        Cut::Clients => server.smc == Ours,
    }
}

fn under_load(server: &mut End, client: &mut End, cuts: &[(usize, Cut)]) {
    let to = server.guest.address();
    let script = tests_dir().join("programs/python/under_load.py");
    let command =
        |end: &End, words: &str| format!("{} python3 {} {words}", end.smc.how(), script.display());
    let serve = command(server, &format!("serve {to} {PORT} {CONNECTIONS}"));
    server.guest.run(&format!(
        ": >/tmp/served; {serve} >/tmp/served 2>&1 &
        until grep -q ready /tmp/served; do kill -0 $! || {{ cat /tmp/served; exit 1; }}; sleep 0.1; done"
    ));
    let call = command(client, &format!("call {to} {PORT} {CONNECTIONS} /tmp/at /tmp/stop"));
    client.guest.run(&format!("rm -f /tmp/at /tmp/stop; {call} >/tmp/called 2>&1 &"));
    all_move(server, client);
    assert_eq!((server.by_rdma(PORT), client.by_rdma(PORT)), (CONNECTIONS, CONNECTIONS));
    until_links(server, client, have_both);
    for &(lost, cut) in cuts {
        println!("    {} is lost at {cut:?}", NETDEVS[lost]);
        let set = |server: &mut End, client: &mut End, state: &str| {
            let script = format!("ip link set {} {state}", NETDEVS[lost]);
            if cut != Cut::Clients {
                server.guest.run(&script);
            }
            if cut != Cut::Servers {
                client.guest.run(&script);
            }
        };
        set(server, client, "down");
        // What is left of the other end may be used twice: its peer offers an asymmetric link.
        until_links(server, client, |servers, clients| {
            let without = |links: &[Link]| links.iter().all(|link| link.0 != DEVICES[lost]);
            (cut == Cut::Clients || without(servers)) && (cut == Cut::Servers || without(clients))
        });
        all_move(server, client);
        set(server, client, "up");
        until_links(server, client, have_both);
        all_move(server, client);
    }
    assert_eq!((server.by_rdma(PORT), client.by_rdma(PORT)), (CONNECTIONS, CONNECTIONS));
    client.guest.run("touch /tmp/stop");
    let said = until(client, "grep -q called /tmp/called", "cat /tmp/called");
    println!("    {said}");
    until(server, "grep -q served /tmp/served", "cat /tmp/served");
}

/// Waits until that is so, and says what is asked then.
fn until(end: &mut End, is_so: &str, say: &str) -> String {
    end.guest
        .run(&format!("for n in $(seq 300); do {is_so} && break; sleep 0.1; done; {say}; {is_so}"))
}

/// Each connection gets on by more than all buffers hold.
fn all_move(server: &mut End, client: &mut End) {
    const BYTES: usize = 2_000_000;
    let (status, said) = client.guest.try_run(&format!(
        "for n in $(seq 300); do [ ! -e /tmp/at ] || break; sleep 0.1; done; at=$(cat /tmp/at)
        for n in $(seq 300); do [ $(cat /tmp/at) -lt $((at + {BYTES})) ] || exit 0; sleep 0.1; done
        echo from $at to $(cat /tmp/at); cat /tmp/called; exit 1"
    ));
    if status != 0 {
        panic!("{said}\nserver: {}\nclient: {}", state(server, SAID), state(client, SAID));
    }
}

/// Each end has a link by each of its devices.
fn have_both(servers: &[Link], clients: &[Link]) -> bool {
    [servers, clients].iter().all(|links| links.iter().map(|(device, _)| device).eq(DEVICES))
}

/// Waits until the active links of both ends are so, and all connections are on them.
fn until_links(server: &mut End, client: &mut End, are_so: impl Fn(&[Link], &[Link]) -> bool) {
    let all = |links: &[Link]| links.iter().map(|(_, count)| count).sum::<u64>();
    // A look takes a while in a machine that is busy.
    for _ in 0..20 {
        let (servers, clients) = (links(server), links(client));
        if [all(&servers), all(&clients)] == [CONNECTIONS as u64; 2] && are_so(&servers, &clients) {
            println!("    {servers:?} {clients:?}");
            return;
        }
        client.guest.run("sleep 0.1");
    }
    panic!("server: {}\nclient: {}", state(server, SAID), state(client, SAID));
}

/// The active links of the group that has connections, by the names of their devices.
fn links(end: &mut End) -> Vec<Link> {
    // With the names of their groups.
    let all: Vec<(String, Link)> = match end.smc {
        Ours => {
            let all = end.guest.run("usmc linkgroup link-show --json");
            let all: Value = serde_json::from_str(&all).expect("JSON");
            let text = |value: &Value| value.as_str().expect("a name").to_owned();
            let of_group = |group: &Value| {
                let links = group["links"].as_array().expect("links").iter();
                let active = links.filter(|link| link["state"] == "LINK_ACTIVE");
                let count = |link: &Value| link["conns"].as_u64().expect("a count");
                let name = text(&group["lg_id"]);
                assert_eq!(group["pnetid"], "NET", "{group}");
                let named = |link: &Value| (name.clone(), (text(&link["ibdevice"]), count(link)));
                active.map(named).collect::<Vec<_>>()
            };
            all.as_array().expect("an array").iter().flat_map(of_group).collect()
        }
        Kernels => {
            let said = end.guest.run(&smcr("links"));
            let words = said.lines().map(|line| line.split(' ').collect::<Vec<_>>());
            // SMC_LNK_ACTIVE is 3.
            let active = words.filter(|words| words[2] == "3");
            let link = |words: &[&str]| (words[1].to_owned(), words[3].parse().expect("a count"));
            active.map(|words| (words[0].to_owned(), link(&words))).collect()
        }
    };
    let in_use = all.iter().find(|(_, (_, count))| *count > 0).map(|(group, _)| group.clone());
    let links = all.into_iter().filter(|(group, _)| Some(group) == in_use.as_ref());
    let mut links: Vec<Link> = links.map(|(_, link)| link).collect();
    links.sort();
    links
}
