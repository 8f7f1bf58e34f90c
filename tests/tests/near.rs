//! Ends that have less in common than a process takes for granted: its ids of processes mean others there.

use usmc_tests::{Fixture, build, is_plain, ss};

/// As the first process of a namespace of process ids of its own.
fn alone(fixture: &Fixture, args: &[&str]) -> usmc_tests::Process {
    let mut command = fixture.plain("unshare");
    command.args(["--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]);
    if !is_plain() {
        command.arg(build::usmc()).args(["run", "--"]);
    }
    command.arg(build::program("load")).args(args);
    fixture.spawn(command)
}

/// Both ends are process 1, each of its own namespace. A sender that is blocked by itself looks each millisecond.
#[test]
fn peer_of_the_same_id_elsewhere_is_another_process() {
    let fixture = Fixture::new("the same id elsewhere");
    let mut server = alone(&fixture, &["unread"]);
    let port = server.line_after("port");
    let mut client = alone(&fixture, &["blocked", &port]);
    client.line_after("talked");
    if !is_plain() {
        let ends = ss::list();
        let in_ring = ends.iter().filter(|end| end.is_smcd()).count();
        println!("{in_ring} ends in shared memory");
        assert_eq!(in_ring, 2, "{ends:?}");
    }
    client.say("go on");
    let slept = client.number_after("slept");
    println!("slept {slept} times");
    assert!(slept < 50, "the sender takes its peer for itself: it slept {slept} times");
    client.succeed();
    server.close_stdin();
    server.succeed();
    fixture.finish();
}
