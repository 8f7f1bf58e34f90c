//! Three virtual machines and this host, whose programs stream to each other while any of them is killed, stands still, loses its power
//! or its device, and the server of their memory is started anew. `USMC_TESTS_VM_ROUNDS` says how often, `USMC_TESTS_VM_SEED` repeats the draws.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_tests::ivshmem::Manager;
use usmc_tests::lan::Lan;
use usmc_tests::vm::{self, Guest};
use usmc_tests::{Draw, Fixture, Process, build, is_plain, number, region, ss};

/// Virtual machines; the host is one place more.
const GUESTS: usize = 3;
/// The host's number among the places, and in its address.
const HOST: usize = GUESTS + 1;
const PORT: u16 = 9000;
/// Bytes of either region: a power of two.
const SIZE: &str = "64M";
/// How long a program may make no step: TCP's own patience with a machine that is gone, and an emulated machine's.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a program of a place has counted (tests/programs/guests/churn.c).
#[derive(Clone, Copy, Default, Debug)]
struct Counts {
    whole: u64,
    ended: u64,
    steps: u64,
}

struct World {
    fixture: Fixture,
    lan: Lan,
    region: PathBuf,
    guest_socket: PathBuf,
    host_socket: PathBuf,
    manager: Manager,
    listeners: [UnixListener; 2],
    server: Option<Process>,
    guests: Vec<Guest>,
    taps: Vec<String>,
    /// The host's server and client.
    own: Vec<Process>,
    /// What earlier programs of the places have counted.
    before: Counts,
}

