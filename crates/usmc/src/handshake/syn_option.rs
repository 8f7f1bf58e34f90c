//! "I speak SMC" in the SYN: TCP option 254/E2D4C3D9, written and read by programs in the kernel that `usmc ebpf load`
//! brings there (`usmc-cli/bpf/tcp_option.bpf.c`). Here: which sockets ask for it, and what came of it.
//!
//! A socket is armed before connect(2) or listen(2), by an option of our own at level SOL_SMC, which the kernel itself
//! does not know. Where the programs are not loaded the first attempt fails, and there is no second one in this process; a
//! client's first is a question that changes nothing.
//!
//! An end that says that it speaks SMC has to read the CLC message that may be the answer ([`crate::handshake::clc::first`]). So a
//! listener is disarmed before a process may accept from it that is without the library. A client does not ask where the
//! device has its destination: there the change-over needs no message.

use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use crate::handshake::{brief, clc, transition};
use crate::host;
use crate::os::config::{self, TcpOption};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::{kernel_only, log};
use crate::record::change_over::Call;
use crate::record::conn::{
    self, Conn, F_ADOPTED, F_ARMED, F_BRIEF, F_CHILDREN_TCP, F_COPIED, F_KERNEL_ONLY,
};
use crate::record::phase::Phase;
use crate::record::tuple::{self, Endpoint};
use crate::watch::observer;

/// Level of the option (linux/socket.h).
const SOL_SMC: i32 = 286;
/// Its name: 254, and above it the version of what the programs understand.
const USMC_SYN_OPTION: i32 = 1 << 8 | 254;

/// What the programs know of a socket (`enum outcome` there).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Outcome {
    /// It does not ask for the option.
    Unarmed = 0,
    /// The connection is not made yet, or it is a listener.
    Undecided = 1,
    /// The peer says that it speaks SMC, and knows that we do.
    Speaks = 2,
    /// The peer's SYN or SYN-ACK does not say so.
    Silent = 3,
    /// Something on the way sends back whatever option a SYN has.
    Echoed = 4,
}

impl Outcome {
    /// The outcome with this number.
    pub const fn from_code(code: u8) -> Option<Outcome> {
        Some(match code {
            0 => Outcome::Unarmed,
            1 => Outcome::Undecided,
            2 => Outcome::Speaks,
            3 => Outcome::Silent,
            4 => Outcome::Echoed,
            _ => return None,
        })
    }

    /// Why a connection stays TCP for which there is only in-band CLC.
    const fn reason(self) -> Option<Reason> {
        match self {
            Outcome::Unarmed | Outcome::Undecided | Outcome::Speaks => None,
            Outcome::Silent => Some(Reason::PeerSilent),
            Outcome::Echoed => Some(Reason::OptionEchoed),
        }
    }
}

/// Whether the programs are there for sockets of this process; 0 = not tried yet.
static LOADED: AtomicU32 = AtomicU32::new(0);
const YES: u32 = 1;
const NO: u32 = 2;

/// Whether sockets of this process can be armed. For `usmc ebpf status`: tries it each time.
pub fn is_loaded() -> bool {
    let Ok(fd) = sys::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) else {
        return false;
    };
    let loaded = ask(fd).is_some();
    sys::close(fd);
    loaded
}

fn ask(fd: i32) -> Option<Outcome> {
    let mut code = 0u32;
    sys::getsockopt(fd, SOL_SMC, USMC_SYN_OPTION, &mut code).ok()?;
    Outcome::from_code(u8::try_from(code).ok()?)
}

/// Whether sockets of this process are to be armed, as far as is known: all that there is to do where they are not.
#[inline]
pub fn is_wanted() -> bool {
    config::get().tcp_option != TcpOption::Off && LOADED.load(Relaxed) != NO
}

/// The same where it is not known yet, by a question to the kernel.
fn may_arm(fd: i32) -> bool {
    if LOADED.load(Relaxed) == 0 && ask(fd).is_none() {
        are_missing(libc::ENOPROTOOPT);
    }
    is_wanted()
}

