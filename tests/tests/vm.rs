//! Two virtual machines, and programs in them that have a region in common.
//!
//! They boot once, for all that is tested: each step but the last leaves them as it has found them. `USMC_TESTS_VM_STEP` takes those only
//! whose names have that in them. `USMC_TESTS_VM_LONG` takes those, too, that need the most time: `make test-vm`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use usmc_tests::cluster::Cluster;
use usmc_tests::vm::{self, Guest, Guests};
use usmc_tests::{Fixture, Process, build, flag, is_plain};

#[path = "vm/programs.rs"]
mod programs;

/// With the boot, on two slow cores. Fast ones need a third of it.
const LIMIT: Duration = Duration::from_secs(480);
/// Bytes of the device: a power of two.
const SIZE: u64 = 64 << 20;

/// Bytes of persistent memory: the kernel adds it in such pieces.
const PERSISTENT: u64 = 128 << 20;

/// Something that both are asked to do.
type Step = fn(&mut Guest, &mut Guest);

/// Those that are left out unless all are asked for.
const LONG: [&str; 3] = ["PostgreSQL", "a gigabyte", "five hundred connections"];

const STEPS: [(&str, Step); 18] = [
    ("both are on one cable", both_are_on_one_cable),
    ("both have one memory", both_have_one_memory),
    ("redis without a region", redis_without_a_region),
    ("a group has the region", a_group_has_the_region),
    ("udev gives it to the group", udev_gives_it_to_the_group),
    ("persistent memory is a region", persistent_memory_is_a_region),
    ("the device does what every device does", the_device_conforms),
    ("programs join by themselves", programs_join_by_themselves),
    ("programs of both", programs_of_both),
    ("blocking and epoll programs", programs::blocking_and_epoll_programs),
    ("a 32-bit program and a 64-bit one", programs::a_32_bit_program_and_a_64_bit_one),
    ("several users and processes", programs::several_users_and_processes),
    ("PostgreSQL", programs::postgresql),
    ("a gigabyte", programs::a_gigabyte),
    ("no system call for a message", programs::no_call_for_a_message),
    ("five hundred connections", programs::five_hundred_connections),
    ("a machine dies", a_machine_dies),
    ("a kernel that is locked down", a_kernel_that_is_locked_down),
];

#[test]
fn two_guests() {
    if is_plain() || !vm::is_wanted() {
        return;
    }
    build::usmc();
    build::program("guests");
    build::narrow_program("guests32");
    build::unit_tests("usmc");
    let fixture = Fixture::with_limit("two guests", LIMIT);
    let _cluster = Cluster::new(&fixture, &build::vm_image().expect("is_wanted() was asked"));
    let region = region(&fixture);
    let persistent = fixture.ism_dir().join("persistent");
    File::create_new(&persistent).and_then(|file| file.set_len(PERSISTENT)).expect("a sparse file");
    let (server, mut serves) = serve(&fixture);
    let mut guests = Guests::boot(&fixture, &region, &persistent, &server.guests);
    let only = std::env::var("USMC_TESTS_VM_STEP").unwrap_or_default();
    let are_all_wanted = flag("USMC_TESTS_VM_LONG") || !only.is_empty();
    let is_wanted = |name: &str| name.contains(&only) && (are_all_wanted || !LONG.contains(&name));
    for (name, step) in STEPS.into_iter().filter(|(name, _)| is_wanted(name)) {
        println!("{name}, {} s left", fixture.time_left().as_secs());
        let [one, other] = guests.both();
        step(one, other);
        if name == "a machine dies" {
            server_has_noticed(&fixture, &server.hosts);
        }
    }
    guests.shut_down();
    serves.signal(libc::SIGTERM);
    assert!(serves.wait().success(), "{}", serves.errors());
    assert!(!only.is_empty() || vm::frames(guests.cable(), "icmp") >= 2);
    no_frame_for_a_message(guests.cable());
    for path in [region, persistent] {
        fs::remove_file(path).expect("memory of both");
    }
    fixture.finish();
}

/// The sockets of a server of memory.
struct Server {
    guests: PathBuf,
    hosts: PathBuf,
}

fn serve(fixture: &Fixture) -> (Server, Process) {
    let [guests, hosts] = ["server", "hosts"].map(|name| fixture.scratch().join(name));
    let mut command = Command::new(build::usmc());
    command.args(["ivshmem-server", "--size", "16M", "--host-socket"]).args([&hosts, &guests]);
    let process = fixture.spawn(command);
    fixture.wait_until("the server", || guests.exists());
    (Server { guests, hosts }, process)
}

