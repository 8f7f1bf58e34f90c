//! Programs of one machine with those of the other: what a step starts it ends, and all its connections are in the region's memory.

use std::path::Path;

use usmc_tests::ss::Socket;
use usmc_tests::vm::Guest;
use usmc_tests::{build, cluster};

/// Where programs of 64 bits listen, and those of 32.
const PORT: u16 = 9000;
const PORT_32: u16 = 9032;

/// The id of a region, as `usmc ss` has it.
fn id_of(guest: &mut Guest, region: &str) -> String {
    guest.run(&format!("usmc region show {region} | sed -n 's/^region \\([0-9a-f]*\\):.*/\\1/p'"))
}

/// How many of these are in that region.
fn in_region(ends: &[Socket], id: &str) -> usize {
    ends.iter().filter(|end| end.is_smcd() && end.device == id).count()
}

/// So many ends are there, and in the region, but for those whose handshake was too slow, which it may be where machines are emulated: an
/// end that has nothing more to do does not go on with it, and a client does not ask for ever.
fn assert_in_region(ends: &[Socket], id: &str, count: usize) {
    let (inside, late) = (in_region(ends, id), ends.iter().filter(is_late).count());
    let is_so = ends.len() == count && inside + late == count && inside >= count / 2;
    assert!(is_so, "{count} in {id}: {ends:#?}");
}

fn is_late(end: &&Socket) -> bool {
    let reasons = [
        "handshake pending",
        "CLC handshake not finished yet",
        "no process of this device holds the other end",
        "peer withdrew during the handshake",
        "client made no offer",
        // Both were in the middle of sends then.
        "both ends sent more than rings hold",
        "peer went back to TCP",
    ];
    reasons.iter().any(|reason| end.fallback_reason.starts_with(reason))
}

/// Starts an echo server, `blocking` or `epoll`.
fn serve(guest: &mut Guest, how: &str, program: &Path, port: u16, waits: &str) {
    let (program, address) = (program.display(), guest.address());
    guest.run(&format!(
        "{how} -- {program} serve {address} {port} {waits} >/tmp/serve.{port} 2>&1 &
        until ss -ltn | grep -q :{port}; do sleep 0.1; done"
    ));
}

/// Starts its client in the other guest and waits until all has come back. The connections stay until [`end`].
fn talk(
    (one, other): (&mut Guest, &mut Guest),
    how: &str,
    program: &Path,
    port: u16,
    waits: &str,
    (count, bytes): (usize, usize),
) {
    let (program, address) = (program.display(), one.address());
    let (status, text) = other.try_run(&format!(
        ": >/tmp/talk.{port}; {how} -- {program} talk {address} {port} {waits} {count} {bytes} >/tmp/talk.{port} 2>&1 &
        until grep -q done /tmp/talk.{port}; do kill -0 $! || {{ cat /tmp/talk.{port}; exit 1; }}; sleep 0.1; done"
    ));
    if status != 0 {
        let server = one.run(&format!("cat /tmp/serve.{port}; usmc ss; dmesg | tail -3"));
        panic!("{program} to {port}: {text}\n--- its server\n{server}");
    }
}

/// Three connections, in the region: a client for which all were late, which happens where machines are emulated, comes again.
fn talk_inside(
    (one, other): (&mut Guest, &mut Guest),
    program: &Path,
    port: u16,
    waits: &str,
    id: &str,
) {
    for tries in 1.. {
        talk((one, other), UNDER, program, port, waits, (3, 100_000));
        let ends = other.connections(port);
        if tries == 3 || !ends.iter().all(|end| is_late(&end)) {
            break;
        }
        println!("all of {port} were late");
        other.run("pkill -x 'guests|guests32'");
        one.run(&format!("while ss -tn | grep -q ':{port}'; do sleep 0.1; done"));
    }
    for guest in [one, other] {
        assert_in_region(&guest.connections(port), id, 3);
    }
}

/// Ends servers and clients, which have had nothing to complain about.
fn end(guest: &mut Guest) {
    guest.run(
        "pkill -x 'guests|guests32' || :; while pgrep -x 'guests|guests32' >/dev/null; do sleep 0.1; done
        ! grep -v done /tmp/talk.* /tmp/serve.* /dev/null && rm -f /tmp/talk.* /tmp/serve.*",
    );
}

const UNDER: &str = "usmc run --regions $region";

/// Ends that block and ends with epoll sets, in all pairs.
pub(crate) fn blocking_and_epoll_programs(one: &mut Guest, other: &mut Guest) {
    let (program, id) = (build::program("guests"), id_of(one, "$region"));
    let ways = ["blocking", "epoll"];
    for (at, server) in (0..).zip(ways) {
        serve(one, UNDER, &program, PORT + at, server);
        for client in ways {
            talk_inside((one, other), &program, PORT + at, client, &id);
            end(other);
        }
    }
    end(one);
}

