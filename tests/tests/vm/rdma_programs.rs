//! Real programs of two machines by RDMA: under `usmc run` with `usmc agent` at one end, and at the other end again, or in the kernel's SMC.

use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_tests::build::tests_dir;
use usmc_tests::fixture::slowness;
use usmc_tests::vm::Guest;
use usmc_tests::{build, cluster, flag};

use crate::{UEID, test_links_each};

/// Whose SMC a program has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Smc {
    Ours,
    Kernels,
}

use Smc::{Kernels, Ours};

/// The server's end and the client's. The second machine has the kernel's.
const PAIRS: [(Smc, Smc); 3] = [(Ours, Ours), (Kernels, Ours), (Ours, Kernels)];

/// The pairs that a program runs in: all of them by `make test-vm-rdma`, and those few by `make test`.
pub(crate) fn pairs(short: &[(Smc, Smc)]) -> &[(Smc, Smc)] {
    if flag("USMC_TESTS_VM_LONG") { &PAIRS } else { short }
}

/// A machine, and whose SMC the program in it has.
pub(crate) struct End<'a> {
    pub(crate) guest: &'a mut Guest,
    pub(crate) smc: Smc,
}

/// A command that asks something of the kernel's SMC.
pub(crate) fn smcr(words: &str) -> String {
    format!("python3 {} {words}", tests_dir().join("programs/python/smcr.py").display())
}

impl Smc {
    /// What is put before a command.
    pub(crate) fn how(self) -> String {
        match self {
            Ours => "$usmc run --".into(),
            Kernels => format!("env LD_PRELOAD={}", build::program("smc_sockets.so").display()),
        }
    }
}

impl End<'_> {
    fn how(&self) -> String {
        self.smc.how()
    }

    /// How many connections of a server's this end has by RDMA.
    pub(crate) fn by_rdma(&mut self, port: u16) -> usize {
        match self.smc {
            Ours => self.guest.connections(port).iter().filter(|end| end.is_smcr()).count(),
            Kernels => {
                let count = self.guest.run(&smcr(&format!("sockets {port}")));
                count.parse().unwrap_or_else(|_| panic!("{count}"))
            }
        }
    }
}

/// Does that for each pair of ends, the server's first, with an agent in both machines.
pub(crate) fn for_each_pair(
    pairs: &[(Smc, Smc)],
    (one, other): (&mut Guest, &mut Guest),
    act: impl Fn(&mut End, &mut End),
) {
    start_agent(one, "devices = ['rxe0']");
    start_agent(other, "devices = ['rxe0']");
    for_each(pairs, (&mut *one, &mut *other), act);
    end_agent(one);
    end_agent(other);
}

/// Does that for each pair of ends, where the agents run.
pub(crate) fn for_each(
    pairs: &[(Smc, Smc)],
    (one, other): (&mut Guest, &mut Guest),
    act: impl Fn(&mut End, &mut End),
) {
    for &(server, client) in pairs {
        println!("  server {server:?}, client {client:?}");
        let guests =
            if server == Kernels { (&mut *other, &mut *one) } else { (&mut *one, &mut *other) };
        act(&mut End { guest: guests.0, smc: server }, &mut End { guest: guests.1, smc: client });
    }
}

/// Starts a machine's agent, with these lines of its configuration.
pub(crate) fn start_agent(guest: &mut Guest, lines: &str) {
    guest.run(&format!(
        "cat >/tmp/agent.toml <<'END'
ueids = '{UEID}'
[agent]
socket_mode = 666
{lines}
END
        : >/tmp/agent
        $usmc agent --verbose --ism-dir /run/usmc --config /tmp/agent.toml >/tmp/agent 2>&1 &
        until grep -q ready /tmp/agent; do kill -0 $! || {{ cat /tmp/agent; exit 1; }}; sleep 0.1; done"
    ));
}