fn arm(fd: i32, conn: &Conn) {
    match sys::setsockopt(fd, SOL_SMC, USMC_SYN_OPTION, &1u32) {
        Ok(()) => {
            LOADED.store(YES, Relaxed);
            conn.set_flag(F_ARMED, true);
        }
        // Some sockets cannot be armed though others could: listeners before Linux 6.12, those of another cgroup.
        Err(_) if LOADED.load(Relaxed) == YES => {}
        Err(code) => are_missing(code),
    }
}

fn are_missing(code: Errno) {
    LOADED.store(NO, Relaxed);
    let text = "no socket says SMC: the programs of usmc-ebpf(8) are not there";
    match config::get().tcp_option {
        TcpOption::On => log::warn(format_args!("{text} (errno {code})")),
        _ => log::debug(format_args!("{text} (errno {code})")),
    }
}

/// Before connect(2).
#[inline]
pub fn connecting(fd: i32, index: u32, server: impl FnOnce() -> Option<Endpoint>) {
    if is_wanted() {
        arm_client(fd, conn::at(index), server());
    }
}

#[cold]
fn arm_client(fd: i32, conn: &Conn, server: Option<Endpoint>) {
    let Some(server) = server else { return };
    // The kernel is asked last: a process with a filter of system calls may be ended by a question.
    if conn.has(F_ARMED) || !is_fit(conn, server) || !may_arm(fd) {
        return;
    }
    let board = host::current().board();
    let is_here =
        board.is_listening(None, server) && board.is_listening(Some(tuple::netns(fd)), server);
    let is_named = || {
        config::get().opens_fast(|| server.ip(), Some(server.port)) || clc::is_declared(fd, server)
    };
    let is_brief = !is_here && !is_named() && brief::stays_tcp(server);
    conn.set_flag(F_BRIEF, is_brief);
    if !is_here && !is_brief {
        arm(fd, conn);
    }
}

/// Whether a message may come first in the stream of a connection to that server.
pub fn is_fit(conn: &Conn, server: Endpoint) -> bool {
    // Data in the SYN comes before any handshake; other holders of the socket know of none.
    let never = F_KERNEL_ONLY | F_COPIED | F_ADOPTED;
    conn.phase() == Phase::Fresh
        && !conn.has(never)
        && kernel_only::reason().is_none()
        && !host::current().is_off()
        && config::get().allows(|| server.ip(), server.port)
}

/// Before listen(2), or when a listener comes from elsewhere.
pub fn listening(fd: i32, conn: &Conn, at: Endpoint) {
    if is_wanted()
        && kernel_only::reason().is_none()
        && !conn.has(F_ARMED | F_CHILDREN_TCP | F_KERNEL_ONLY)
        && config::get().allows(|| at.ip(), at.port)
    {
        arm(fd, conn);
    }
}

/// A process may accept from this listener that is without the library, or cannot use it.
pub fn disarm(fd: i32, conn: &Conn) {
    if !conn.has(F_ARMED) {
        return;
    }
    match sys::setsockopt(fd, SOL_SMC, USMC_SYN_OPTION, &0u32) {
        Ok(()) => conn.set_flag(F_ARMED, false),
        Err(code) => log::warn(format_args!(
            "fd {fd}: goes on to say SMC (errno {code}); that can be changed since Linux 6.12"
        )),
    }
}

/// An accepted connection has it from its listener.
pub fn accepted(fd: i32, conn: &Conn, listener: &Conn) {
    if listener.has(F_ARMED) {
        conn.set_flag(F_ARMED, true);
        settle(fd, conn);
    }
}

/// The connection may be made now. Says whether what is known has changed.
pub fn settle(fd: i32, conn: &Conn) -> bool {
    if !conn.has(F_ARMED) || !matches!(outcome(conn), Outcome::Unarmed | Outcome::Undecided) {
        return false;
    }
    let Some(outcome) = ask(fd) else { return false };
    conn.syn_option.swap(outcome as u32, Relaxed) != outcome as u32
}

