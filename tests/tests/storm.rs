//! Random kills, stops, forks and execs among processes that move streams. What survives is whole, what was hit
//! ends, and nothing is left. `USMC_STORM` says how many events, `USMC_STORM_SEED` repeats the draws.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use usmc_tests::fixture::{DEVICE_PREFIX, slowness};
use usmc_tests::region::{self, Hosts};
use usmc_tests::storm::{
    CHILD, CLIENT, Crowd, Handle, Header, Member, PROTECTED, ROOT, Size, Table, WORKER,
};
use usmc_tests::{Draw, Fixture, Process, build, is_plain, number, ss};

/// One that the harness started, and starts again.
struct Started {
    process: Process,
    role: &'static str,
    service: usize,
    protected: bool,
}

/// The streams are looked at after so many events.
const LOOK_EACH: u64 = 20;

#[derive(Default, Debug)]
struct Counts {
    kills: u64,
    stops: u64,
    whole: u64,
    hit: u64,
}

/// Where servers run, and where clients do, if these are different hosts.
const SERVERS: usize = 0;
const CLIENTS: usize = 1;

struct Storm {
    fixture: Fixture,
    /// With a region in common; `None`: one host.
    hosts: Option<Hosts>,
    table: Table,
    crowd: Crowd,
    ports: [u16; 2],
    started: Vec<Started>,
    stopped: Vec<(Handle, Instant)>,
    judged: u64,
    /// Ends of connections that were seen in the region, and all that were seen.
    inside: (usize, usize),
    counts: Counts,
}

impl Storm {
    fn new(fixture: Fixture, hosts: Option<Hosts>, seed: u64) -> Storm {
        let table = Table::create(&fixture.scratch().join("table"), seed);
        let crowd = Crowd::new(fixture.marker());
        let ports = [fixture.port(), fixture.port()];
        let mut storm = Storm {
            fixture,
            hosts,
            table,
            crowd,
            ports,
            started: Vec::new(),
            stopped: Vec::new(),
            judged: 0,
            inside: (0, 0),
            counts: Counts::default(),
        };
        // The first server may be killed, the second lives.
        for (role, service, protected) in [
            ("server", 0, false),
            ("server", 1, true),
            ("single", 0, true),
            ("many", 0, true),
            ("single", 0, false),
            ("many", 0, false),
            ("single", 1, false),
            ("many", 1, false),
        ] {
            let process = storm.start(role, service, protected);
            storm.started.push(Started { process, role, service, protected });
        }
        storm
    }

    /// Of the tests' own programs, or one by its path.
    fn command(&self, host: usize, program: &str) -> Command {
        let mut command = match program.starts_with('/') {
            true => self.fixture.command(program),
            false => self.fixture.command(build::program(program)),
        };
        if let Some(hosts) = &self.hosts {
            hosts.dress_for_region(host, &mut command);
        }
        command
    }

    fn start(&self, role: &str, service: usize, protected: bool) -> Process {
        let mut command = self.command(if role == "server" { SERVERS } else { CLIENTS }, "storm");
        let table = self.fixture.scratch().join("table");
        let (port, service) = (self.ports[service].to_string(), service.to_string());
        command.arg(role).arg(table).args([
            &port[..],
            &service,
            if protected { "1" } else { "0" },
            "0",
        ]);
        self.fixture.spawn(command)
    }

    fn events(&self) -> u64 {
        let made = self.table.get(Header::Forks) + self.table.get(Header::Execs);
        self.counts.kills + self.counts.stops + made
    }

    fn kill(&mut self, victim: &Member) {
        let Some(handle) = self.crowd.handle(victim) else { return };
        handle.kill(&self.table, victim);
        self.counts.kills += 1;
        let Some(at) = self.started.iter().position(|s| s.process.pid() == victim.pid) else {
            return;
        };
        self.started[at].process.wait();
        let Started { role, service, protected, .. } = self.started[at];
        self.started[at].process = self.start(role, service, protected);
    }

    fn stop(&mut self, victim: &Member, until: Instant) {
        if let Some(handle) = self.crowd.handle(victim) {
            handle.signal(libc::SIGSTOP);
            self.counts.stops += 1;
            self.stopped.push((handle, until));
        }
    }