/// Ends a machine's agent, as no connection is left.
pub(crate) fn end_agent(guest: &mut Guest) {
    let (status, said) = guest.try_run(
        "pkill -x usmc-agent; for n in $(seq 200); do pgrep -x usmc-agent >/dev/null || exit 0; sleep 0.1; done
        cd /proc/$(pgrep -x usmc-agent) && cat wchan stack && grep -E 'State|ctxt' status; exit 1",
    );
    if status != 0 {
        let end = &mut End { guest, smc: Ours };
        panic!("an agent did not end: {said}\n{}", state(end, "/tmp/ends-*-said"));
    }
}

/// Connections of a load are there after this time.
const LONGEST: Duration = Duration::from_secs(60);

/// Runs a client's endless load until so many connections at a time were by RDMA at both ends, and ends it by that signal. Gives what it says.
fn run_by_rdma(
    server: &mut End,
    client: &mut End,
    (port, count): (u16, usize),
    (command, signal): (&str, &str),
) -> String {
    client.guest.run(&format!(
        "rm -f /tmp/done; {{ setsid {command} >/tmp/said 2>&1 || :; touch /tmp/done; }} >/dev/null 2>&1 &
        echo $! >/tmp/load"
    ));
    let mut most = [0, 0];
    let mut ends = |server: &mut End, client: &mut End| {
        most = [most[0].max(server.by_rdma(port)), most[1].max(client.by_rdma(port))];
        most
    };
    let begun = Instant::now();
    while ends(server, client) != [count; 2] {
        let (is_over, _) = client.guest.try_run("[ ! -e /tmp/done ]");
        if is_over != 0 || begun.elapsed() > LONGEST * slowness() {
            let (server, client) = (state(server, ""), state(client, "/tmp/said"));
            panic!("{most:?} of {count} by RDMA\nserver: {server}\nclient: {client}");
        }
    }
    println!("  {count} of {count} connections by RDMA, at both ends");
    client.guest.run(&format!(
        "pkill -{signal} -P $(cat /tmp/load); until [ -e /tmp/done ]; do sleep 0.1; done"
    ));
    client.guest.run("cat /tmp/said")
}

/// What can be told of an end when a test fails; `files`: what programs there have said.
pub(crate) fn state(end: &mut End, files: &str) -> String {
    let links = match end.smc {
        Ours => "usmc linkgroup link-show; usmc linkgroup; cat /tmp/agent".to_owned(),
        Kernels => smcr("links"),
    };
    let (_, said) = end.guest.try_run(&format!(
        "{links}; dmesg | tail -n 20; usmc ss; rdma link; ip -br address; tail -n 20 {files} </dev/null"
    ));
    format!("{:?}\n{said}", end.smc)
}

/// Where bytes are made that are not all alike, in a file.
const DATA: &str = "/tmp/data";
const MAKE_DATA: &str = "head -c 3000001 /dev/urandom >/tmp/data";

/// Connections of clients that were killed end at the server, whatever their kernel has said of that.
fn none_is_left(server: &mut End, port: u16) {
    for _ in 0..300 {
        if server.by_rdma(port) == 0 {
            return;
        }
        server.guest.run("sleep 0.1");
    }
    panic!("{} connections of a dead program: {}", server.by_rdma(port), state(server, ""));
}