/// The file that both have as a device, made before they boot.
fn region(fixture: &Fixture) -> PathBuf {
    // In memory.
    let path = fixture.ism_dir().join("region");
    let size = SIZE.to_string();
    let made = Command::new(build::usmc())
        .args([Path::new("region"), "init".as_ref(), &path, "--size".as_ref(), size.as_ref()])
        .output();
    assert!(made.expect("usmc").status.success());
    path
}

fn both_are_on_one_cable(one: &mut Guest, other: &mut Guest) {
    one.run("busybox ping -q -c 1 -W 10 10.0.0.2");
    other.run("busybox ping -q -c 1 -W 10 10.0.0.1");
}

/// The last word of the region's last unit, which nobody has claimed yet.
const WORD: &str = "import mmap, sys
with open(sys.argv[1], 'r+b') as f:
    m = mmap.mmap(f.fileno(), 0)
    at = len(m) - 8
    print(len(m), m[at:].hex())
    m[at:] = bytes.fromhex(sys.argv[2])
";

fn both_have_one_memory(one: &mut Guest, other: &mut Guest) {
    let exchange = |guest: &mut Guest, word: &str| {
        guest.run(&format!("python3 - $region {word} <<'END'\n{WORD}END"))
    };
    let (first, second) = ("0123456789abcdef", "0000000000000000");
    assert_eq!(exchange(one, first), format!("{SIZE} {second}"));
    assert_eq!(exchange(other, second), format!("{SIZE} {first}"));
    assert_eq!(exchange(one, second), format!("{SIZE} {second}"));
}

/// Both under `usmc run`, which has no common device to give them: TCP.
fn redis_without_a_region(one: &mut Guest, other: &mut Guest) {
    start_redis(one, "usmc run --regions none");
    let done = other
        .run("usmc run --regions none -- redis-benchmark -h 10.0.0.1 -t set,get -n 2000 -c 10 -q");
    assert!(done.contains("SET: ") && done.contains("GET: "), "{done}");
    other.run(
        "usmc run --regions none -- redis-benchmark -h 10.0.0.1 -t get -l -q >/dev/null 2>&1 &",
    );
    other.run("until usmc ss | grep -q 10.0.0.1:6379; do sleep 0.1; done");
    let shown = other.run("usmc ss | grep 10.0.0.1:6379");
    assert!(shown.contains("TCP") && !shown.contains("SMCD"), "{shown}");
    other.run("pkill -x redis-benchmark");
    stop_redis(one);
}

/// Whose the device is, and its mode.
const OWNERS: &str = "stat -c '%U:%G %a' $region";
/// A user without the group, and one of the group.
const ALONE: &str = "setpriv --reuid 65534 --regid 65534 --clear-groups";
const OF_GROUP: &str =
    "setpriv --reuid 65534 --regid 65534 --groups $(getent group usmc | cut -d : -f 3)";

fn a_group_has_the_region(one: &mut Guest, other: &mut Guest) {
    let mut ids = Vec::new();
    for guest in [one, other] {
        assert_eq!(guest.run(OWNERS), "root:root 600");
        let refused = check(guest, ALONE);
        assert!(refused.contains("region cannot be opened"), "{refused}");
        assert!(refused.contains("-> run `usmc region setup` as root"), "{refused}");
        let would = guest.run("usmc region setup --dry-run");
        assert!(
            would.contains("would make the group usmc") && would.contains("KERNEL=="),
            "{would}"
        );
        guest.run("! getent group usmc && ! ls /etc/udev/rules.d/70-usmc-region.rules");
        assert_eq!(guest.run(OWNERS), "root:root 600");

        let done = guest.run("usmc region setup");
        assert!(done.contains("make the group usmc: done"), "{done}");
        assert_eq!(guest.run(OWNERS), "root:usmc 660");
        // Again changes nothing.
        guest.run("usmc region setup");
        assert_eq!(guest.run(OWNERS), "root:usmc 660");
        let shown = guest.run("usmc region show $region");
        assert!(shown.contains("are free"), "{shown}");
        ids.push(shown.split(':').next().expect("a region").to_owned());
        let usable = check(guest, OF_GROUP);
        assert!(usable.contains("resource2 can be used: region"), "{usable}");

        let undone = guest.run("usmc region setup --undo");
        assert!(undone.contains("remove /etc/udev/rules.d"), "{undone}");
        assert_eq!(guest.run(OWNERS), "root:root 600");
        guest.run("groupdel usmc; ! ls /etc/udev/rules.d/70-usmc-region.rules");
    }
    assert_eq!(ids[0], ids[1], "two regions");
}