    fn go_on(&mut self, now: Option<Instant>) {
        self.stopped.retain(|(handle, until)| {
            let goes_on = now.is_none_or(|now| now >= *until);
            if goes_on {
                handle.signal(libc::SIGCONT);
            }
            !goes_on
        });
    }

    /// Where the streams are, between hosts.
    fn look(&mut self) {
        let Some(hosts) = &self.hosts else { return };
        let mut ends = ss::list();
        ends.retain(|end| {
            self.ports.iter().any(|port| {
                end.peer_port() == *port || end.local_port() == *port && end.peer_port() != 0
            })
        });
        self.inside.0 += hosts.count(&ends);
        self.inside.1 += ends.len();
    }

    fn rage(&mut self, draw: &mut Draw, events: u64) {
        let mut looked = self.events();
        // Half of them from outside; forks and execs come by themselves.
        while self.events() < events || self.counts.kills + self.counts.stops < events / 2 {
            let members = self.crowd.refresh(&self.table).to_vec();
            let mut of = |role: u64| {
                let some: Vec<Member> =
                    members.iter().copied().filter(|m| m.role == role).collect();
                draw.pick(&some)
            };
            let (root, worker, client, child) = (of(ROOT), of(WORKER), of(CLIENT), of(CHILD));
            let anybody = draw.pick(&members);
            let pause = |draw: &mut Draw, most| Duration::from_micros(draw.below(most));
            match draw.weighted(&[(2, 0), (10, 1), (12, 2), (26, 3), (30, 4), (20, 5)]) {
                0 => root.iter().for_each(|m| self.kill(m)),
                1 => worker.iter().for_each(|m| self.kill(m)),
                2 => client.iter().for_each(|m| self.kill(m)),
                3 => child.iter().for_each(|m| self.kill(m)),
                4 if self.stopped.len() < 4 => {
                    // Senders fill what they have towards a receiver that is stopped for long, and some leave the ring.
                    let most = if draw.below(16) == 0 { 1_500_000 } else { 20_000 };
                    let until = Instant::now() + pause(draw, most);
                    anybody.iter().for_each(|m| self.stop(m, until));
                }
                _ => {}
            }
            // The point is the instant, not to wait for something.
            thread::park_timeout(pause(draw, 3000));
            if self.events() > looked + LOOK_EACH {
                looked = self.events();
                self.look();
            }
            self.go_on(Some(Instant::now()));
        }
        self.go_on(None);
    }

    /// Lets all streams come to their end, and looks at them.
    fn calm(&mut self) {
        self.table.put(Header::Pause, 1);
        let until = Instant::now() + Duration::from_secs(90) * slowness();
        loop {
            let mut left = self.crowd.refresh(&self.table).to_vec();
            left.retain(|m| m.busy > 0 || m.role == CHILD);
            let awaited = self.crowd.awaited(&self.table);
            if left.is_empty() && awaited.is_empty() {
                break;
            }
            let late = Instant::now() > until;
            assert!(!late, "streams go on for ever: {left:?}, {awaited:?} are awaited");
            thread::park_timeout(Duration::from_millis(1));
        }
        let made = self.table.get(Header::Streams);
        for number in self.judged + 1..=made {
            match self.table.judge(number) {
                Ok(true) => self.counts.whole += 1,
                Ok(false) => self.counts.hit += 1,
                Err(wrong) => panic!("{wrong}"),
            }
        }
        self.judged = made;
    }

    fn sizes(&mut self) -> Vec<(u64, i32, Size)> {
        let mut members = self.crowd.refresh(&self.table).to_vec();
        members.retain(|m| m.role & PROTECTED != 0);
        members.iter().map(|m| (m.role, m.pid, Size::of(m.pid))).collect()
    }

