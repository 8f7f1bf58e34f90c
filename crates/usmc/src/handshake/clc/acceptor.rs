//! The accepting end.

use smc_proto::decline::DeclineCode;
use smc_proto::handshake::Ending;
use smc_proto::ids::PeerId;
use smc_proto::wire::clc::{Answer, Decline, Message as Clc, Proposal};
use usmc_shm::sync::Ordering::Relaxed;

use super::machines::Machine;
use super::stream::Found;
use super::{
    Taken, board, declined, delivered, deputy, first, give_up, id_of, is_spent, machines,
    new_token, note_memory, noted_memory, say, stop_calls,
};
use crate::device::{self, HandOver};
use crate::handshake::transition;
use crate::host::{self, Message, OfferId, Stage};
use crate::os::log;
use crate::os::reason::Reason;
use crate::record::clc_state::Step;
use crate::record::conn::{self, Conn, F_CLC};
use crate::record::kernel;
use crate::record::phase::Phase;

/// Says on the device that this process holds the connection that a client asks for, if one does.
pub fn hold_if_asked(fd: i32, conn: &Conn) -> bool {
    let tuple = transition::stored(conn);
    let Some(id) = device::all().find_map(|(_, device)| device.board().find_question(&tuple))
    else {
        return false;
    };
    // Another connection has the names of one that was reset, and its client asks.
    if kernel::is_over(fd) {
        conn.give_up(Reason::PeerGone);
        return true;
    }
    let Ok(true) = transition::is_free(fd, conn) else { return true };
    if let Err(reason) = can_be_given(id) {
        conn.give_up(reason);
        return true;
    }
    let Some(_rx) = conn.rx_lock.try_enter() else { return true };
    if !conn.stop_kernel_calls() {
        return true;
    }
    if !super::mark(fd, conn) {
        conn.go_on_with_kernel_calls();
        conn.give_up_early(Reason::Adopted);
        return true;
    }
    transition::store_offer_id(conn, id);
    conn.looks.store(transition::LOOKS, Relaxed);
    // Receives end before the Proposal from here on.
    super::enter(conn, Step::Held);
    conn.set_flag(F_CLC, true);
    if device::board_of(id).step(id, Stage::Open, Stage::Held) {
        conn.reason.store(Reason::Handshake as u32, Relaxed);
        log::debug(format_args!("fd {fd}: held for a client on the device"));
    } else {
        super::forget(conn);
    }
    conn.go_on_with_kernel_calls();
    true
}

/// Memory has to be able to come: by the mailbox, where the device's does.
fn can_be_given(id: OfferId) -> Result<(), Reason> {
    match device::hand_over(id) {
        HandOver::Mail => host::current().open_mailbox().map(drop),
        HandOver::Name => Ok(()),
    }
}

/// The client was declared to speak SMC, or has said so in its SYN: its first bytes may be a Proposal.
pub fn expect(conn: &Conn) {
    super::enter(conn, Step::Expecting);
    conn.set_flag(F_CLC, true);
}

/// The connection stays TCP: what was expected is taken out once it comes. Whether that is settled.
pub fn stop_expecting(fd: i32, conn: &Conn) -> bool {
    match take_first(fd, conn) {
        Taken::Wait => return false,
        Taken::Message(Clc::Proposal(proposal)) => {
            if let Some(id) = place_of(&proposal) {
                device::board_of(id).free(id);
            }
            if first::is_agreed(conn) || proposal.offers_smcr() {
                refuse(fd, conn, proposal);
            }
        }
        Taken::Message(Clc::Decline(decline)) => conn.clc.declined.store(decline.code.0, Relaxed),
        Taken::Message(_) | Taken::Other => {}
    }
    super::forget(conn);
    true
}

/// Takes the first message out of the stream: a Proposal, or the Decline of a client that has said SMC.
fn take_first(fd: i32, conn: &Conn) -> Taken {
    take_found(fd, conn, first::look(fd))
}

