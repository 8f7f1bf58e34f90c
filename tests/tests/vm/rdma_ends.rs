//! What programs seldom do with a connection by RDMA, between the engine and the kernel's SMC; and what both ends show of it.

use serde_json::{Value, json};
use usmc_tests::build::tests_dir;
use usmc_tests::vm::Guest;

use crate::programs::{End, Smc, for_each_pair, pairs, smcr, state};
use Smc::{Kernels, Ours};

/// The port of the first connection; the others' follow.
const PORT: u16 = 9400;

/// The kernel at either end, in `make test` as well.
const BOTH: [(Smc, Smc); 2] = [(Kernels, Ours), (Ours, Kernels)];

/// The server's end and the client's, and what their programs are called.
const ROLES: [&str; 2] = ["serve", "call"];
const SERVER: usize = 0;
const CLIENT: usize = 1;

/// Urgent bytes both ways; a writer whose peer does not read; a reader that is killed.
pub(crate) fn meet(one: &mut Guest, other: &mut Guest) {
    for_each_pair(pairs(&BOTH), (one, other), |server, client| {
        let to = server.guest.address();
        let mut ends = [
            End { guest: &mut *server.guest, smc: server.smc },
            End { guest: &mut *client.guest, smc: client.smc },
        ];
        for (port, how) in (PORT..).zip(["urgent", "alarm", "full", "killed"]) {
            let words = format!("{to} {port} {how}");
            start(&mut ends[SERVER], SERVER, &words);
            until(&mut ends, SERVER, "ready");
            start(&mut ends[CLIENT], CLIENT, &words);
            match how {
                "urgent" => {}
                "alarm" => drop(until(&mut ends, SERVER, "rang")),
                _ => drop(until(&mut ends, CLIENT, "full")),
            }
            let said = match how {
                "urgent" => [SERVER, CLIENT].map(|at| until(&mut ends, at, how)),
                "alarm" | "full" => {
                    if how == "full" {
                        agree(&mut ends, port);
                    }
                    ends[SERVER].guest.run(": >/tmp/ends-serve-gate");
                    let moved = [SERVER, CLIENT].map(|at| until(&mut ends, at, "moved"));
                    assert_eq!(last(&moved[0]), last(&moved[1]));
                    moved
                }
                _ => {
                    assert_eq!(ends.each_mut().map(|end| end.by_rdma(port)), [1, 1]);
                    let server = &mut ends[SERVER].guest;
                    server.run(&format!("pkill -9 -f 'ends.py serve .* {port}'"));
                    ["killed".into(), until(&mut ends, CLIENT, "reset")]
                }
            };
            println!("  {how}: {} | {}", last(&said[0]), last(&said[1]));
        }
    });
}

fn last(said: &str) -> &str {
    said.lines().last().unwrap_or_default()
}

fn start(end: &mut End, at: usize, words: &str) {
    let (before, role) = (end.smc.how(), ROLES[at]);
    let script = tests_dir().join("programs/python/ends.py");
    let [said, gate] = ["said", "gate"].map(|what| format!("/tmp/ends-{role}-{what}"));
    end.guest.run(&format!(
        "rm -f {gate}; mkfifo {gate}
        {before} python3 {} {role} {words} {gate} >{said} 2>&1 &",
        script.display()
    ));
}

/// Waits until that end has said the word, and gives all that it has said.
fn until(ends: &mut [End; 2], at: usize, word: &str) -> String {
    let said = format!("/tmp/ends-{}-said", ROLES[at]);
    let (status, text) = ends[at].guest.try_run(&format!(
        "for n in $(seq 300); do grep -q ^{word} {said} && break; sleep 0.1; done; cat {said}; grep -q ^{word} {said}"
    ));
    if status != 0 {
        let [server, client] = ends.each_mut().map(|end| state(end, "/tmp/ends-*-said"));
        panic!("{}: {text}\nserver: {server}\nclient: {client}", ROLES[at]);
    }
    text
}

/// Both ends show the same connection by the same link: `usmc ss` and `usmc linkgroup` at ours, what smcss(8) and smcr(8) show at the kernel's.
fn agree(ends: &mut [End; 2], port: u16) {
    let [one, other] = ends.each_mut().map(|end| shown(end, port));
    println!("  {one}");
    let turned = |links: &Value| {
        let links = links.as_array().expect("links").iter().map(|link| {
            let role = if link["role"] == "SERV" { "CLNT" } else { "SERV" };
            json!({"role": role, "id": link["id"], "gid": link["peer_gid"],
                "peer_gid": link["gid"], "conns": link["conns"]})
        });
        links.collect::<Value>()
    };
    assert_eq!(one["links"], turned(&other["links"]), "{one}\n{other}");
    assert_eq!(one["links"].as_array().map(Vec::len), Some(1), "{one}");
    let [near, far] = [0, 1].map(|at| one["sockets"][0][at].clone());
    assert_eq!(
        (&other["sockets"], one["sockets"].as_array().map(Vec::len)),
        (&json!([[far, near]]), Some(1))
    );
}

fn shown(end: &mut End, port: u16) -> Value {
    let parse =
        |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|_| panic!("{text}"));
    if end.smc == Kernels {
        return parse(&end.guest.run(&smcr(&format!("show {port}"))));
    }
    let sockets = end.guest.connections(port).into_iter().filter(|socket| socket.is_smcr());
    let sockets: Value =
        sockets.map(|socket| json!([socket.local_port(), socket.peer_port()])).collect();
    let groups = parse(&end.guest.run("usmc linkgroup --json"));
    let mut links = Vec::new();
    for group in groups.as_array().expect("groups") {
        let all = group["links"].as_array().into_iter().flatten();
        let used = all.filter(|link| link["state"] == "LINK_ACTIVE" && link["conns"] != 0);
        links.extend(used.map(|link| {
            json!({"role": group["role"], "id": link["link_id"], "gid": link["gid"],
                "peer_gid": link["peer_gid"], "conns": link["conns"]})
        }));
    }
    json!({"links": links, "sockets": sockets})
}