    fn end(mut self) {
        self.table.put(Header::Stop, 1);
        for started in &mut self.started {
            if started.role == "server" {
                started.process.terminate();
            }
            started.process.succeed();
        }
        self.started.clear();
        // Whoever comes next sweeps what the dead left.
        let mut sink = self.command(SERVERS, "load");
        sink.arg("sink");
        let mut sink = self.fixture.spawn(sink);
        let port = sink.line_after("port");
        let mut source = self.command(CLIENTS, "load");
        source.args(["source", &port, "3000000"]);
        self.fixture.run(source);
        sink.succeed();
        assert_nothing_is_left(self.fixture.ism_dir());
        if let Some(hosts) = &self.hosts {
            // Both of these two may have left what they had in common to the other one. A process that joins takes it up.
            for host in [SERVERS, CLIENTS] {
                let mut joins = self.command(host, "/usr/bin/python3");
                joins.args(["-c", "import socket; socket.create_server(('127.0.0.1', 0))"]);
                self.fixture.run(joins);
            }
            [SERVERS, CLIENTS].iter().for_each(|host| assert_nothing_is_left(hosts.ism_dir(*host)));
            let shown = hosts.shown();
            let region::Lost { text, of_forks } = region::lost(hosts.region());
            println!("{of_forks} units are left by kills in the middle of forks");
            let [free, units] = ["free", "units"].map(|name| shown[name].as_u64().expect(name));
            assert_eq!(free + of_forks, units, "units are lost: {shown}\n{text}");
            assert!(of_forks <= units / 16, "{of_forks} units are left: {text}");
        }
        self.fixture.finish();
    }
}

fn assert_nothing_is_left(dir: &Path) {
    let left: Vec<_> = fs::read_dir(dir).expect("a device").flatten().collect();
    assert!(
        left.iter().all(|f| f.file_name() == *format!("{DEVICE_PREFIX}device")),
        "left in the ISM directory: {left:?}"
    );
}

/// What lives through it all has served and made a few connections more than before, at most.
fn assert_nothing_piled_up(before: &[(u64, i32, Size)], after: &[(u64, i32, Size)]) {
    assert_eq!(before.len(), after.len(), "{before:?}, {after:?}");
    for ((role, pid, old), (_, same, new)) in before.iter().zip(after) {
        println!("role {role}: {old:?}\n    then {new:?}");
        let same = pid == same && old.threads == new.threads;
        let few = new.fds <= old.fds + 4 && new.segments <= old.segments + 4;
        // Two far parts may be in use, or not given back yet.
        let small = new.mappings <= old.mappings + 24 && new.resident <= 2 * old.resident + 12288;
        assert!(same && few && small, "role {role} has grown from {old:?} to {new:?}");
    }
}

#[test]
fn streams_survive_or_end_and_nothing_is_left() {
    let events = number("USMC_STORM", 1000);
    let fixture = Fixture::with_limit("storm", Duration::from_secs(150 + events / 5));
    let storm = blow(fixture, None, events);
    assert!(storm.table.get(Header::Full) > 0, "no ring was filled");
    storm.end();
}

/// Servers on one host and clients on another. The region has room for all of them, so that a stream is in the ring mostly.
#[test]
fn streams_of_two_hosts_survive_or_end_and_no_unit_is_lost() {
    if is_plain() {
        return;
    }
    let events = number("USMC_STORM", 1000) / 4;
    let fixture = Fixture::with_limit("storm in a region", Duration::from_secs(150 + events / 5));
    let hosts = Hosts::new(&fixture, 2, 256 << 20);
    let storm = blow(fixture, Some(hosts), events);
    let (inside, ends) = storm.inside;
    println!("{inside} of {ends} ends in the region");
    assert!(inside * 4 > ends, "the streams went by TCP");
    storm.end();
}

/// So many events.
fn blow(fixture: Fixture, hosts: Option<Hosts>, events: u64) -> Storm {
    let mut draw = Draw::announced("USMC_STORM_SEED");
    let begun = Instant::now();
    let mut storm = Storm::new(fixture, hosts, draw.below(1 << 30));
    storm.rage(&mut draw, events / 4);
    storm.calm();
    let before = storm.sizes();
    storm.table.put(Header::Pause, 0);
    storm.rage(&mut draw, events);
    storm.calm();
    assert_nothing_piled_up(&before, &storm.sizes());
    let full = storm.table.get(Header::Full);
    println!(
        "{} events in {:?}: {:?}, {} forks, {} execs, {} of them refused, {full} sends into far parts",
        storm.events(),
        begun.elapsed(),
        storm.counts,
        storm.table.get(Header::Forks),
        storm.table.get(Header::Execs),
        storm.table.get(Header::Refused),
    );
    storm
}
