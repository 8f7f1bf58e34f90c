//! Two virtual machines, and programs in them that have a region in common.
//!
//! They boot once, for all that is tested: each step leaves them as it has found them.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use usmc_tests::vm::{self, Guest, Guests};
use usmc_tests::{Fixture, build, is_plain};

/// On two cores, with the boot.
const LIMIT: Duration = Duration::from_secs(100);
/// Bytes of the device: a power of two.
const SIZE: u64 = 32 << 20;

/// Something that both are asked to do.
type Step = fn(&mut Guest, &mut Guest);

#[test]
fn two_guests() {
    if is_plain() || !vm::is_wanted() {
        return;
    }
    build::usmc();
    let fixture = Fixture::with_limit("two guests", LIMIT);
    let region = region(&fixture);
    let mut guests = Guests::boot(&fixture, &region);
    let steps: [(&str, Step); 3] = [
        ("both are on one cable", both_are_on_one_cable),
        ("both have one memory", both_have_one_memory),
        ("redis without a region", redis_without_a_region),
    ];
    for (name, step) in steps {
        println!("{name}, {} s left", fixture.time_left().as_secs());
        let [one, other] = guests.both();
        step(one, other);
    }
    guests.shut_down();
    assert!(vm::frames(guests.cable(), "icmp") >= 2);
    std::fs::remove_file(region).expect("the region");
    fixture.finish();
}

/// The file that both have as a device.
fn region(fixture: &Fixture) -> PathBuf {
    // In memory.
    let path = fixture.ism_dir().join("region");
    File::create_new(&path).and_then(|file| file.set_len(SIZE)).expect("a sparse file");
    path
}

fn both_are_on_one_cable(one: &mut Guest, other: &mut Guest) {
    one.run("busybox ping -q -c 1 -W 10 10.0.0.2");
    other.run("busybox ping -q -c 1 -W 10 10.0.0.1");
}

/// A word of the device's last page, which no region uses.
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
    one.run("usmc run -- redis-server --bind 0.0.0.0 --protected-mode no --save '' >/tmp/redis.log 2>&1 &");
    one.run("until redis-cli ping >/dev/null 2>&1; do sleep 0.1; done");
    let done = other.run("usmc run -- redis-benchmark -h 10.0.0.1 -t set,get -n 2000 -c 10 -q");
    assert!(done.contains("SET: ") && done.contains("GET: "), "{done}");
    other.run("usmc run -- redis-benchmark -h 10.0.0.1 -t get -l -q >/dev/null 2>&1 &");
    other.run("until usmc ss | grep -q 10.0.0.1:6379; do sleep 0.1; done");
    let shown = other.run("usmc ss | grep 10.0.0.1:6379");
    assert!(shown.contains("TCP") && !shown.contains("SMCD"), "{shown}");
    other.run("pkill -x redis-benchmark");
    one.run("redis-cli shutdown nosave; while pgrep -x redis-server; do sleep 0.1; done");
}
