//! Which socket options may have another value than a new socket's: the kernel need not be asked for the others, of which a connection
//! has many when it enters a ring, or goes to an agent.

use usmc_shm::sync::Ordering::Relaxed;

use super::conn::{Conn, F_ADOPTED, F_COPIED, F_SHARED};

/// The options that the library asks the kernel for.
const NAMED: [(i32, i32); 9] = [
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
];
/// All bits: the options of a socket that this process has not made.
const ANY: u32 = u32::MAX;

/// The option's bit; 0 = it is not asked for.
fn bit(level: i32, name: i32) -> u32 {
    NAMED.iter().position(|named| *named == (level, name)).map_or(0, |at| 1 << at)
}

/// Nothing is known of the socket's options.
pub fn doubt(conn: &Conn) {
    conn.options.store(ANY, Relaxed);
}

/// The socket is new, and this process has made it.
pub fn begin(conn: &Conn) {
    conn.options.store(0, Relaxed);
}

/// An accepted socket begins with its listener's options.
pub fn inherit(conn: &Conn, listener: &Conn) {
    conn.options.store(known(listener), Relaxed);
}

/// The application sets it.
pub fn note(conn: &Conn, level: i32, name: i32) {
    let bit = bit(level, name);
    if conn.options.load(Relaxed) & bit != bit {
        conn.options.fetch_or(bit, Relaxed);
    }
}

/// The bits of the options that may be set. The library does not hear of a setsockopt(2) in another process that has the socket, too.
fn known(conn: &Conn) -> u32 {
    if conn.has(F_ADOPTED | F_COPIED | F_SHARED) { ANY } else { conn.options.load(Relaxed) }
}

/// Whether the option may have another value than a new socket's. An option outside the list always may.
pub fn may_be_set(conn: &Conn, level: i32, name: i32) -> bool {
    let bit = bit(level, name);
    bit == 0 || known(conn) & bit != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_set_is_asked_for() {
        // SAFETY: atomics and pointers, for which all-zero is valid.
        let [listener, conn]: [Conn; 2] = unsafe { core::mem::zeroed() };
        let may = |conn: &Conn| NAMED.map(|(level, name)| may_be_set(conn, level, name));
        begin(&listener);
        assert_eq!(may(&listener), [false; 9]);
        assert!(may_be_set(&listener, libc::SOL_SOCKET, libc::SO_SNDBUF), "nobody notes it");
        note(&listener, libc::IPPROTO_TCP, libc::TCP_NODELAY);
        note(&listener, libc::SOL_SOCKET, libc::SO_SNDBUF);
        inherit(&conn, &listener);
        note(&conn, libc::SOL_SOCKET, libc::SO_LINGER);
        assert_eq!(may(&conn), [false, false, false, false, false, false, true, true, false]);
        // A child has the listener, too.
        listener.set_flag(F_COPIED, true);
        inherit(&conn, &listener);
        assert_eq!(may(&conn), [true; 9]);
        begin(&conn);
        doubt(&conn);
        assert_eq!(may(&conn), [true; 9]);
    }
}
