//! The ring alone: order, wrap, growth of the window.

use crate::model::thread;
use crate::model::{Link, check, consume, produce};

/// Sends `writes` while the other side reads at most `max` bytes at a time.
fn transfer(writes: &'static [&'static [u8]], max: usize) {
    check(Some(3), move || {
        let link = Link::new();
        let producer = thread::spawn({
            let link = link.clone();
            move || {
                for write in writes {
                    let mut rest = *write;
                    while !rest.is_empty() {
                        let sent = produce(link.ring(0), rest);
                        rest = &rest[sent..];
                        if sent == 0 {
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
    transfer(&[b"a", b"b", b"c", b"d", b"e"], 1);
}

#[test]
fn bytes_keep_their_order_when_both_sides_split_them() {
    transfer(&[b"ab", b"c", b"de"], 2);
}

#[test]
fn the_window_grows_once_the_ring_is_empty() {
    transfer(&[b"a", b"bcd", b"e"], 4);
}

#[test]
fn a_write_larger_than_the_ring_is_cut() {
    transfer(&[b"abcdef"], 3);
}