/// Redis gets pipelined requests, and a value larger than all buffers.
pub(crate) fn redis(one: &mut Guest, other: &mut Guest) {
    const PORT: u16 = 6400;
    for_each_pair(pairs(&PAIRS[1..]), (one, other), |server, client| {
        let (to, serves, calls) = (server.guest.address(), server.how(), client.how());
        server.guest.run(&format!(
            "{serves} redis-server --bind {to} --port {PORT} --protected-mode no --save '' >/tmp/redis 2>&1 &
            until ss -ltn | grep -q :{PORT}; do sleep 0.1; done"
        ));
        let bench = format!("{calls} redis-benchmark -h {to} -p {PORT} -q -c 10 -t set,get");
        let load = format!("{bench} -d 1000 -l");
        run_by_rdma(server, client, (PORT, 10), (&load, "KILL"));
        none_is_left(server, PORT);
        let said = client.guest.run(&format!("{bench} -n 3000 -P 16 2>&1"));
        let rates = said.split(['\r', '\n']).filter(|line| line.contains("per second"));
        println!("  {}", rates.map(str::trim).collect::<Vec<_>>().join(" "));
        let (status, said) = client.guest.try_run(&format!(
            "{MAKE_DATA}; cli=\"{calls} redis-cli -h {to} -p {PORT}\"
            $cli -x set big <{DATA} >/dev/null; $cli get big >/tmp/got
            head -c 3000001 /tmp/got | cmp - {DATA}"
        ));
        if status != 0 {
            let (server, client) = (state(server, "/tmp/redis"), state(client, ""));
            panic!("{said}\nserver: {server}\nclient: {client}");
        }
        server.guest.run(
            "pkill -x redis-server; while pgrep -x redis-server >/dev/null; do sleep 0.1; done",
        );
    });
}

/// Two agents of one host have a link group each with one kernel. The death of one is nothing to the other.
pub(crate) fn two_agents(one: &mut Guest, other: &mut Guest) {
    const PORT: u16 = 6450;
    const EACH: usize = 3;
    let to = other.address();
    test_links_each(other, 1);
    let server = &mut End { guest: other, smc: Kernels };
    let serves = server.how();
    server.guest.run(&format!(
        "{serves} redis-server --bind {to} --port {PORT} --protected-mode no --save '' >/tmp/redis 2>&1 &
        until ss -ltn | grep -q :{PORT}; do sleep 0.1; done"
    ));
    start_agent(one, "devices = ['rxe0']");
    one.run(
        "grep -v socket_mode /tmp/agent.toml >/tmp/agent2.toml; : >/tmp/agent2
        $usmc agent --verbose --ism-dir /tmp/ism2 --config /tmp/agent2.toml >/tmp/agent2 2>&1 &
        echo $! >/tmp/agent2.pid
        until grep -q ready /tmp/agent2; do kill -0 $! || { cat /tmp/agent2; exit 1; }; sleep 0.1; done",
    );
    for (dir, name) in [("", "first"), ("USMC_ISM_DIR=/tmp/ism2", "second")] {
        one.run(&format!(
            "{dir} $usmc run -- redis-benchmark -h {to} -p {PORT} -q -c {EACH} -t get -l >/tmp/{name} 2>&1 &
            echo $! >/tmp/{name}.pid"
        ));
    }
    let mut until = |one: &mut Guest, count: usize| {
        for _ in 0..100 {
            if server.by_rdma(PORT) == count {
                return;
            }
            server.guest.run("sleep 0.1");
        }
        panic!("{} of {count}: {}", server.by_rdma(PORT), one.run("usmc ss; cat /tmp/agent2"));
    };
    until(one, 2 * EACH);
    // The command shows the links of the directory's agent, and of the host's.
    let links = one.run("usmc linkgroup link-show --ism-dir /tmp/ism2");
    let of_each = format!("LINK_ACTIVE       {EACH}");
    assert_eq!(links.matches(&of_each).count(), 2, "{links}");
    println!("  {} of {0} connections by RDMA, of two agents", 2 * EACH);
    one.run("kill -9 $(cat /tmp/agent2.pid)");
    // The kernel finds out by its test of the link.
    until(one, EACH);
    // The benchmark prints its rate four times a second.
    let [before, after] = [0, 1].map(|_| one.run("sleep 1; wc -c </tmp/first"));
    assert_ne!(before, after, "the first agent's connections stand still");
    one.run("kill $(cat /tmp/first.pid) $(cat /tmp/second.pid) 2>/dev/null || :; while pgrep -x redis-benchmar >/dev/null; do sleep 0.1; done");
    end_agent(one);
    test_links_each(server.guest, 30);
    server
        .guest
        .run("pkill -x redis-server; while pgrep -x redis-server >/dev/null; do sleep 0.1; done");
}

