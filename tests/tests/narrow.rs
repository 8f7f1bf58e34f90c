//! 32-bit programs beside 64-bit ones: Debian's Python in both classes, and the load program.
#![cfg(target_arch = "x86_64")]

use std::path::{Path, PathBuf};

use usmc_tests::{Fixture, Process, build, is_plain};

/// Pythons of both classes, the 32-bit one first. What has to be built takes longer than a test may.
fn pythons() -> [PathBuf; 2] {
    [build::python32(), PathBuf::from("/usr/bin/python3")]
}

/// A part of `programs/python/classes.py`, under uSMC.
fn part(fixture: &Fixture, python: &Path, words: &[&str]) -> Process {
    let mut command = fixture.command(python);
    command.arg(build::tests_dir().join("programs/python/classes.py")).args(words);
    fixture.spawn(command)
}

/// Fetches over a connection that has to be SMC-D at both ends then.
fn fetches(fixture: &Fixture, python: &Path, port: u16) {
    let mut client = part(fixture, python, &["fetch", &port.to_string()]);
    let local = client.number_after("local");
    fixture.assert_smcd(port, u16::try_from(local).expect("a port"));
    client.succeed();
    assert_eq!(client.errors(), "");
}

fn port_of(server: &mut Process) -> u16 {
    u16::try_from(server.number_after("port")).expect("a port")
}

#[test]
fn servers_and_clients_of_either_class_share_rings() {
    let pythons = pythons();
    let fixture = Fixture::new("classes");
    for server in &pythons {
        let mut serving = part(&fixture, server, &["serve"]);
        let port = port_of(&mut serving);
        for client in &pythons {
            fetches(&fixture, client, port);
        }
        serving.kill();
        assert_eq!(serving.errors(), "");
    }
    fixture.finish();
}

#[test]
fn a_listener_that_crosses_exec_into_the_other_class_is_served() {
    let [narrow, wide] = pythons();
    let fixture = Fixture::new("exec into the other class");
    for (first, then) in [(&narrow, &wide), (&wide, &narrow)] {
        let mut serving = part(&fixture, first, &["serve-by", &then.to_string_lossy()]);
        let port = port_of(&mut serving);
        for client in [&narrow, &wide] {
            fetches(&fixture, client, port);
        }
        serving.kill();
        assert_eq!(serving.errors(), "");
    }
    fixture.finish();
}

#[test]
fn programs_start_programs_of_the_other_class_and_each_has_its_library() {
    let [narrow, wide] = pythons();
    let fixture = Fixture::new("started");
    let script = build::tests_dir().join("programs/python/classes.py");
    for (first, then, bits) in [(&narrow, &wide, "64"), (&wide, &narrow, "32")] {
        let (then, script) = (then.to_string_lossy(), script.to_string_lossy());
        let mut process = part(&fixture, first, &["run", &then, &script, "maps"]);
        assert_eq!(process.line_after("bits"), bits);
        let library = process.line_after("library");
        assert!(is_plain() != library.contains("libusmc_preload.so"), "{bits} bits: {library:?}");
        process.succeed();
        // The dynamic linker would say here what it cannot preload.
        assert_eq!(process.errors(), "");
    }
    fixture.finish();
}

#[test]
fn a_32_bit_program_keeps_most_of_its_addresses() {
    let programs = ["load32", "load"].map(build::program);
    let fixture = Fixture::new("addresses");
    let mut command = fixture.command(&programs[0]);
    command.arg("server").env("USMC_RING_SIZE", "4M");
    let mut server = fixture.spawn(command);
    let port = port_of(&mut server);
    let mut command = fixture.command(&programs[1]);
    command.args(["many", &port.to_string(), "20"]).env("USMC_RING_SIZE", "4M");
    let mut client = fixture.spawn(command);
    client.line_after("connected");
    for _ in 0..70 {
        client.say("talk");
        client.line_after("round");
    }
    if !is_plain() {
        // The client's first segment has 16 slots and 128 MiB, the second would take 512 MiB.
        let all = fixture.connections(port);
        let served = all.iter().filter(|c| c.local_port() == port);
        let (ring, tcp): (Vec<_>, Vec<_>) = served.partition(|c| c.is_smcd());
        assert_eq!(ring.len(), 16, "{all:#?}");
        let explained = tcp.iter().all(|c| c.fallback_reason == "no slot or memory left");
        assert!(tcp.len() == 4 && explained, "{tcp:#?}");
    }
    client.succeed();
    server.succeed();
    fixture.finish();
}