/// Either is the server once.
pub(crate) fn a_32_bit_program_and_a_64_bit_one(one: &mut Guest, other: &mut Guest) {
    let Some(narrow) = build::narrow_program("guests32") else {
        println!("skipped: no programs of 32 bits can be built here (make deps32)");
        return;
    };
    let (wide, id) = (build::program("guests"), id_of(one, "$region"));
    serve(one, UNDER, &narrow, PORT_32, "epoll");
    serve(one, UNDER, &wide, PORT, "blocking");
    for (program, port) in [(&wide, PORT_32), (&narrow, PORT)] {
        talk_inside((one, other), program, port, "epoll", &id);
    }
    let shown = other.run("usmc ss | grep guests32");
    assert!(shown.contains("SMCD"), "{shown}");
    end(other);
    end(one);
}

/// So many connections of one program at a time.
const MANY: usize = 500;

/// All of them have room in 64 MB, by rings that get smaller. In 16 MB some have, and the rest stays TCP.
pub(crate) fn five_hundred_connections(one: &mut Guest, other: &mut Guest) {
    let program = build::program("guests");
    for (region, least, most_full) in [("$region", MANY * 9 / 10, 0), ("$served", 50, MANY)] {
        let (how, id) = (format!("usmc run --regions {region}"), id_of(one, region));
        serve(one, &how, &program, PORT, "epoll");
        talk((one, other), &how, &program, PORT, "epoll", (MANY, 40_000));
        let ends = other.connections(PORT);
        let (inside, late) = (in_region(&ends, &id), ends.iter().filter(is_late).count());
        let full = ends.iter().filter(|end| end.fallback_reason == "region full").count();
        println!("{region}: {inside} of {MANY} connections, {full} have no room, {late} were late");
        let is_so = inside >= least && late <= MANY / 10 && full <= most_full;
        assert!(is_so && inside + full + late == MANY, "{ends:#?}");
        // A server's end gets there with its next call.
        let served = one.connections(PORT);
        assert!(served.len() == MANY && in_region(&served, &id) > inside / 2, "{served:#?}");
        end(other);
        end(one);
    }
}

/// Users of the group, in both machines.
const USERS: [u16; 3] = [65534, 2001, 2002];

/// What is put before a command for it to run as a user of the group.
fn as_user(user: u16) -> String {
    format!(
        "setpriv --reuid {user} --regid {user} --groups $(getent group usmc | cut -d : -f 3) $usmc run --regions $region"
    )
}

/// Each machine has a server of each user, and two clients of each user for each: those of the user's own and those of another one.
pub(crate) fn several_users_and_processes(one: &mut Guest, other: &mut Guest) {
    let (program, id) = (build::program("guests"), id_of(one, "$region"));
    let program = program.display();
    let port_of = |user: u16| PORT + user % 10;
    for guest in [&mut *one, other] {
        guest.run("usmc region setup");
        let mut script = String::new();
        for user in USERS {
            let (how, address, port) = (as_user(user), guest.address(), port_of(user));
            script += &format!(
                "{how} -- {program} serve {address} {port} epoll >/tmp/serve.{user} 2>&1 &\n"
            );
        }
        script +=
            &format!("until [ $(ss -ltn | grep -c ':{}') = 3 ]; do sleep 0.1; done", PORT / 10);
        guest.run(&script);
    }
    let addresses = [other.address(), one.address()];
    for (guest, to) in [&mut *one, other].into_iter().zip(addresses) {
        let mut script = String::new();
        for (at, user) in USERS.iter().enumerate() {
            for next in [0, 1] {
                let (how, port) = (as_user(*user), port_of(USERS[(at + next) % USERS.len()]));
                script += &format!(
                    "{how} -- {program} talk {to} {port} blocking 2 40000 >/tmp/talk.{user}.{next} 2>&1 &\n"
                );
            }
        }
        guest.run(&script);
    }
    for guest in [&mut *one, other] {
        guest.run(
            "until [ $(grep -l done /tmp/talk.* | wc -l) = 6 ]; do
                ! grep -v done /tmp/talk.* || exit 1; sleep 0.1
            done",
        );
    }
    for guest in [&mut *one, other] {
        for user in USERS {
            // Four of the clients here, and four of the server's.
            assert_in_region(&guest.connections(port_of(user)), &id, 8);
        }
        let peers = guest.run("usmc region show $region | grep -c guest");
        assert!(peers.parse::<usize>().is_ok_and(|peers| peers >= 6), "{peers} peers");
    }
    for guest in [one, other] {
        end(guest);
        guest.run("usmc region setup --undo && groupdel usmc && rm -rf /dev/shm/usmc-2* /dev/shm/usmc-65534");
    }
}

/// Bytes of one stream: a gigabyte.
const STREAM: u64 = 1_000_000_000;

