//! Hosts with engines in one process, joined by RDMA devices and TCP that a seeded schedule drives: what a queue pair or a TCP
//! connection carries stays in order, everything else comes in any order.

mod application;
mod events;
mod hosts;
mod machine;
mod outcome;
mod trouble;
mod wire;

use hosts::{Network, Plan};

/// Schedules of each kind.
const SCHEDULES: u64 = 300;

fn run(seed: u64, plan: Plan) -> Network {
    let mut network = Network::new(seed, plan);
    network.run();
    network.check();
    network
}

#[test]
fn every_byte_arrives_in_order_and_both_ends_close() {
    for seed in 0..SCHEDULES {
        let network = run(seed, Plan { connections: 6, ..Plan::default() });
        assert_eq!(network.whole(), 6, "seed {seed}");
        assert_eq!(network.groups(), [1, 1], "one group serves them all, seed {seed}");
    }
}

#[test]
fn two_links_share_the_connections_and_announce_their_keys() {
    for seed in 0..SCHEDULES {
        let network = run(seed, Plan { connections: 6, devices: 2, ..Plan::default() });
        assert_eq!(network.whole(), 6, "seed {seed}");
        assert_eq!(network.groups(), [1, 1], "seed {seed}");
    }
}

#[test]
fn a_lost_link_loses_and_doubles_no_byte_where_there_is_another() {
    let (mut moved, mut stayed_tcp, mut unused) = (0, 0, 0);
    for seed in 0..SCHEDULES {
        let plan = Plan { connections: 6, devices: 2, cuts: 1, bytes: 400_000, ..Plan::default() };
        let network = run(seed, plan);
        let whole = network.whole();
        assert_eq!(whole + network.tcp() + network.unused(), 6, "seed {seed}: {}", network.story());
        unused += network.unused();
        moved += network.moved();
        stayed_tcp += network.tcp();
    }
    assert!(moved > SCHEDULES as usize / 2, "{moved} messages were on a link that was cut");
    // Of six in each schedule.
    assert!(stayed_tcp < SCHEDULES as usize * 6 / 20, "{stayed_tcp} stayed TCP");
    assert!(
        unused < SCHEDULES as usize * 6 / 100,
        "{unused} were aborted between Accept and Confirm"
    );
}

#[test]
fn applications_end_as_they_like_and_nobody_hangs() {
    for seed in 0..SCHEDULES / 6 {
        let shifts = [14 + seed as u32 % 7, 14 + seed as u32 / 7 % 7];
        let plan = Plan { connections: 12, is_wild: true, shifts, ..Plan::default() };
        let plan = Plan { devices: 1 + seed as u8 % 2, bytes: 200_000, ..plan };
        run(seed, plan).settle();
    }
}

#[test]
fn refused_verbs_end_no_connection_at_one_end_only() {
    let mut refused = 0;
    for seed in 0..SCHEDULES {
        let plan = Plan { connections: 12, refusals: 20, bytes: 60_000, ..Plan::default() };
        let mut network = run(seed, Plan { devices: 1 + seed as u8 % 2, ..plan });
        network.settle();
        refused += network.refused();
    }
    assert!(refused > SCHEDULES as usize, "{refused} calls");
}

#[test]
fn handshakes_that_stop_anywhere_leave_nothing() {
    for seed in 0..SCHEDULES {
        let plan = Plan { connections: 12, clc_faults: 15, bytes: 20_000, ..Plan::default() };
        let plan = Plan { devices: 1 + seed as u8 % 2, refusals: seed % 3, ..plan };
        run(seed, plan).settle();
        // RMBs are withdrawn from one group for another in the middle of it.
        run(seed, Plan { hosts: 3, connections: 24, slots: 4, ..plan }).settle();
    }
}

#[test]
fn a_lost_last_link_ends_its_connections_and_gives_nobody_a_wrong_byte() {
    let mut ended = 0;
    for seed in 0..SCHEDULES {
        let plan = Plan { connections: 6, cuts: 1, bytes: 400_000, ..Plan::default() };
        let network = run(seed, plan);
        ended += 6 - network.whole() - network.tcp();
    }
    assert!(ended > SCHEDULES as usize, "{ended} ended");
}

#[test]
fn buffers_serve_again_without_a_word_to_the_peer() {
    for seed in 0..8 {
        let network = run(seed, Plan { connections: 40, slots: 3, ..Plan::default() });
        assert_eq!(network.whole(), 40, "seed {seed}");
        assert!(network.keys() <= [3, 3], "{:?} keys, seed {seed}", network.keys());
    }
}

#[test]
fn links_are_cut_one_after_the_other() {
    for seed in 0..SCHEDULES / 2 {
        let plan = Plan { connections: 8, devices: 2, cuts: 3, bytes: 400_000, ..Plan::default() };
        run(seed, plan).settle();
    }
}

#[test]
fn more_connections_than_a_group_has_keys_for_begin_another() {
    for seed in 0..2 {
        let plan = Plan { connections: 400, slots: 300, bytes: 3000, ..Plan::default() };
        let mut network = run(seed, plan);
        assert_eq!(network.whole(), 400);
        assert_eq!(network.groups(), [2, 2]);
        network.settle();
    }
}

#[test]
fn two_thousand_connections_in_turn_need_one_group() {
    let plan = Plan { connections: 2000, slots: 4, bytes: 600, ..Plan::default() };
    let mut network = run(1, plan);
    assert_eq!((network.whole(), network.groups()), (2000, vec![1, 1]));
    network.settle();
}

#[test]
fn a_third_host_has_groups_of_its_own() {
    for seed in 0..SCHEDULES / 2 {
        // Slots serve one group after the other.
        let plan = Plan { hosts: 3, connections: 30, slots: 4, bytes: 20_000, ..Plan::default() };
        let network = run(seed, Plan { devices: 1 + seed as u8 % 2, ..plan });
        assert_eq!(network.whole(), 30, "seed {seed}");
    }
}