/// nginx has two workers. Its clients keep connections, and fetch a file that it sends by sendfile(2).
pub(crate) fn nginx(one: &mut Guest, other: &mut Guest) {
    const PORT: u16 = 8400;
    for_each_pair(pairs(&[(Kernels, Ours)]), (one, other), |server, client| {
        let (to, serves, calls) = (server.guest.address(), server.how(), client.how());
        server.guest.run(&format!(
            "mkdir -p /tmp/web/www; cd /tmp/web; {MAKE_DATA}; cp {DATA} www/data; head -c 1024 /dev/zero >www/small
            cat >conf <<'END'
worker_processes 2; daemon off; pid pid; error_log stderr warn;
events {{}}
http {{
    access_log off; sendfile on; keepalive_requests 1000000;
    client_body_temp_path b1; proxy_temp_path b2; fastcgi_temp_path b3; uwsgi_temp_path b4; scgi_temp_path b5;
    server {{ listen {to}:{PORT}; root www; }}
}}
END
            chmod -R a+rX /tmp/web; chmod a+rx /tmp
            {serves} nginx -p /tmp/web -c conf >log 2>&1 &
            until ss -ltn | grep -q :{PORT}; do kill -0 $! || {{ cat log; exit 1; }}; sleep 0.1; done"
        ));
        let wrk = format!("{calls} wrk -t1 -c8 -d60s http://{to}:{PORT}/small");
        let said = run_by_rdma(server, client, (PORT, 8), (&wrk, "INT"));
        assert!(!said.contains("errors") && !said.contains("Non-2xx"), "{said}");
        let rate = said.lines().find(|line| line.starts_with("Requests/sec"));
        println!("  {}", rate.unwrap_or_else(|| panic!("{said}")));
        let sum = server.guest.run("sha256sum </tmp/web/www/data");
        let fetched = client.guest.run(&format!(
            "for n in 1 2 3; do {calls} curl -sS http://{to}:{PORT}/data | sha256sum; done | sort -u"
        ));
        assert_eq!(fetched, sum);
        server.guest.run(
            "kill $(cat /tmp/web/pid); while pgrep -x nginx >/dev/null; do sleep 0.1; done
            ! grep -E 'alert|crit' /tmp/web/log && rm -r /tmp/web",
        );
    });
}

/// What an end of ours does half-way (tests/programs/python/moves.py), and what its peer does then.
const MOVES: [(&str, &str); 7] = [
    ("stay", "stay"),
    ("fork", "stay"),
    ("share", "stay"),
    ("exec", "stay"),
    ("pass", "stay"),
    ("end", "stay"),
    ("reset", "expect"),
];

/// Bytes both ways at a time, by odd sizes, through a process that changes half-way.
pub(crate) fn moves(one: &mut Guest, other: &mut Guest) {
    for_each_pair(pairs(&[(Kernels, Ours)]), (one, other), |server, client| {
        let mut port = 9300;
        for (ours, theirs) in MOVES {
            // Each end of ours does it once.
            for is_server in [true, false] {
                if [client.smc, server.smc][usize::from(is_server)] == Kernels {
                    continue;
                }
                port += 1;
                let hows = if is_server { [ours, theirs] } else { [theirs, ours] };
                move_both(server, client, port, hows);
            }
        }
    });
}

