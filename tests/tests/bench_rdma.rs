//! `usmc bench --rdma` and `--serve` between two hosts with agents, by the fake libibverbs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use usmc_tests::rdma::world::{CLIENT, SERVER, World};
use usmc_tests::{Fixture, Process, is_plain, procfs};

/// What is measured runs for so long, and several programs start and end.
const LIMIT: Duration = Duration::from_secs(150);

/// Two hosts, and where one serves.
struct Bench {
    world: World,
    at: String,
}

impl Bench {
    fn new(name: &str) -> Bench {
        let world = World::with(Fixture::with_limit(name, LIMIT), [&[], &[]]);
        let at = format!("{}:{}", world.hosts.address(SERVER), world.fixture.port());
        Bench { world, at }
    }

    /// A directory for the files of what runs at a host.
    fn temporary(&self, host: usize) -> PathBuf {
        let dir = self.world.fixture.scratch().join(format!("temporary{host}"));
        fs::create_dir_all(&dir).expect("our own directory");
        dir
    }

    fn command(&self, host: usize, words: &[&str]) -> Command {
        let mut command = self.world.usmc(host, words);
        command.env("TMPDIR", self.temporary(host));
        command
    }

    fn serves(&self) -> Process {
        let mut server =
            self.world.fixture.spawn(self.command(SERVER, &["bench", "--serve", &self.at]));
        assert!(server.line().contains(&format!("usmc bench --vm {}`, or --rdma", self.at)));
        server
    }

    fn measures(&self, words: &[&str]) -> Process {
        let words = [&["bench", "--rdma", &self.at], words].concat();
        self.world.fixture.spawn(self.command(CLIENT, &words))
    }

    /// Why nothing is measured.
    fn refusal(&self, words: &[&str]) -> String {
        let mut bench = self.measures(words);
        assert_eq!(bench.wait().code(), Some(1), "{}", bench.errors());
        bench.errors()
    }

