//! How much a sender may leave unread: what TCP's buffers would take (tcp(7): tcp_wmem, tcp_rmem; SO_SNDBUF, SO_RCVBUF).

use usmc_shm::layout::{Slot, WINDOW_SHIFT_MAX, WINDOW_SHIFT_MIN};
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use super::conn::Conn;
use crate::os::path::read;
use crate::os::sockopt;

/// What TCP's buffers take where no sizes were set: of the sender, growing by itself, and of a receiver that has read nothing
/// yet, in bytes; 0 = not asked yet.
static DEFAULTS: [AtomicU32; 2] = [const { AtomicU32::new(0) }; 2];

/// The numbers of tcp(7), and where they stand.
pub fn defaults() -> [u32; 2] {
    const WANTED: [(&core::ffi::CStr, usize, u32); 2] = [
        (c"/proc/sys/net/ipv4/tcp_wmem", 2, 4 << 20),
        (c"/proc/sys/net/ipv4/tcp_rmem", 1, 128 << 10),
    ];
    core::array::from_fn(|i| {
        let (path, column, usual) = WANTED[i];
        let known = DEFAULTS[i].load(Relaxed);
        if known != 0 {
            return known;
        }
        let mut text = [0; 128];
        let asked = read(path, &mut text).and_then(|text| {
            text.split_ascii_whitespace().nth(column)?.parse().ok().filter(|bytes| *bytes > 0)
        });
        let bytes = asked.unwrap_or(usual);
        DEFAULTS[i].store(bytes, Relaxed);
        bytes
    })
}

/// Limits what may be unread to what TCP would buffer, where the application has set a buffer's size, be it the peer's, or
/// before the window grows.
pub fn set(fd: i32, conn: &Conn, slot: &Slot) {
    let cells = [&conn.snd_buf, &conn.peer_end(slot).rcv_buf, &conn.tx_most];
    if cells.iter().any(|cell| cell.load(Relaxed) > 0) {
        set_to_tcps(fd, conn, slot);
    }
}

/// SO_RCVBUF of the peer, as far as it is set.
pub fn peers_rcv_buf(conn: &Conn, slot: &Slot) -> u32 {
    conn.peer_end(slot).rcv_buf.load(Relaxed)
}

/// A way back to TCP must find room for all that is unread. So what the sender's buffer has now counts, and not what it may
/// grow to: it never shrinks, and how it grows depends on the kernel (Linux 6.12 has 2.6 MB on loopback and stays there) and on
/// the segments' size (69 KB between network namespaces, and up to 1 MB when they are full).
pub fn set_to_tcps(fd: i32, conn: &Conn, slot: &Slot) {
    let [usual_snd, usual_rcv] = defaults();
    // Of a buffer that the application has not set.
    let growing = || sockopt::int(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, 0).max(0).cast_unsigned();
    let (snd, least) = match conn.snd_buf.load(Relaxed) {
        0 => (growing().clamp(1, usual_snd), 1 << conn.full_shift()),
        set => (set, 1 << WINDOW_SHIFT_MIN),
    };
    let bytes = in_buffers(snd, or_usual(peers_rcv_buf(conn, slot), usual_rcv));
    conn.tx_most.store(bytes.clamp(least, MOST) & !0xfff, Relaxed);
}

/// The size that was set, or the usual one.
pub fn or_usual(set: u32, usual: u32) -> u32 {
    if set > 0 { set } else { usual }
}

/// How many bytes fit in buffers of these sizes, whatever their segments: what the kernel counts is more.
pub fn in_buffers(snd: u32, rcv: u32) -> u32 {
    (snd - snd / 32).saturating_add(rcv - rcv / 8)
}

/// More than any ring holds.
pub const MOST: u32 = 4 << WINDOW_SHIFT_MAX;
