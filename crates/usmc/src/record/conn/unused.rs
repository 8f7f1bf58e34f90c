//! The records that are not in use.

use usmc_shm::sync::AtomicU64;
use usmc_shm::sync::Ordering::{Acquire, Relaxed};

use super::{BASE, CONNS, Conn, F_HAD_SLOT, F_HANDSHAKE, NEXT, at, fetch};
use crate::os::{process, single, sys};
use crate::record::phase::Event;

/// A free list in a cache line of its own.
#[repr(align(64))]
struct Free(AtomicU64);

/// Heads of the free lists: index + 1 in the low half, a counter against ABA in the high half. A thread uses its own, so
/// that it finds the records that it has left in its caches, and the others' where there is none.
static FREE: [Free; process::SHARES] = [const { Free(AtomicU64::new(0)) }; process::SHARES];

/// Takes an unused record, all zero but its use count. `None` when the table is full.
pub fn alloc() -> Option<u32> {
    sys::reserve(&BASE, CONNS)?;
    let own = process::share();
    if let Some(index) = (0..FREE.len()).find_map(|i| take_from(&FREE[(own + i) % FREE.len()].0)) {
        return Some(index);
    }
    let index = NEXT.fetch_add(1, Relaxed);
    if index as usize >= CONNS {
        NEXT.fetch_sub(1, Relaxed);
        return None;
    }
    Some(index)
}

#[inline(always)]
fn take_from(list: &AtomicU64) -> Option<u32> {
    loop {
        let head = list.load(Acquire);
        let index = (head as u32).checked_sub(1)?;
        let next = at(index).next_free.load(Relaxed);
        let new = (head >> 32).wrapping_add(1) << 32 | next as u64;
        if single::replace(list, head, new).is_ok() {
            // A fork may have marked it while it was being freed.
            at(index).flags.store(0, Relaxed);
            // The next user finds it in the cache.
            fetch(next.wrapping_sub(1));
            return Some(index);
        }
    }
}

/// Gives a record back.
pub fn free(index: u32) {
    let conn = at(index);
    // Nobody else writes it.
    conn.use_count.store(conn.use_count.load(Relaxed).wrapping_add(1), Relaxed);
    if conn.has(F_HAD_SLOT) {
        forget_ring(conn);
    }
    if conn.has(F_HANDSHAKE) {
        conn.clc.clear();
    }
    conn.users.clear();
    for cell in [&conn.flags, &conn.kernel_events, &conn.spare] {
        cell.store(0, Relaxed);
    }
    for cell in [&conn.calls, &conn.watchers, &conn.observed, &conn.reason, &conn.passed_on] {
        cell.store(0, Relaxed);
    }
    for cell in [&conn.cell, &conn.syn_option, &conn.device] {
        cell.store(0, Relaxed);
    }
    for cell in [&conn.tx_blocks, &conn.snd_buf, &conn.rcv_buf, &conn.looks, &conn.rcvlowat] {
        cell.store(0, Relaxed);
    }
    conn.kernel_seen.store(0, Relaxed);
    conn.received.store(0, Relaxed);
    conn.tuple.iter().for_each(|word| word.store(0, Relaxed));
    conn.go(Event::Frees);
    let list = &FREE[process::share()].0;
    loop {
        let head = list.load(Acquire);
        conn.next_free.store(head as u32, Relaxed);
        let new = (head >> 32).wrapping_add(1) << 32 | (index + 1) as u64;
        if single::replace(list, head, new).is_ok() {
            return;
        }
    }
}

/// Those fields that mean something beside a slot only.
fn forget_ring(conn: &Conn) {
    conn.forget_slot();
    conn.forget_past();
    conn.set_life(None);
    for cell in [&conn.rx_sleepers, &conn.tx_sleepers, &conn.blocked_sends, &conn.ringing] {
        cell.store(0, Relaxed);
    }
    for cell in [&conn.asked, &conn.provoked, &conn.polled, &conn.stuck] {
        cell.store(0, Relaxed);
    }
    conn.streamed.store(0, Relaxed);
    conn.spins.forget();
    conn.bias.iter().for_each(|cell| cell.store(0, Relaxed));
}