fn usmc(args: &[&str]) -> String {
    let out = Command::new(build::usmc()).args(args).output().expect("usmc");
    assert!(out.status.success(), "usmc {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

impl World {
    fn new(rounds: u64) -> World {
        build::usmc();
        build::program("guests");
        let fixture = Fixture::with_limit("three guests", Duration::from_secs(300 + 40 * rounds));
        let region = fixture.ism_dir().join("region");
        usmc(&["region", "init", text(&region), "--size", SIZE]);
        let [guest_socket, host_socket] =
            ["server", "hosts"].map(|name| fixture.scratch().join(name));
        let listeners =
            [&guest_socket, &host_socket].map(|path| UnixListener::bind(path).expect("a socket"));
        let manager = Manager::new(fixture.scratch());
        let lan = Lan::new(HOST);
        let taps: Vec<String> = (1..=GUESTS).map(|number| lan.plug(number)).collect();
        let mut world = World {
            fixture,
            lan,
            region,
            guest_socket,
            host_socket,
            manager,
            listeners,
            server: None,
            guests: Vec::new(),
            taps,
            own: Vec::new(),
            before: Counts::default(),
        };
        world.serve();
        world.guests = (1..=GUESTS).map(|number| world.boot(number)).collect();
        world.guests.iter_mut().for_each(Guest::wait_until_ready);
        (1..=HOST).for_each(|place| world.start(place, &["serve", "churn"]));
        world
    }

    /// Starts the server of memory, which goes on where the last one ended.
    fn serve(&mut self) {
        let sockets =
            [("host", self.listeners[1].as_raw_fd()), ("vm", self.listeners[0].as_raw_fd())];
        let mut service = self.fixture.plain(build::usmc());
        service.args(["ivshmem-server", "--size", SIZE]);
        self.server = Some(self.fixture.spawn(self.manager.start(&service, &sockets)));
        self.fixture.wait_until("the server", || self.manager.is_ready());
    }

    fn boot(&self, number: usize) -> Guest {
        let tap = &self.taps[number - 1];
        Guest::start(&self.fixture, &self.lan, number, tap, &self.region, &self.guest_socket)
    }

    /// Where a place's client counts.
    fn counts_of(&self, place: usize) -> PathBuf {
        match place {
            HOST => self.fixture.scratch().join("counts"),
            _ => "/tmp/counts".into(),
        }
    }

    /// Starts a place's server, its client, or both.
    fn start(&mut self, place: usize, roles: &[&str]) {
        let others: Vec<String> = (1..=HOST)
            .filter(|other| *other != place)
            .map(|other| format!("10.0.0.{other}:{PORT}"))
            .collect();
        for role in roles {
            let counts = self.counts_of(place);
            let args: Vec<String> = match *role {
                "serve" => ["serve", &format!("10.0.0.{place}"), &PORT.to_string(), "churn"]
                    .map(str::to_owned)
                    .to_vec(),
                _ => [&["churn".to_owned(), text(&counts).to_owned()][..], &others].concat(),
            };
            let program = build::program("guests");
            if place == HOST {
                let mut command = self.lan.plain(&self.fixture);
                command.arg(build::usmc()).args(["run", "--regions", &self.host_regions(), "--"]);
                command.arg(program).args(args);
                self.own.push(self.fixture.spawn(command));
            } else {
                let guest = &mut self.guests[place - 1];
                guest.run(&format!(
                    "$usmc run --regions $served,$region -- {} {} >/tmp/{role}.out 2>&1 & echo $! >/tmp/{role}.pid",
                    program.display(),
                    args.join(" ")
                ));
                if *role == "serve" {
                    guest.run(&format!("until ss -ltn | grep -q :{PORT}; do sleep 0.1; done"));
                }
            }
        }
    }

    /// Its own programs have the server's memory by its socket.
    fn host_regions(&self) -> String {
        format!("{},{}", text(&self.host_socket), text(&self.region))
    }

    fn counts(&mut self, place: usize) -> Counts {
        let words: Vec<u64> = if place == HOST {
            let mut bytes = [0; 12];
            let file = File::open(self.counts_of(HOST));
            let _ = file.and_then(|file| file.read_exact_at(&mut bytes, 0));
            bytes
                .chunks(4)
                .map(|word| u32::from_ne_bytes(word.try_into().expect("4")).into())
                .collect()
        } else {
            let counts = self.counts_of(place);
            let script = format!("od -An -tu4 -v {} 2>/dev/null || :", counts.display());
            let words = self.guests[place - 1].run(&script);
            words.split_whitespace().map(|word| word.parse().expect("a number")).collect()
        };
        let at = |index: usize| words.get(index).copied().unwrap_or(0);
        Counts { whole: at(0), ended: at(1), steps: at(2) }
    }

    /// Ends one program of a place from one instant to the next, and starts it anew.
    fn kill(&mut self, place: usize, role: &str) {
        if place == HOST {
            let at = usize::from(role == "churn");
            self.own[at].kill();
            let other = self.own.remove(1 - at);
            self.own.clear();
            self.own.push(other);
            self.start(place, &[role]);
            if at == 0 {
                self.own.swap(0, 1);
            }
        } else {
            self.guests[place - 1]
                .run(&format!("pid=$(cat /tmp/{role}.pid); kill -9 $pid; while grep -qs '^State:.[^Z]' /proc/$pid/task/*/status; do sleep 0.1; done"));
            self.start(place, &[role]);
        }
    }

    /// A machine loses its power, and boots anew. Of its memory in the file the operator says what the server sees of its own.
    fn cut(&mut self, number: usize) {
        let counts = self.counts(number);
        self.before.whole += counts.whole;
        self.before.ended += counts.ended;
        self.guests[number - 1].kill();
        let peers = self.shown(&self.region);
        let name = format!("guest{number}");
        for peer in peers["peers"].as_array().expect("peers") {
            if peer["name"] == *name && peer["state"] == "alive" {
                let number = peer["number"].to_string();
                usmc(&["region", "evict", text(&self.region), &number]);
            }
        }
        self.guests[number - 1] = self.boot(number);
        self.guests[number - 1].wait_until_ready();
        self.start(number, &["serve", "churn"]);
    }

    /// The region's device goes and comes back; programs that run stay without it.
    fn unplug(&mut self, number: usize) {
        let guest = &mut self.guests[number - 1];
        let drained = guest.run("usmc region drain --wait 60 $region 2>&1");
        guest.unplug(&self.fixture);
        guest.run("! test -e $region");
        guest.plug(&self.fixture, &self.region);
        guest.run("until test -e $region; do sleep 0.1; done");
        let undone = guest.run("usmc region drain --undo $region 2>&1");
        println!("    {} / {}", drained.trim(), undone.trim());
    }

    fn shown(&self, path: &Path) -> Value {
        serde_json::from_str(&usmc(&["region", "show", text(path), "--json"])).expect("JSON")
    }

    /// Each client makes a step, and no program has ended by itself.
    fn assert_all_go_on(&mut self) {
        for place in 1..=HOST {
            let begun = Instant::now();
            let before = self.counts(place).steps;
            while self.counts(place).steps == before {
                assert!(
                    begun.elapsed() < PATIENCE,
                    "place {place} hangs: {}",
                    self.describe(place)
                );
                thread::park_timeout(Duration::from_millis(50));
            }
            if place < HOST {
                let script = "for role in serve churn; do kill -0 $(cat /tmp/$role.pid) 2>/dev/null || { echo $role; cat /tmp/$role.out; dmesg | tail -n 5; }; done";
                let said = self.guests[place - 1].run(script);
                assert!(said.is_empty(), "a program of guest {place} has ended: {said}");
            }
        }
    }

    fn describe(&mut self, place: usize) -> String {
        match place {
            HOST => usmc(&["ss"]),
            _ => self.guests[place - 1].run(
                "cat /tmp/*.out; usmc ss; for p in $(cat /tmp/*.pid); do cat /proc/$p/wchan; echo; cat /proc/$p/syscall; done; ss -tnoi",
            ),
        }
    }

    /// Of the ends that are there now: how many are in shared memory, and how many there are.
    fn shares(&mut self) -> (usize, usize) {
        let mut ends = ss::list();
        let own: Vec<i32> = self.own.iter().map(Process::pid).collect();
        ends.retain(|end| own.contains(&end.pid) && end.state != "LISTEN");
        for guest in &mut self.guests {
            ends.extend(guest.connections(PORT));
        }
        (ends.iter().filter(|end| end.is_smcd()).count(), ends.len())
    }

    fn stop(&mut self, role: &str) {
        for guest in &mut self.guests {
            let said = guest.run(&format!(
                "pid=$(cat /tmp/{role}.pid); kill $pid; while grep -qs '^State:.[^Z]' /proc/$pid/status; do sleep 0.1; done; cat /tmp/{role}.out"
            ));
            assert!(role == "serve" || said.starts_with("whole"), "{said}");
        }
        let at = usize::from(role == "churn");
        let status = self.own[at].terminate();
        assert!(status.success() || role == "serve", "{status}");
    }

    /// Programs of all places have come and gone, and all memory is free.
    fn assert_all_is_free(&mut self) {
        for _ in 0..2 {
            for place in 1..=HOST {
                if place == HOST {
                    let old = self.own.pop().expect("a client");
                    drop(old);
                }
                self.start(place, &["churn"]);
            }
            self.assert_all_go_on();
            self.stop("churn");
        }
        // An acceptor lets go after its client, which has ended by then: a process that joins gives that back.
        const JOINS: &str = "exec 3<>/dev/tcp/127.0.0.1/1";
        for guest in &mut self.guests {
            guest.run(&format!(
                "usmc run --regions $served,$region -- bash -c '{JOINS}' 2>/dev/null || :"
            ));
        }
        let mut command = self.lan.plain(&self.fixture);
        command.arg(build::usmc()).args(["run", "--regions", &self.host_regions(), "--"]);
        command.args(["bash", "-c", JOINS]);
        self.fixture.spawn(command).wait();
        let regions = [self.region.clone(), self.host_socket.clone()];
        for path in &regions {
            let shown = self.shown(path);
            let held = if *path == self.region { region::lost(path).text } else { String::new() };
            assert_eq!(shown["free"], shown["units"], "units are lost: {shown}\n{held}");
        }
    }
}

#[test]
fn three_guests_and_their_host() {
    if is_plain() || !usmc_tests::flag("USMC_TESTS_VM_LONG") || !vm::is_wanted() {
        return;
    }
    let rounds = number("USMC_TESTS_VM_ROUNDS", 100);
    let mut draw = Draw::announced("USMC_TESTS_VM_SEED");
    let mut world = World::new(rounds);
    world.assert_all_go_on();
    let (mut inside, mut all) = (0, 0);
    for round in 1..=rounds {
        let guest = 1 + draw.below(GUESTS as u64) as usize;
        let place = 1 + draw.below(HOST as u64) as usize;
        let role = ["serve", "churn"][draw.below(2) as usize];
        // The point is the instant, not to wait for something.
        thread::park_timeout(Duration::from_millis(draw.below(1500)));
        let begun = Instant::now();
        let what = draw.weighted(&[(38, 0), (25, 1), (3, 2), (12, 3), (10, 4), (12, 5)]);
        let name = match what {
            0 => {
                world.kill(place, role);
                format!("kill of {role} at {place}")
            }
            1 | 2 => {
                let (least, most) = if what == 1 { (100, 3000) } else { (30_000, 30_001) };
                let time = Duration::from_millis(least + draw.below(most - least));
                world.guests[guest - 1].pause();
                thread::park_timeout(time);
                world.guests[guest - 1].go_on();
                format!("guest {guest} stood still for {time:?}")
            }
            3 => {
                world.cut(guest);
                format!("guest {guest} lost its power")
            }
            4 => {
                let mut server = world.server.take().expect("a server");
                assert!(server.terminate().success(), "{}", server.errors());
                world.serve();
                "the server was started anew".to_owned()
            }
            _ => {
                world.unplug(guest);
                // Only what is started from now on has the device again.
                ["serve", "churn"].iter().for_each(|role| world.kill(guest, role));
                format!("guest {guest} lost its device")
            }
        };
        world.assert_all_go_on();
        let (smcd, ends) = world.shares();
        (inside, all) = (inside + smcd, all + ends);
        println!("{round}: {name}, {:?}, {smcd} of {ends} ends", begun.elapsed());
    }
    world.stop("churn");
    let mut counts = world.before;
    for place in 1..=HOST {
        let own = world.counts(place);
        counts.whole += own.whole;
        counts.ended += own.ended;
    }
    println!("{counts:?}; {inside} of {all} ends in shared memory");
    assert!(counts.whole > rounds * 5, "hardly anything was whole");
    assert!(inside * 4 > all, "the streams went by TCP");
    world.assert_all_is_free();
    world.stop("serve");
    vm::shut_down(&mut world.guests);
    let mut server = world.server.take().expect("a server");
    assert!(server.terminate().success(), "{}", server.errors());
    fs::remove_file(&world.region).expect("the region");
    world.own.clear();
    world.fixture.finish();
}