/// [`take_first`], of the message that a look has found: more may have come since.
fn take_found(fd: i32, conn: &Conn, found: (Found, usize)) -> Taken {
    let is_meant = |message: &Clc| match message {
        Clc::Proposal(_) => true,
        Clc::Decline(_) => first::is_agreed(conn),
        Clc::Accept(_) | Clc::Confirm(_) => false,
    };
    match conn.rx_lock.try_enter() {
        Some(_rx) => super::take_found(fd, conn, found, first::is_agreed(conn), is_meant),
        None => Taken::Wait,
    }
}

/// Where the device keeps the handshake of a first Proposal: the peer's word, if that place says so, too.
fn place_of(proposal: &Proposal) -> Option<OfferId> {
    machines::id_in(proposal).filter(|&id| {
        let board = device::board_of(id);
        let at = board.announced(id, Message::Proposal);
        matches!(board.stage(id), Stage::Proposed | Stage::Abandoned) && at == Some(0)
    })
}

/// Reads what an expected client begins with.
pub fn read_first(fd: i32, conn: &Conn) {
    let found = first::look(fd);
    if let (Found::Message(Clc::Proposal(proposal)), _) = &found
        && place_of(proposal).is_none()
        && deputy::takes_server(conn, proposal)
    {
        return;
    }
    let proposal = match take_found(fd, conn, found) {
        Taken::Wait => return,
        Taken::Message(Clc::Proposal(proposal)) => proposal,
        Taken::Message(Clc::Decline(decline)) => return declined(conn, decline.code),
        // On as with any other client.
        Taken::Message(_) | Taken::Other => return super::forget(conn),
    };
    let id = place_of(&proposal).filter(|&id| device::board_of(id).stage(id) == Stage::Proposed);
    let Some(id) = id else {
        // It is on another device. A peer that was only declared cannot be told where in the stream the answer would be.
        if !first::is_agreed(conn) && !proposal.offers_smcr() {
            return give_up(conn, Reason::NotRegistered);
        }
        refuse(fd, conn, proposal);
        return declined(conn, DeclineCode(conn.clc.declined.load(Relaxed)));
    };
    if let Err(reason) = can_be_given(id) {
        device::board_of(id).free(id);
        if first::is_agreed(conn) {
            refuse(fd, conn, proposal);
        }
        return give_up(conn, reason);
    }
    transition::store_offer_id(conn, id);
    conn.reason.store(Reason::Handshake as u32, Relaxed);
    judge(fd, conn, Clc::Proposal(proposal));
}

/// Declines what a client has begun with that has said SMC.
fn refuse(fd: i32, conn: &Conn, proposal: Proposal) {
    let v1 = proposal.is_v1();
    let chosen = machines::choose(Clc::Proposal(proposal), device::of_host());
    let code = chosen.err().unwrap_or(DeclineCode::NOSMCDDEV);
    first::refuse(fd, conn, code, v1);
}

/// Declines instead of an answer that cannot be given yet. The caller holds the step's lock.
pub fn decline(fd: i32, conn: &Conn, code: DeclineCode) {
    board(conn).free(id_of(conn));
    first::refuse(fd, conn, code, false);
    declined(conn, code);
}

/// Answers a client's first message.
pub fn judge(fd: i32, conn: &Conn, message: Clc) {
    // An end that has to say something first is asked before each send.
    conn.set_flag(F_CLC, first::is_agreed(conn));
    machines::keep(conn, accept(conn, message).unwrap_or_else(Machine::Declines));
    super::enter(conn, Step::Asking);
    answer(fd, conn);
}

/// Accepts or declines.
pub fn answer(fd: i32, conn: &Conn) {
    if board(conn).stage(id_of(conn)) != Stage::Proposed {
        return leave(fd, conn, Reason::PeerGone);
    }
    match transition::is_free(fd, conn) {
        Ok(true) => {}
        Ok(false) => return,
        Err(reason) => return leave(fd, conn, reason),
    }
    let Some(_rx) = stop_calls(fd, conn) else { return };
    let (message, code) = match machines::take(conn) {
        Machine::Chosen(state, accept) => {
            machines::keep(conn, Machine::Answered(state));
            // Receives end before the Confirm from here on.
            conn.set_flag(F_CLC, true);
            super::enter(conn, Step::Answered);
            (Clc::Accept(Answer::D(accept)), None)
        }
        machine => {
            let code = machine.code();
            (Clc::Decline(Decline::new(false, PeerId::default(), code)), Some(code))
        }
    };
    let said = say(fd, conn, Message::Answer, [Stage::Proposed, Stage::Answered], &message);
    conn.go_on_with_kernel_calls();
    match code {
        _ if !said => leave(fd, conn, Reason::PeerGone),
        Some(code) => declined(conn, code),
        None => log::debug(format_args!("fd {fd}: accept sent")),
    }
}