pub(crate) fn a_gigabyte(one: &mut Guest, other: &mut Guest) {
    let (program, id) = (build::program("guests"), id_of(one, "$region"));
    let (program, address) = (program.display(), one.address());
    one.run(&format!(
        "{UNDER} -- {program} sink {address} {PORT} >/tmp/sink 2>&1 &
        until ss -ltn | grep -q :{PORT}; do sleep 0.1; done"
    ));
    other.run(&format!(
        "{UNDER} -- {program} source {address} {PORT} {STREAM} >/tmp/talk.source 2>&1 &
        until grep -q done /tmp/talk.source; do kill -0 $! || {{ cat /tmp/talk.source; exit 1; }}; sleep 0.1; done"
    ));
    let [read, sent] = [one.connections(PORT), other.connections(PORT)];
    assert_in_region(&read, &id, 1);
    assert_in_region(&sent, &id, 1);
    assert!(read[0].rx_bytes >= STREAM && sent[0].tx_bytes >= STREAM, "{read:?} {sent:?}");
    end(other);
    end(one);
    assert_eq!(one.run("cat /tmp/sink"), format!("bytes {STREAM}"));
}

/// Messages with answers: a run with few of them, and one with many, each at a port of its own.
pub(crate) const PINGS: [(u16, u64); 2] = [(9101, 1_000), (9102, 101_000)];
/// System calls that the longer run may have more: of threads that stood still for too long, as guests do beside other work.
const MORE_CALLS: i64 = 1000;
/// Frames on the cable that it may have more: of the handshake, which goes on beside the first messages, and of such threads, whose peers sleep.
pub(crate) const MORE_FRAMES: i64 = 1000;

/// Counts the calls of the programs, by the kernel itself: strace(1) stops a program at each for longer than a message takes, and so
/// makes waits of what is none.
const COUNT_CALLS: &str = "mountpoint -q /sys/kernel/tracing || mount -t tracefs none /sys/kernel/tracing; cd /sys/kernel/tracing
    echo 'hist:keys=id.syscall if comm == \"guests\"' >events/raw_syscalls/sys_enter/trigger";
/// Shows them, and ends it.
const CALLS: &str = "cd /sys/kernel/tracing; cat events/raw_syscalls/sys_enter/hist
    echo '!hist:keys=id.syscall if comm == \"guests\"' >events/raw_syscalls/sys_enter/trigger";

/// Programs that are awake make no system call for a message. They yield where the other machine does not run: the host has two
/// processors for both of them and itself.
pub(crate) fn no_call_for_a_message(one: &mut Guest, other: &mut Guest) {
    let (program, id) = (build::program("guests"), id_of(one, "$region"));
    let address = one.address();
    // They are awake, as a wait does not sleep for a second.
    let how = format!("{UNDER} --busy-poll-us 1000000");
    let mut counts = Vec::new();
    for (port, messages) in PINGS {
        for guest in [&mut *one, other] {
            guest.run(COUNT_CALLS);
        }
        serve(one, &how, &program, port, "blocking");
        other.run(&format!(
            "{how} -- {} ping {address} {port} {messages} >/tmp/talk.{port} 2>&1 &
            until grep -q done /tmp/talk.{port}; do kill -0 $! || {{ cat /tmp/talk.{port}; exit 1; }}; sleep 0.1; done",
            program.display()
        ));
        for guest in [&mut *one, other] {
            let ends = guest.connections(port);
            assert!(in_region(&ends, &id) == 1 && ends.len() == 1, "{ends:#?}");
        }
        counts.push([&mut *other, one].map(|guest| {
            let shown = guest.run(CALLS);
            let of = |name: &str| {
                let mut lines = shown.lines().filter(|line| line.contains(name));
                let count = lines.next().and_then(|line| line.rsplit(':').next());
                count.map_or(0, |count| count.trim().parse::<i64>().expect("a number"))
            };
            let (all, yields) = (of("Hits:"), of("sys_sched_yield"));
            (all - yields, yields, shown)
        }));
        end(other);
        end(one);
    }
    for ((few, _, _), (many, yields, calls)) in counts[0].iter().zip(&counts[1]) {
        println!("system calls: {few}, and with 100000 messages more: {many} and {yields} yields");
        assert!(*few > 20 && many - few <= MORE_CALLS, "{calls}");
    }
}

/// A process for each connection, as a user of the group's.
pub(crate) fn postgresql(one: &mut Guest, other: &mut Guest) {
    if build::postgres_dir().is_none() {
        println!("skipped: PostgreSQL is not installed");
        return;
    }
    let (id, address) = (id_of(one, "$region"), one.address());
    let how = format!("{} --", as_user(cluster::USER as u16));
    for guest in [&mut *one, other] {
        guest.run("usmc region setup");
    }
    cluster::serve(one, &how);
    cluster::fill(other, &how, &address);
    for words in ["-S -T 3", "-N -T 3"] {
        let inside = |guest: &mut Guest| in_region(&guest.connections(cluster::PORT), &id);
        let most = cluster::load(other, &how, &address, words, inside);
        println!("{most} of {} connections", cluster::CLIENTS);
        assert!(most >= cluster::CLIENTS * 3 / 4, "{most} connections were in the region");
    }
    cluster::end(one);
    for guest in [one, other] {
        guest.run("usmc region setup --undo && groupdel usmc && rm -rf /dev/shm/usmc-65534");
    }
}
