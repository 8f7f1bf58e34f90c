//! Sleep and wake with one sleeper at each side.

use usmc_shm::layout::ARM_TCP;
use usmc_shm::ring::Grant;

use crate::model::sync::{Arc, Mutex};
use crate::model::thread;
use crate::model::{Bell, Link, check, consume, produce};

#[test]
fn a_reader_that_sleeps_is_woken_by_the_next_byte() {
    check(None, || {
        let link = Link::new();
        let bell = Arc::new(Bell::default());
        let producer = thread::spawn({
            let (link, bell) = (link.clone(), bell.clone());
            move || {
                for byte in [1, 2] {
                    produce(link.ring(0), &[byte]);
                    if link.ring(0).has_rx_sleepers() && link.ring(0).take_rx_sleepers(false) != 0 {
                        bell.ring();
                    }
                }
            }
        });
        let ring = link.ring(0);
        let mut got = Vec::new();
        while got.len() < 2 {
            if consume(ring, 2, &mut got) == 0 {
                ring.arm_rx(ARM_TCP);
                if !ring.has_data() {
                    bell.wait();
                }
            }
        }
        assert_eq!(got, [1, 2]);
        producer.join().unwrap();
    });
}

/// Both ends sleep whenever they can, the writer once its window cannot grow; the reader takes at most `max` bytes at a time.
fn a_writer_on_a_full_ring_is_woken(link: fn() -> Arc<Link>, total: u8, max: usize) {
    check(Some(3), move || {
        let link = link();
        let (data, room) = (Arc::new(Bell::default()), Arc::new(Bell::default()));
        let producer = thread::spawn({
            let (link, data, room) = (link.clone(), data.clone(), room.clone());
            move || {
                let ring = link.ring(0);
                for byte in 0..total {
                    while produce(ring, &[byte]) == 0 {
                        if ring.grow(|_, len| Grant::of(len)).unwrap() {
                            continue;
                        }
                        ring.arm_tx(ARM_TCP);
                        if !ring.is_writable() {
                            room.wait();
                        }
                    }
                    if ring.has_rx_sleepers() && ring.take_rx_sleepers(false) != 0 {
                        data.ring();
                    }
                }
            }
        });
        let ring = link.ring(0);
        let mut got = 0;
        while got < total {
            let unread = ring.data().unwrap();
            let len = unread.len.min(max);
            if len > 0 {
                got += len as u8;
                if ring.consume_waking(&unread, len) && ring.take_tx_sleepers(false) != 0 {
                    room.ring();
                }
                continue;
            }
            ring.arm_rx(ARM_TCP);
            if !ring.has_data() {
                data.wait();
            }
        }
        producer.join().unwrap();
    });
}

/// With the rule "look for sleepers when at least half the window was unread before" this one deadlocks:
/// each read may see a single byte, while the writer's last look still misses all of them.
#[test]
fn a_writer_is_woken_by_single_byte_reads() {
    a_writer_on_a_full_ring_is_woken(Link::grown, 6, 1);
}

#[test]
fn a_writer_is_woken_by_reads_of_all_there_is() {
    a_writer_on_a_full_ring_is_woken(Link::grown, 6, 4);
}

#[test]
fn a_writer_whose_window_has_grown_is_woken() {
    a_writer_on_a_full_ring_is_woken(Link::new, 5, 1);
    a_writer_on_a_full_ring_is_woken(Link::new, 5, 4);
}

#[test]
fn a_writer_whose_window_is_in_the_far_part_is_woken() {
    a_writer_on_a_full_ring_is_woken(Link::far, 7, 1);
    a_writer_on_a_full_ring_is_woken(Link::far, 7, 4);
}

/// One thread of an end changes to the far part while another one of it goes to sleep for room: the consumer's marks lie further apart
/// from then on.
#[test]
fn a_writer_beside_one_that_streams_is_woken() {
    check(Some(3), || {
        let link = Link::very_far();
        let (sending, room) = (Arc::new(Mutex::new(())), Arc::new(Bell::default()));
        let writer = thread::spawn({
            let (link, sending, room) = (link.clone(), sending.clone(), room.clone());
            move || {
                let ring = link.ring(0);
                let send = |byte| {
                    let _held = sending.lock().unwrap();
                    produce(ring, &[byte])
                };
                for byte in 0..3 {
                    while send(byte) == 0 {
                        ring.arm_tx(ARM_TCP);
                        if !ring.is_writable() {
                            room.wait();
                        }
                    }
                }
            }
        });
        let streamer = thread::spawn({
            let (link, sending) = (link.clone(), sending.clone());
            move || {
                let _held = sending.lock().unwrap();
                let _room = link.ring(0).stream(1, |_, len| Grant::of(len));
            }
        });
        let (ring, mut got) = (link.ring(0), 0);
        while got < 3 {
            let unread = ring.data().unwrap();
            if unread.len == 0 {
                thread::yield_now();
                continue;
            }
            got += 1;
            if ring.consume_waking(&unread, 1) && ring.take_tx_sleepers(false) != 0 {
                room.ring();
            }
        }
        writer.join().unwrap();
        streamer.join().unwrap();
    });
}