/// The same, for a thread that looks at what a connect(2) in progress has come to.
#[inline]
pub fn looked(fd: i32, index: u32) {
    let conn = conn::at(index);
    if conn.phase() == Phase::Early && clc::is_on(conn) {
        transition::progress(fd, index, Call::Look);
    }
    if conn.has(F_ARMED) && settle(fd, conn) {
        if conn.phase() == Phase::Plain {
            let reason = Reason::from_code(conn.reason.load(Relaxed) as u8);
            conn.reason.store(reason_of(conn, reason.unwrap_or(Reason::None)) as u32, Relaxed);
        }
        observer::changed(fd, index);
    }
}

/// What is known of this connection.
pub fn outcome(conn: &Conn) -> Outcome {
    Outcome::from_code(conn.syn_option.load(Relaxed) as u8).unwrap_or(Outcome::Unarmed)
}

/// Whether the peer of this connecting end has said that it speaks SMC, or may yet say so.
pub fn may_speak(conn: &Conn) -> bool {
    conn.has(F_ARMED) && matches!(outcome(conn), Outcome::Undecided | Outcome::Speaks)
}

/// Why it is TCP, where `known` is that the peer is not on our device.
pub fn reason_of(conn: &Conn, known: Reason) -> Reason {
    match (known, outcome(conn).reason()) {
        (Reason::NotRegistered | Reason::NoOffer, None) if conn.has(F_BRIEF) => Reason::Brief,
        (Reason::NotRegistered | Reason::NoOffer, Some(why)) => why,
        _ => known,
    }
}

/// Whether the peer said, when the connection was made, that it speaks SMC: only then may a CLC message be sent to it.
/// `None`: nothing is known, for the option was not asked for, or the connection is not made yet.
///
/// An acceptor told that the SYN said so does not know that its answer has arrived: a client whose SYN-ACK lost the
/// option sends no CLC, and the first bytes are the application's. So it may not wait for a Proposal without a limit.
pub fn peer_speaks_smc(fd: i32, conn: &Conn) -> Option<bool> {
    settle(fd, conn);
    match outcome(conn) {
        Outcome::Unarmed | Outcome::Undecided => None,
        Outcome::Speaks => Some(true),
        Outcome::Silent | Outcome::Echoed => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_programs() {
        let source = include_str!("../../../usmc-cli/bpf/tcp_option.bpf.c");
        for (name, outcome) in [
            ("UNARMED", Outcome::Unarmed),
            ("UNDECIDED", Outcome::Undecided),
            ("SPEAKS", Outcome::Speaks),
            ("SILENT", Outcome::Silent),
            ("ECHOED", Outcome::Echoed),
        ] {
            let code = outcome as u8;
            assert!(source.contains(&format!("\t{name} = {code},")), "{name} = {code}");
            assert_eq!(Outcome::from_code(code), Some(outcome));
        }
        assert_eq!(Outcome::from_code(5), None);
        assert!(source.contains(&format!("#define SOL_SMC {SOL_SMC}\n")));
        assert!(source.contains("#define USMC_SYN_OPTION (1 << 8 | 254)\n"));
        assert_eq!(USMC_SYN_OPTION, 1 << 8 | 254);
    }

    #[test]
    fn the_option_tells_more_where_the_device_knows_nothing() {
        // SAFETY: atomics and pointers, for which all-zero is valid.
        let conn: Conn = unsafe { core::mem::zeroed() };
        for (outcome, told) in [
            (Outcome::Unarmed, Reason::NotRegistered),
            (Outcome::Undecided, Reason::NotRegistered),
            (Outcome::Speaks, Reason::NotRegistered),
            (Outcome::Silent, Reason::PeerSilent),
            (Outcome::Echoed, Reason::OptionEchoed),
        ] {
            conn.syn_option.store(outcome as u32, Relaxed);
            assert_eq!(reason_of(&conn, Reason::NotRegistered), told);
            assert_eq!(reason_of(&conn, Reason::Excluded), Reason::Excluded);
        }
    }
}
