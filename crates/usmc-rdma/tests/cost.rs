//! What a message costs must not depend on how many connections there are.

mod pair;

use std::time::{Duration, Instant};

use pair::{NOW, Side, connect, settle, side};

/// What a message takes, as the best of some tries, and the calls of verbs.
fn cost(count: u64) -> (Duration, u64) {
    let mut sides = [side(1, 1), side(2, 1)];
    let all: Vec<_> = (0..count).map(|rmb| connect(&mut sides, rmb)).collect();
    let ([conn, _], [counters, peer]) = all.last().expect("one at least");
    let groups = sides[0].engine.groups() as u64;
    assert_eq!(groups, count.div_ceil(usmc_rdma::RMBS as u64));
    let before = sides[0].nic.calls;
    let mut best = Duration::MAX;
    for _ in 0..20 {
        let begun = Instant::now();
        for _ in 0..500 {
            counters.written.set(counters.written.get() + 100);
            let Side { engine, nic, .. } = &mut sides[0];
            engine.handle_dirty(*conn, nic);
            assert!(engine.next_timeout().is_some_and(|due| due > NOW), "a link is tested");
            settle(&mut sides);
            assert_eq!(peer.arrived.get(), counters.written.get());
            sides[1].events.clear();
        }
        best = best.min(begun.elapsed() / 500);
    }
    (best, sides[0].nic.calls - before)
}

#[test]
fn a_message_costs_the_same_among_ten_thousand_connections() {
    let (few, calls) = cost(10);
    let (many, calls_of_many) = cost(10_000);
    println!("{few:?} among 10 connections, {many:?} among 10 000");
    assert_eq!(calls, calls_of_many);
    // One post each.
    assert_eq!(calls, 20 * 500);
    assert!(many < 4 * few + Duration::from_micros(2), "{few:?}, {many:?}");
}