    fn end(self, mut server: Process) {
        server.signal(libc::SIGINT);
        assert!(server.wait().success(), "{}", server.errors());
        for host in [CLIENT, SERVER] {
            assert!(is_empty(&self.temporary(host)), "files of host {host}");
        }
        self.world.end();
    }
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).expect("our own directory").next().is_none()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// How many ends of connections a case has at least, and how many operations of it one post carries at most.
type Expected = (&'static str, u64, f64);

const CASES: [Expected; 5] = [
    ("pingpong/14B/blocking", 2, 1.0),
    ("pingpong/14B/blocking/awake", 2, 1.0),
    // An operation is a kilobyte, of which a ring holds many.
    ("stream/64KB/blocking", 2, 1000.0),
    ("connect/c1-t1", 2, 1.0),
    // A post carries what several of 50 connections have to say.
    ("redis/c50", 100, 100.0),
];

#[test]
fn figures_between_two_hosts_are_of_rdma_and_agents_say_what_it_took() {
    if is_plain() {
        return;
    }
    let bench = Bench::new("bench by RDMA");
    let server = bench.serves();
    let fixture = &bench.world.fixture;
    let file = fixture.scratch().join("json");
    let shown = file.to_string_lossy();
    let options = ["--rounds", "1", "--duration", "1", "--json", &shown];
    let workloads = ["pingpong", "stream", "connect", "redis/c50"];
    let mut measured = bench.measures(&[&options[..], &workloads].concat());
    let is_measured = measured.wait().success();
    let [here, there] = [CLIENT, SERVER].map(|host| bench.world.says(host, &["stats"]));
    assert!(is_measured, "{}\n{here}\n{there}", measured.errors());
    let table = measured.succeed();
    let record: Value =
        serde_json::from_slice(&fs::read(&file).expect("the figures")).expect("JSON");
    assert_eq!((&record["failed"], &record["skipped"]), (&json!([]), &json!([])), "{record}");
    let cases = record["cases"].as_array().expect("cases");
    let names: Vec<&str> = cases.iter().filter_map(|case| case["name"].as_str()).collect();
    assert_eq!(names, CASES.map(|(name, ..)| name));
    for (case, (name, ends, per_post)) in cases.iter().zip(CASES) {
        for measure in case["measures"].as_array().expect("measures") {
            for mode in ["tcp", "usmc"] {
                assert!(number(&measure["figures"][mode]["median"]) > 0.0, "{name}: {measure}");
            }
        }
        let [tcp, usmc] = ["tcp", "usmc"].map(|mode| &case["proof"][mode]);
        assert_eq!((&tcp["smcd_ends"], &tcp["smcr_ends"]), (&json!(0), &json!(0)), "{name}");
        assert!(usmc["smcr_ends"].as_u64() >= Some(ends), "{name}: {usmc}");
        assert_eq!(usmc["smcr_ends"], usmc["smcd_ends"], "{name}: {usmc}");
        assert_eq!(usmc["smcr_ends"], usmc["ends"], "{name}: {usmc}");
        assert_eq!(usmc["region_ends"], 0, "{name}: {usmc}");
        println!("{} of {} ends of {name} by RDMA", usmc["smcr_ends"], usmc["ends"]);

        let agents = &case["agents"];
        let [posts, requests, completions, messages, bytes] =
            ["posts", "requests", "completions", "messages", "tx_bytes"]
                .map(|counter| number(&agents[counter]["run"]["median"]));
        assert!(posts > 0.0 && completions > 0.0 && bytes > 0.0, "{name}: {agents}");
        assert!(posts <= requests, "{name}: {agents}");
        // What was under way at the beginning and at the end of the run: 16 of each host's link at most. Messages that have come wait in
        // 48 receives of each, and one host is asked after the other, while connections end.
        assert!((posts - completions).abs() <= 32.0, "{name}: {agents}");
        assert!((posts - messages).abs() <= 96.0 + 2.0 * ends as f64, "{name}: {agents}");
        let each = number(&agents["posts"]["each"]["median"]);
        assert!(each >= 0.9 / per_post, "{name}: {agents}");
        assert_eq!(number(&agents["failures"]["run"]["median"]), 0.0, "{name}: {agents}");
        let cpu = |mode: &str, part: &str| case["cpu"][mode][part]["median"].as_f64();
        assert!(cpu("usmc", "agents_ns") > Some(0.0), "{name}: {}", case["cpu"]);
        assert_eq!(cpu("tcp", "agents_ns"), None, "{name}: {}", case["cpu"]);
        let frames = |mode: &str| number(&case["frames"][mode]["run"]["median"]);
        // By the fake nothing goes over the network but what TCP needs for connections: of those that last, and of the others.
        let is_so = if name.starts_with("connect") {
            frames("usmc") > 0.0
        } else {
            frames("usmc") < frames("tcp")
        };
        assert!(is_so && frames("tcp") > 0.0, "{name}: {case}");
        println!("{name}: {agents}");
    }
    // Both ends of each connection, and those of two others: one is under way at the beginning of the run, and one at its end.
    let ends = &cases[3]["agents"]["established"];
    let [run, each] = ["run", "each"].map(|of| number(&ends[of]["median"]));
    let others = run - 2.0 * (run / each);
    assert!((-0.5..4.5).contains(&others), "{ends}");
    for words in ["posts, WRs and completions of agents", "server: TCP → uSMC, + agents", "Agents:"]
    {
        assert!(table.contains(words), "{words} in {table}");
    }
    println!("{table}");
    assert!(procfs::children(server.pid()).is_empty(), "servers");
    bench.end(server);
}

#[test]
fn nothing_is_measured_without_an_agent_or_by_something_else() {
    if is_plain() {
        return;
    }
    let mut bench = Bench::new("bench without agents");
    let server = bench.serves();
    let quick = ["--rounds", "1", "--duration", "0.1", "pingpong/14B/blocking"];
    let list = bench.world.says(CLIENT, &["bench", "--rdma", &bench.at, "--list"]);
    assert!(list.contains("connect/c1-t1") && !list.contains("fanin"), "{list}");
    for option in ["--all", "--beside=1", "--cores=1", "--vm=10.0.0.1", "--profile=latency"] {
        let mut refused = bench.measures(&[option]);
        assert_eq!(refused.wait().code(), Some(2), "{option}: {}", refused.errors());
    }

    // Programs of the client's host that do not know the other one stay TCP.
    let words = [&["bench", "--rdma", &bench.at], &quick[..]].concat();
    let mut alone = bench.command(CLIENT, &words);
    alone.env_remove("USMC_PEERS");
    let mut alone = bench.world.fixture.spawn(alone);
    assert_eq!(alone.wait().code(), Some(1), "{}", alone.errors());
    let said = alone.errors();
    assert!(said.contains("the run was not by RDMA") && said.contains("usmc check"), "{said}");

    bench.world.stop(SERVER);
    let said = bench.refusal(&quick);
    assert!(said.contains("in the other machine: no agent answers for"), "{said}");
    assert!(said.contains("start `usmc agent`"), "{said}");
    bench.world.stop(CLIENT);
    let said = bench.refusal(&quick);
    let own = bench.world.hosts.ism_dir(CLIENT).display().to_string();
    assert!(said.contains(&format!("no agent answers for {own}; start `usmc agent`")), "{said}");
    bench.end(server);
}