fn move_both(server: &mut End, client: &mut End, port: u16, hows: [&str; 2]) {
    const BYTES: usize = 1_500_007;
    let to = server.guest.address();
    let start = |end: &mut End, role: &str, how: &str, word: &str| {
        let [said, gate] = ["said", "gate"].map(|what| format!("/tmp/moves-{role}-{what}"));
        let (before, script) = (end.how(), tests_dir().join("programs/python/moves.py"));
        end.guest.run(&format!(
            "rm -f {gate}; mkfifo {gate}; : >{said}
            {before} python3 {} {role} {to} {port} {how} {BYTES} {gate} >{said} 2>&1 &
            until grep -q {word} {said}; do kill -0 $! || {{ cat {said}; exit 1; }}; sleep 0.1; done",
            script.display()
        ));
    };
    start(server, "serve", hows[0], "ready");
    start(client, "call", hows[1], "half");
    let until = |end: &mut End, role: &str, word: &str| {
        end.guest.run(&format!(
            "for n in $(seq 300); do grep -q {word} /tmp/moves-{role}-said && break; sleep 0.1; done
            cat /tmp/moves-{role}-said; grep -q {word} /tmp/moves-{role}-said"
        ))
    };
    until(server, "serve", "half");
    assert_eq!((server.by_rdma(port), client.by_rdma(port)), (1, 1), "{hows:?}");
    server.guest.run(": >/tmp/moves-serve-gate");
    client.guest.run(": >/tmp/moves-call-gate");
    let moved = |end: &mut End, role: &str| {
        let said = until(end, role, "moved");
        let line = said.lines().find(|line| line.starts_with("moved")).expect("it was looked for");
        let words: Vec<_> = line.split(' ').collect();
        [words[1], words[3]].map(|word| word.parse::<usize>().expect("a number"))
    };
    let (served, called) = (moved(server, "serve"), moved(client, "call"));
    println!("  {hows:?}: {served:?} {called:?}");
    match hows {
        ["reset", _] | [_, "reset"] => {}
        ["end", _] => assert_eq!((served[0], called[0]), (BYTES, served[1])),
        [_, "end"] => assert_eq!((called[0], served[0]), (BYTES, called[1])),
        _ => assert_eq!((served[0], called[0]), (BYTES, BYTES)),
    }
}

/// PostgreSQL forks a process for each connection.
pub(crate) fn postgresql(one: &mut Guest, other: &mut Guest) {
    if build::postgres_dir().is_none() {
        println!("skipped: PostgreSQL is not installed");
        return;
    }
    for_each_pair(pairs(&[(Ours, Kernels)]), (one, other), |server, client| {
        let address = server.guest.address();
        let user = cluster::USER;
        let as_user =
            |how: String| format!("setpriv --reuid {user} --regid {user} --clear-groups {how}");
        let (serves, calls) = (as_user(server.how()), as_user(client.how()));
        cluster::serve(server.guest, &serves);
        cluster::fill(client.guest, &calls, &address);
        let load = cluster::pgbench(&calls, &address, "-n -S -T 60 -c 4");
        run_by_rdma(server, client, (cluster::PORT, 4), (&load, "TERM"));
        cluster::load(client.guest, &calls, &address, "-N -t 20", |_| 0);
        cluster::end(server.guest);
    });
}

/// What a program has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Carrier {
    Tcp,
    Smc(Smc),
}

const CARRIERS: [Carrier; 3] = [Carrier::Tcp, Carrier::Smc(Kernels), Carrier::Smc(Ours)];

impl Carrier {
    fn how(self) -> String {
        match self {
            Carrier::Tcp => String::new(),
            Carrier::Smc(smc) => smc.how(),
        }
    }
}

/// A load, whose one figure is better the higher it is.
struct Load {
    name: &'static str,
    /// The port of the server of the first carrier; the others' follow.
    port: u16,
    client: &'static str,
    /// Of what it prints, where the number stands: behind the first word, before the second.
    figure: (&'static str, &'static str),
}

/// Brief connections of each run of the load that leaves them to uSMC.
const BRIEF: u64 = 600;

