//! The ring alone: order, wrap, growth of the window.

use crate::model::sync::Arc;
use crate::model::thread;
use usmc_shm::ring::Grant;

use crate::model::{Link, check, consume, produce};

/// Sends `writes` while the other side reads at most `max` bytes at a time; `grows`: a writer that finds no room takes the
/// whole ring.
fn transfer(writes: &'static [&'static [u8]], max: usize, grows: bool) {
    transfer_by(Link::new, writes, max, grows);
}

/// The same by rings with far parts, which the writer leaves whenever it can.
fn transfer_far(writes: &'static [&'static [u8]], max: usize) {
    transfer_by(Link::far, writes, max, true);
}

fn transfer_by(link: fn() -> Arc<Link>, writes: &'static [&'static [u8]], max: usize, grows: bool) {
    check(Some(3), move || {
        let link = link();
        let producer = thread::spawn({
            let link = link.clone();
            move || {
                for write in writes {
                    let mut rest = *write;
                    while !rest.is_empty() {
                        let sent = produce(link.ring(0), rest);
                        rest = &rest[sent..];
                        let is_writable =
                            grows && link.ring(0).grow(|_, len| Grant::of(len)).unwrap();
                        if link.ring(0).has_far() && link.ring(0).leave_far().is_some() {
                            link.ring(0).left_far();
                        }
                        if sent == 0 && !is_writable {
                            thread::yield_now();
                        }
                    }
                }
            }
        });
        let expected = writes.concat();
        let mut got = Vec::new();
        while got.len() < expected.len() {
            if consume(link.ring(0), max, &mut got) == 0 {
                thread::yield_now();
            }
        }
        assert_eq!(got, expected);
        producer.join().unwrap();
    });
}

#[test]
fn bytes_keep_their_order_over_the_wrap() {
    transfer(&[b"a", b"b", b"c", b"d", b"e"], 1, false);
}

#[test]
fn bytes_keep_their_order_when_both_sides_split_them() {
    transfer(&[b"ab", b"c", b"de"], 2, false);
}

#[test]
fn the_window_grows_once_the_ring_is_empty() {
    transfer(&[b"a", b"bcd", b"e"], 4, false);
}

#[test]
fn a_write_larger_than_the_ring_is_cut() {
    transfer(&[b"abcdef"], 3, false);
}

#[test]
fn a_window_grows_under_unread_bytes() {
    transfer(&[b"ab", b"c", b"d"], 1, true);
}

#[test]
fn a_window_grows_under_bytes_that_go_over_its_end() {
    transfer(&[b"a", b"bc", b"d"], 3, true);
}

#[test]
fn a_window_grows_again_once_the_ring_was_empty() {
    transfer(&[b"abc", b"def"], 3, true);
}

#[test]
fn a_window_grows_into_the_far_part_under_unread_bytes() {
    transfer_far(&[b"ab", b"c", b"d"], 1);
}

#[test]
fn bytes_keep_their_order_on_the_way_into_the_far_part_and_back() {
    transfer_far(&[b"abc", b"de"], 3);
}

#[test]
fn bytes_keep_their_order_over_the_end_of_the_far_part() {
    transfer_far(&[b"ab", b"cdef", b"g"], 2);
}