/// What `usmc check` says about regions to some user.
fn check(guest: &mut Guest, user: &str) -> String {
    guest.run(&format!(
        "{user} env USMC_ISM_DIR=/tmp/check $usmc check | sed -n '/^Regions/,/^Library/p'"
    ))
}

/// The rule does at the next boot what setup did.
fn udev_gives_it_to_the_group(one: &mut Guest, _other: &mut Guest) {
    one.run("usmc region setup && chgrp root $region && chmod 600 $region");
    assert_eq!(one.run(OWNERS), "root:root 600");
    // It does nothing in a chroot by itself.
    one.run("SYSTEMD_IGNORE_CHROOT=1 /lib/systemd/systemd-udevd --daemon >/dev/null 2>&1");
    one.run(
        "export SYSTEMD_IGNORE_CHROOT=1
        udevadm trigger --action=add ${region%/*} && udevadm settle --timeout=20",
    );
    assert_eq!(one.run(OWNERS), "root:usmc 660");
    one.run("SYSTEMD_IGNORE_CHROOT=1 udevadm control --exit && usmc region setup --undo && groupdel usmc");
}

/// What an NVDIMM needs. Its rule for modprobe(8) asks for keys, which none here has.
const NVDIMM: &str =
    "for name in nfit nd_pmem dax_pmem device_dax; do modprobe -C /dev/null -d $modules $name; done
";

/// One makes a device-dax node, and a region in it. The other has both then.
fn persistent_memory_is_a_region(one: &mut Guest, other: &mut Guest) {
    let make = "ndctl create-namespace -f -e namespace0.0 -m devdax --map=mem";
    one.run(&format!("{NVDIMM}{make} --align=2M 2>&1"));
    let large = one.run("usmc check --regions /dev/dax0.0 | grep -A1 /dev/dax0.0:");
    assert!(large.contains("pages larger than 4K") && large.contains("--align=4K"), "{large}");
    one.run(&format!("{make} --align=4K 2>&1"));
    let none = one.run("usmc region show /dev/dax0.0 2>&1 || :");
    assert!(none.contains("no region"), "{none}");
    one.run("usmc region init /dev/dax0.0");
    let twice = one.run("usmc region init /dev/dax0.0 2>&1 || :");
    assert!(twice.contains("is not empty"), "{twice}");
    other.run(&format!("{NVDIMM}until [ -e /dev/dax0.0 ]; do sleep 0.1; done"));
    let ids = [one, other].map(|guest| {
        let done = guest.run("usmc region setup");
        assert!(done.contains("give /dev/dax0.0 to the group usmc"), "{done}");
        let usable = guest.run("usmc check --regions /dev/dax0.0 | grep dax0.0.can");
        assert!(usable.contains("can be used: region"), "{usable}");
        start_redis(guest, "usmc run --regions /dev/dax0.0");
        guest.run("usmc run --regions /dev/dax0.0 -- redis-benchmark -t get -n 1000 -c 5 -q");
        stop_redis(guest);
        guest.run("usmc region setup --undo && groupdel usmc");
        let shown = guest.run("usmc region show /dev/dax0.0");
        assert!(shown.contains("guest"), "{shown}");
        shown.split(':').next().map(str::to_owned)
    });
    assert_eq!(ids[0], ids[1], "two regions");
}

/// What every device has to do, by processes of one machine, with the memory of its PCI device.
fn the_device_conforms(one: &mut Guest, _other: &mut Guest) {
    let tests = build::unit_tests("usmc");
    let done = one.run(&format!(
        "USMC_CONFORMANCE_REGION=$region {} device::conformance 2>&1 || echo failed",
        tests.display()
    ));
    assert!(done.contains("5 passed; 0 failed; 1 ignored"), "{done}");
    // What the tests did not give back comes back as they are dead.
    one.run("usmc run --regions $region -- redis-cli -p 1 >/dev/null 2>&1 || :");
    let shown = one.run("usmc region show $region");
    let free = shown.split(": ").nth(1).and_then(|text| text.split_once(" units"));
    let all = free.and_then(|(text, _)| text.split_once(" of "));
    assert!(all.is_some_and(|(free, all)| free == all), "{shown}");
}

/// Of programs that were awake, whose messages had ports of their own.
fn no_frame_for_a_message(cable: &Path) {
    let [few, many] = programs::PINGS.map(|(port, messages)| {
        let frames = vm::frames(cable, &format!("tcp port {port}")) as i64;
        println!("{frames} frames on the cable for {messages} messages and their answers");
        frames
    });
    assert!(many - few <= programs::MORE_FRAMES);
}

/// No path is configured: a program that may open the device has the region.
fn programs_join_by_themselves(one: &mut Guest, other: &mut Guest) {
    for guest in [&mut *one, other] {
        start_redis(guest, "usmc run");
        let done = guest.run("usmc run -- redis-benchmark -t set,get -n 2000 -c 10 -q");
        assert!(done.contains("SET: ") && done.contains("GET: "), "{done}");
        stop_redis(guest);
    }
    let peers = one.run("usmc region show $region");
    assert!(peers.contains("guest1") && peers.contains("guest2"), "{peers}");
}

/// How connections between both are carried.
const CARRIED_BY: &str = "SMCD";

fn programs_of_both(one: &mut Guest, other: &mut Guest) {
    start_redis(one, "usmc run");
    let done = other.run("usmc run -- redis-benchmark -h 10.0.0.1 -t set,get -n 2000 -c 10 -q");
    assert!(done.contains("SET: ") && done.contains("GET: "), "{done}");
    other.run("usmc run -- redis-benchmark -h 10.0.0.1 -t get -l -q >/dev/null 2>&1 &");
    other.run(&format!(
        "until usmc ss | grep 10.0.0.1:6379 | grep -q {CARRIED_BY}; do sleep 0.1; done"
    ));
    other.run("pkill -x redis-benchmark");
    stop_redis(one);

    one.run("mkdir -p /tmp/nginx && head -c 300000 /dev/urandom >/tmp/nginx/file");
    one.run(NGINX);
    let fetch = "usmc run -- curl -s --retry 20 --retry-connrefused http://10.0.0.1:8080/file http://10.0.0.1:8080/file";
    let sum = other.run(&format!("{fetch} | sha256sum"));
    assert_eq!(sum, one.run("cat /tmp/nginx/file /tmp/nginx/file | sha256sum"));
    one.run("kill $(cat /tmp/nginx/pid); while pgrep -x nginx; do sleep 0.1; done");

    one.run("usmc run -- sockperf server --tcp -i 10.0.0.1 -p 8081 >/tmp/sockperf.log 2>&1 &");
    one.run("until ss -ltn | grep -q :8081; do sleep 0.1; done");
    let played = other.run("usmc run -- sockperf ping-pong --tcp -i 10.0.0.1 -p 8081 -t 2 2>&1");
    assert!(played.contains("Valid Duration"), "{played}");
    one.run("pkill -x sockperf");

    one.run(&format!("usmc run -- python3 - 10.0.0.1 >/tmp/sum 2>&1 <<'END' &\n{STREAM}END"));
    one.run("until ss -ltn | grep -q :8082; do sleep 0.1; done");
    let sent = other.run(&format!("usmc run -- python3 - 10.0.0.1 client <<'END'\n{STREAM}END"));
    one.run("until grep -q . /tmp/sum; do sleep 0.1; done");
    assert_eq!(one.run("cat /tmp/sum"), sent);
}

const NGINX: &str = "cat >/tmp/nginx/conf <<'END'
user root;
pid /tmp/nginx/pid;
events {}
http { access_log off; server { listen 8080; location / { root /tmp/nginx; } } }
END
usmc run -- nginx -c /tmp/nginx/conf -e /tmp/nginx/log
";

/// Random bytes one way in pieces of any length, with a word back now and then. Both print their sum.
const STREAM: &str = "import hashlib, random, socket, sys
address = (sys.argv[1], 8082)
sum = hashlib.sha256()
if len(sys.argv) > 2:
    s = socket.create_connection(address)
    block = random.randbytes(1 << 20)
    for n in range(200):
        piece = block[:random.randrange(1, 200000)]
        s.sendall(piece)
        sum.update(piece)
        if n % 20 == 0:
            s.sendall(b'answer!')
            sum.update(b'answer!')
            s.recv(1)
    s.shutdown(socket.SHUT_WR)
    while s.recv(100): pass
else:
    listener = socket.create_server(address)
    s = listener.accept()[0]
    tail = b''
    while data := s.recv(65536):
        sum.update(data)
        tail = (tail + data)[-7:]
        if tail == b'answer!': s.send(b'x')
    s.close()
print(sum.hexdigest(), flush=True)
";

fn start_redis(guest: &mut Guest, how: &str) {
    guest.run(&format!(
        "{how} -- redis-server --bind 0.0.0.0 --protected-mode no --save '' >/tmp/redis.log 2>&1 &"
    ));
    guest.run("until redis-cli ping >/dev/null 2>&1; do sleep 0.1; done");
}

fn stop_redis(guest: &mut Guest) {
    guest.run("redis-cli shutdown nosave; while pgrep -x redis-server; do sleep 0.1; done");
}

/// It has a connection to the other in the memory of the server, which sees the end of its device. What it had there comes back, once the
/// other end has let go of it, too.
fn a_machine_dies(one: &mut Guest, other: &mut Guest) {
    start_redis(one, "usmc run --regions $served");
    other.run(
        "usmc run --regions $served -- redis-benchmark -h 10.0.0.1 -t get -l -q >/dev/null 2>&1 &",
    );
    other.run("until usmc ss | grep 10.0.0.1:6379 | grep -q SMCD; do sleep 0.1; done");
    let before = one.run("usmc region show $served");
    let mut peers = before.lines().filter(|line| line.contains("guest2"));
    assert!(peers.any(|line| line.contains("alive") && !line.ends_with(" 0")), "{before}");
    other.kill();
    one.run("until ! usmc region show $served | grep guest2 | grep -q alive; do sleep 0.1; done");
    stop_redis(one);
    // Whoever joins next gives back what is left.
    one.run("usmc run --regions $served -- redis-cli -p 1 >/dev/null 2>&1 || :");
    start_redis(one, "usmc run --regions $served");
    let after = one.run("usmc region show $served");
    assert!(!after.contains("guest2"), "{after}");
    let free = after.split(" units").next().and_then(|text| text.split(": ").nth(1));
    let [free, all] = free
        .and_then(|text| text.split_once(" of "))
        .map(|(free, all)| [free, all].map(str::to_owned))
        .expect("numbers");
    assert_eq!(free, all, "{after}");
    stop_redis(one);
}

/// Only the machine that lives is a client still.
fn server_has_noticed(fixture: &Fixture, hosts: &Path) {
    fixture.wait_until("one client to be left", || {
        let shown = Command::new(build::usmc())
            .args(["ivshmem-server", "status", "--json"])
            .arg(hosts)
            .output()
            .expect("usmc");
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        shown["clients"].as_array().map(Vec::len) == Some(1)
    });
}

/// The last step: there is no way back.
fn a_kernel_that_is_locked_down(one: &mut Guest, _other: &mut Guest) {
    one.run("mount -t securityfs none /sys/kernel/security && echo integrity >/sys/kernel/security/lockdown");
    let refused = check(one, "");
    assert!(refused.contains("kernel lockdown forbids the region's device"), "{refused}");
    let refused = one.run("usmc region show $region 2>&1 || :");
    assert!(refused.contains("kernel_lockdown(7)"), "{refused}");
    let refused = one.run("usmc region setup 2>&1 || :");
    assert!(refused.contains("is left alone: kernel lockdown"), "{refused}");
    // Programs go on without it.
    start_redis(one, "usmc run");
    one.run("usmc run -- redis-benchmark -t get -n 1000 -c 5 -q");
    stop_redis(one);
}

/// TCP and uSMC in turn, in the same machines. Their code is translated, TCP's kernels and the cable of QEMU's included: the ratios
/// flatter uSMC by far, and say nothing of machines with KVM. How many frames go over the cable is exact.
#[test]
fn what_two_guests_gain() {
    if is_plain() || !flag("USMC_TESTS_VM_SPEED") || !vm::is_wanted() {
        return;
    }
    build::usmc();
    let fixture = Fixture::with_limit("guests' speed", 3 * LIMIT);
    let region = region(&fixture);
    let persistent = fixture.ism_dir().join("persistent");
    File::create_new(&persistent).and_then(|file| file.set_len(PERSISTENT)).expect("a sparse file");
    let (server, mut serves) = serve(&fixture);
    let mut guests = Guests::boot(&fixture, &region, &persistent, &server.guests);
    let [one, other] = guests.both();
    one.run("USMC_REGIONS=$region usmc bench --serve 10.0.0.1 >/tmp/served 2>&1 &");
    one.run("until grep -q Serves /tmp/served; do sleep 0.1; done");
    let bench = "USMC_REGIONS=$region usmc bench --vm 10.0.0.1 --rounds 3 --duration 2 2>&1";
    let (status, table) = other.try_run(bench);
    println!("{table}");
    assert_eq!(status, 0, "{}", one.run("cat /tmp/served"));
    guests.shut_down();
    serves.signal(libc::SIGTERM);
    assert!(serves.wait().success(), "{}", serves.errors());
    for path in [region, persistent] {
        fs::remove_file(path).expect("memory of both");
    }
    fixture.finish();
}