const LOADS: [Load; 7] = [
    Load {
        name: "round trips of 14 B, 1 connection, per second",
        port: 6410,
        client: "redis-benchmark -h 10.0.0.2 -p PORT -q -c 1 -n 1500 -t get",
        figure: ("GET: ", " requests per second"),
    },
    Load {
        name: "round trips of 14 B, 10 connections, per second",
        port: 6410,
        client: "redis-benchmark -h 10.0.0.2 -p PORT -q -c 10 -n 3000 -t get",
        figure: ("GET: ", " requests per second"),
    },
    Load {
        name: "requests of 14 B, 10 connections, 16 at a time, per second",
        port: 6410,
        client: "redis-benchmark -h 10.0.0.2 -p PORT -q -c 10 -n 20000 -P 16 -t get",
        figure: ("GET: ", " requests per second"),
    },
    Load {
        name: "values of 64 KB, 1 connection, per second",
        port: 6410,
        client: "redis-benchmark -h 10.0.0.2 -p PORT -q -c 1 -n 300 -d 65536 -t set",
        figure: ("SET: ", " requests per second"),
    },
    Load {
        name: "connections with one request, per second: of uSMC most stay TCP",
        port: 6410,
        client: "redis-benchmark -h 10.0.0.2 -p PORT -q -c 1 -n 600 -k 0 -t ping_mbulk",
        figure: ("PING_MBULK: ", " requests per second"),
    },
    Load {
        name: "connections with one request, per second, each by RDMA",
        port: 6410,
        client: "env USMC_CHANGE_OVER=at-once redis-benchmark -h 10.0.0.2 -p PORT -q -c 1 -n 150 -k 0 -t ping_mbulk",
        figure: ("PING_MBULK: ", " requests per second"),
    },
    Load {
        name: "a stream in messages of 64000 B, MB per second",
        port: 6420,
        client: "sockperf tp --tcp -i 10.0.0.2 -p PORT -m 64000 -t 3",
        figure: ("BandWidth is ", " MBps"),
    },
];

/// Ten connections to a carrier's redis are where they are to be, at both ends.
fn assert_carried(server: &mut Guest, client: &mut Guest, port: u16, carrier: Carrier) {
    let load =
        format!("{} redis-benchmark -h 10.0.0.2 -p {port} -q -c 10 -t get -l", carrier.how());
    // A program that has neither has nothing but TCP.
    if let Carrier::Smc(smc) = carrier {
        let (mut server, mut client) = (End { guest: server, smc }, End { guest: client, smc });
        run_by_rdma(&mut server, &mut client, (port, 10), (&load, "KILL"));
    }
}

/// Round trips of 14 B per second by verbs alone, without any of SMC: what the devices of these machines give at best. The first tool
/// sleeps until a message has come, the second one looks at memory all the time, on the only processor.
const VERBS: [(&str, &str); 2] =
    [("SEND, asleep", "ib_send_lat -e"), ("WRITE, awake", "ib_write_lat")];

/// `None`: the tool did not come to its end, as now and then over soft-RoCE (its completion queue was full).
fn by_verbs(server: &mut Guest, client: &mut Guest, tool: &str) -> Option<f64> {
    let gids = "/sys/class/infiniband/rxe0/ports/1/gids";
    let gid = format!("$(grep -l ffff:0a00 {gids}/* | head -1 | xargs basename)");
    let tool = format!("timeout 20 {tool} -d rxe0 -x {gid} -s 14 -n 1000 -F");
    server.run(&format!(
        "{tool} >/tmp/verbs 2>&1 & until ss -ltn | grep -q :18515; do sleep 0.1; done"
    ));
    let (_, said) = client.try_run(&format!("{tool} 10.0.0.2 2>&1"));
    server.run("pkill '^ib_' || :; while pgrep '^ib_' >/dev/null; do sleep 0.1; done");
    // Bytes, iterations, and half a round trip in microseconds: the least, the most, the median.
    let mut words = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = words.find(|words| words.first() == Some(&"14"));
    let half = line.and_then(|words| words.get(4)?.parse::<f64>().ok());
    half.map(|half| 500_000.0 / half)
}

/// The median, the least and the most.
fn spread(figures: &mut [f64]) -> [f64; 3] {
    figures.sort_by(f64::total_cmp);
    [figures[figures.len() / 2], figures[0], figures[figures.len() - 1]]
}