/// Gives up without an answer, or with one that is owed.
fn leave(fd: i32, conn: &Conn, reason: Reason) {
    if first::is_agreed(conn) {
        return decline(fd, conn, DeclineCode::NOSMCDDEV);
    }
    board(conn).free(id_of(conn));
    give_up(conn, reason);
}

/// What a client's first message leads to: an Accept, with a token of this connection.
fn accept(conn: &Conn, proposal: Clc) -> Result<Machine, DeclineCode> {
    let device = id_of(conn).device;
    let choice = machines::choose(proposal, device)?;
    let token = new_token(conn::index_of(conn)).ok_or(DeclineCode::INTERR)?;
    let side = machines::side(device, token).ok_or(DeclineCode::NOSMCDDEV)?;
    conn.clc.given.iter().for_each(|word| word.store(0, Relaxed));
    conn.clc.own.store(token, Relaxed);
    match choice.accept(&side) {
        (state, Clc::Accept(Answer::D(accept))) => Ok(Machine::Chosen(state, accept)),
        _ => Err(DeclineCode::INTERR),
    }
}

/// The client's last message is here.
pub fn confirmed(fd: i32, conn: &Conn, message: Clc) {
    let id = id_of(conn);
    if device::hand_over(id) == HandOver::Name {
        // Named before the message was let into the stream.
        board(conn).memory(id).inspect(|dmb| note_memory(conn, *dmb));
    }
    board(conn).free(id);
    conn.set_flag(F_CLC, false);
    let Machine::Answered(state) = machines::take(conn) else {
        return give_up(conn, Reason::NoMemory);
    };
    match state.on_message(message) {
        Ok(confirmed) => {
            let Answer::D(memory) = &confirmed.agreement().peer else {
                return give_up(conn, Reason::PeerBroken);
            };
            conn.clc.peer.store(memory.token, Relaxed);
            conn.looks.store(transition::LOOKS, Relaxed);
            super::enter(conn, Step::Confirmed);
            attach(fd, conn);
        }
        Err(Ending::Fallback(fallback)) => {
            declined(conn, fallback.peer_reason.unwrap_or(fallback.reason));
        }
        Err(Ending::Failed(_)) => give_up(conn, Reason::PeerBroken),
    }
}

/// Attaches to the memory that was delivered with both tokens, or named.
pub fn attach(fd: i32, conn: &Conn) {
    let id = id_of(conn);
    match device::hand_over(id) {
        HandOver::Name => transition::attach_named(fd, conn, id.device, noted_memory(conn)),
        HandOver::Mail => {
            super::take_mail();
            match delivered(conn) {
                Some((dmb, file)) => transition::attach(fd, conn, dmb, file),
                None if is_spent(fd, conn) => return give_up(conn, Reason::NoSegment),
                None => return,
            }
        }
    }
    if conn.phase() != Phase::Early {
        super::enter(conn, Step::None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has getrandom(2) fail in this thread, as a service's filter of system calls may.
    fn refuse_random_bits() {
        let statement =
            |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
        let mut program = [
            // The number of the call.
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
            libc::sock_filter {
                jf: 1,
                ..statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_getrandom as u32)
            },
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: numbers, and a filter that lives as long as the call.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
        }
    }

    #[test]
    fn there_is_no_token_that_could_be_guessed() {
        let [one, other] = [new_token(3), new_token(3)];
        assert!(one.is_some() && one != other);
        let refused = std::thread::spawn(|| {
            refuse_random_bits();
            new_token(3)
        });
        assert_eq!(refused.join().expect("a thread"), None);
    }
}