/// TCP, the kernel's SMC and the engine in turn, in the same machines.
pub(crate) fn speed(one: &mut Guest, other: &mut Guest) {
    const ROUNDS: usize = 3;
    for_each_pair(&PAIRS[..1], (one, other), |server, client| {
        // The first machine serves there.
        let (server, client) = (&mut client.guest, &mut server.guest);
        for (port, carrier) in (6410..).zip(CARRIERS) {
            server.run(&format!(
                "{} redis-server --bind 10.0.0.2 --port {port} --protected-mode no --save '' >/dev/null 2>&1 &
                {} sockperf sr --tcp -i 10.0.0.2 -p {} >/dev/null 2>&1 &
                for port in {port} {}; do until ss -ltn | grep -q :$port; do sleep 0.1; done; done",
                carrier.how(), carrier.how(), port + 10, port + 10
            ));
        }
        for (port, carrier) in (6410..).zip(CARRIERS) {
            assert_carried(server, client, port, carrier);
        }
        let only = std::env::var("USMC_TESTS_VM_LOAD").unwrap_or_default();
        let loads = LOADS.iter().enumerate().filter(|(_, load)| load.name.contains(&only));
        assert!(loads.clone().count() > 0, "USMC_TESTS_VM_LOAD: {only} is in no load's name");
        for (at, load) in loads {
            let mut verbs = [const { Vec::new() }; VERBS.len()];
            let mut figures = [const { Vec::new() }; CARRIERS.len()];
            for _ in 0..ROUNDS {
                for ((port, carrier), figures) in (load.port..).zip(CARRIERS).zip(&mut figures) {
                    let command = load.client.replace("PORT", &port.to_string());
                    let said = client.run(&format!("{} {command} 2>&1", carrier.how()));
                    let figure = said.rsplit_once(load.figure.1).map(|(before, _)| before);
                    let figure = figure.and_then(|before| before.rsplit_once(load.figure.0));
                    let figure = figure.and_then(|(_, figure)| figure.trim().parse::<f64>().ok());
                    figures.push(figure.unwrap_or_else(|| panic!("{command}: {said}")));
                }
                // Beside the first load, which is round trips, too.
                for ((_, tool), figures) in VERBS.iter().zip(&mut verbs).filter(|_| at == 0) {
                    figures.extend(by_verbs(server, client, tool));
                }
            }
            println!("  {}", load.name);
            let mut medians = Vec::new();
            for (carrier, figures) in CARRIERS.iter().zip(&mut figures) {
                let [median, least, most] = spread(figures);
                medians.push(median);
                println!("    {carrier:?}: {median:.1} ({least:.1} to {most:.1})");
            }
            let measured = VERBS.iter().zip(&mut verbs).filter(|(_, figures)| !figures.is_empty());
            for ((name, _), figures) in measured {
                let [median, least, most] = spread(figures);
                println!("    verbs, {name}: {median:.1} ({least:.1} to {most:.1})");
            }
            println!(
                "    uSMC {:.2} of TCP, {:.2} of the kernel's SMC",
                medians[2] / medians[0],
                medians[2] / medians[1]
            );
        }
        // What uSMC's servers have counted of all runs.
        let stats: Value = serde_json::from_str(&server.run("usmc stats --json")).expect("JSON");
        let devices = stats["devices"].as_array().expect("an array");
        let count = |what: &str| {
            devices.iter().map(|of| of[what]["server"].as_u64().expect("a count")).sum::<u64>()
        };
        let [smc, tcp] = ["smc_connections", "tcp_fallback"].map(count);
        println!("  {smc} of {} connections of uSMC's servers by RDMA", smc + tcp);
        // What stays TCP are brief ones, behind those from which the client learns it.
        assert!(
            !only.is_empty() || smc > 500 && tcp > 0 && tcp < ROUNDS as u64 * (BRIEF - 16),
            "{stats}"
        );
        server.run("pkill -x redis-server; pkill -x sockperf; while pgrep -x 'redis-server|sockperf' >/dev/null; do sleep 0.1; done");
    });
}
