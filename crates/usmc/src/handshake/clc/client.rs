//! The connecting end.

use smc_proto::decline::DeclineCode;
use smc_proto::handshake::client::{Accepted, AcceptedD};
use smc_proto::handshake::{Ending, Fault};
use smc_proto::ids::{PeerId, SmcdGid};
use smc_proto::wire::clc::{Decline, Message as Clc, SmcdVersion};
use usmc_shm::handshake::Use;
use usmc_shm::sync::Ordering::Relaxed;

use super::machines::Machine;
use super::{board, declined, give_up, id_of, is_spent, leave_answered, machines, say, stop_calls};
use crate::device::segment::OwnSlot;
use crate::device::{self, HandOver, identity, segment};
use crate::handshake::transition;
use crate::host::{self, Delivery, DmbRef, Message, OfferId, PeerProcess, Stage};
use crate::os::reason::Reason;
use crate::os::sys::Errno;
use crate::os::{log, sys};
use crate::record::clc_state::Step;
use crate::record::conn::{Conn, F_ARMED, F_CLC};
use crate::record::kernel;
use crate::record::phase::Event;
use crate::record::tuple::Tuple;

/// Asks on these devices for the holder of the other end of this connection, whose destination is a listener of another network
/// namespace, user or directory.
///
/// # Errors
/// The reason why the connection stays TCP.
pub fn ask(
    fd: i32,
    conn: &Conn,
    tuple: &Tuple,
    devices: impl Iterator<Item = device::Index>,
) -> Result<(), Reason> {
    let mut asked = Err(Reason::NotRegistered);
    for device in devices {
        match device::at(device).board().ask_for_holder(tuple) {
            Ok(id) => {
                conn.clc.ask(device, id.index, id.use_count);
                asked = Ok(());
            }
            Err(reason) if asked.is_err() => asked = Err(reason),
            Err(_) => {}
        }
    }
    asked?;
    transition::store_tuple(conn, tuple);
    super::enter(conn, Step::Asked);
    conn.looks.store(transition::LOOKS, Relaxed);
    conn.reason.store(Reason::NotHeld as u32, Relaxed);
    log::debug(format_args!("fd {fd}: asks for port {}", tuple.server.port));
    Ok(())
}

/// The questions of this connection.
fn questions(conn: &Conn) -> impl Iterator<Item = OfferId> {
    conn.clc.asked().map(|(device, index, use_count)| OfferId { device, index, use_count })
}

/// Takes its questions back, but for this one.
pub fn stop_asking(conn: &Conn, but: Option<OfferId>) {
    for id in questions(conn).filter(|id| Some(*id) != but) {
        device::board_of(id).clear_offer(id);
    }
    conn.clc.forget_asked();
}

/// The destination was declared to speak SMC, or may say so by its SYN-ACK: the first bytes of the stream will be a
/// Proposal.
pub fn declare(conn: &Conn) {
    conn.reason.store(Reason::Handshake as u32, Relaxed);
    super::enter(conn, Step::Declared);
    conn.set_flag(F_CLC, conn.has(F_ARMED) || super::first::is_proposed(conn));
}

/// What has become of a connection's questions.
#[derive(PartialEq, Eq, Debug)]
enum Answers<Id> {
    /// The holder has answered this one.
    Held(Id),
    /// Some question is open.
    Open,
    Over,
}

/// Each stage is loaded once: between two loads a question that was open is answered.
fn answers<Id>(questions: impl Iterator<Item = Id>, stage: impl Fn(&Id) -> Stage) -> Answers<Id> {
    let mut known = Answers::Over;
    for id in questions {
        match stage(&id) {
            Stage::Held => return Answers::Held(id),
            Stage::Open => known = Answers::Open,
            _ => {}
        }
    }
    known
}

/// Proposes once a process has said that it holds the other end.
pub fn await_holder(fd: i32, conn: &Conn) {
    match answers(questions(conn), |id| device::board_of(*id).stage(*id)) {
        Answers::Held(id) => {
            transition::store_offer_id(conn, id);
            propose(fd, conn);
        }
        Answers::Open if !is_spent(fd, conn) => {}
        _ => {
            stop_asking(conn, None);
            give_up(conn, Reason::NotHeld);
        }
    }
}

/// Whether the connection is ours alone at this moment; ends the handshake where it will not be.
fn is_free(fd: i32, conn: &Conn) -> bool {
    match transition::is_free(fd, conn) {
        Ok(free) => free,
        Err(reason) => {
            leave_answered(id_of(conn));
            give_up(conn, reason);
            false
        }
    }
}

/// As the first bytes of the stream, or not at all.
pub fn propose_unasked(fd: i32, conn: &Conn) {
    if !kernel::is_established(fd) {
        return;
    }
    let Ok(tuple) = Tuple::live(fd, true) else { return };
    if kernel::tcp_sent(fd, true) != Some(0) || conn.returns() > 0 {
        return give_up(conn, Reason::NotRegistered);
    }
    if !is_free(fd, conn) {
        return;
    }
    let Some(_rx) = stop_calls(fd, conn) else { return };
    transition::store_tuple(conn, &tuple);
    // No handler's bytes between the question and the message.
    let mask = sys::block_signals();
    if kernel::tcp_sent(fd, true) != Some(0) {
        // Another thread's, before its calls were stopped.
        conn.go_on_with_kernel_calls();
        sys::set_signals(mask);
        return give_up(conn, Reason::NotRegistered);
    }
    let sent = send_proposal(fd, conn, &tuple);
    conn.go_on_with_kernel_calls();
    sys::set_signals(mask);
    if let Err(reason) = sent {
        give_up(conn, reason);
    }
}

/// The Proposal that names its place on the device. The caller has stopped the calls of the kernel.
///
/// # Errors
/// The reason why the connection stays TCP: nothing was sent.
pub fn send_proposal(fd: i32, conn: &Conn, tuple: &Tuple) -> Result<(), Reason> {
    if !super::mark(fd, conn) {
        return Err(Reason::Adopted);
    }
    let board = device::at(device::of_host()).board();
    let id = board.propose_unasked(tuple)?;
    let proposal = machines::propose(conn, id, true).inspect_err(|_| board.free(id))?;
    transition::store_offer_id(conn, id);
    conn.set_flag(F_CLC, true);
    super::enter(conn, Step::Proposed);
    conn.looks.store(transition::LOOKS, Relaxed);
    conn.reason.store(Reason::Handshake as u32, Relaxed);
    super::send(fd, conn, &proposal);
    Ok(())
}

fn propose(fd: i32, conn: &Conn) {
    if !is_free(fd, conn) {
        return;
    }
    let Some(_rx) = stop_calls(fd, conn) else { return };
    stop_asking(conn, Some(id_of(conn)));
    if !super::mark(fd, conn) {
        conn.go_on_with_kernel_calls();
        board(conn).clear_offer(id_of(conn));
        return give_up(conn, Reason::Adopted);
    }
    let said = machines::propose(conn, id_of(conn), false).and_then(|proposal| {
        // From here on receives end before the answer.
        conn.set_flag(F_CLC, true);
        super::enter(conn, Step::Proposed);
        let steps = [Stage::Held, Stage::Proposed];
        say(fd, conn, Message::Proposal, steps, &proposal).then_some(()).ok_or(Reason::PeerGone)
    });
    conn.go_on_with_kernel_calls();
    if let Err(reason) = said {
        board(conn).clear_offer(id_of(conn));
        return give_up(conn, reason);
    }
    conn.reason.store(Reason::Handshake as u32, Relaxed);
    log::debug(format_args!("fd {fd}: proposal sent"));
}

/// The server's first message is here.
pub fn answered(fd: i32, conn: &Conn, message: Clc) {
    conn.set_flag(F_CLC, false);
    let machine = match accepted(conn, message) {
        Ok(accepted) => Machine::Accepted(accepted),
        Err(Ending::Fallback(fallback)) if fallback.decline.is_none() => {
            leave_answered(id_of(conn));
            return declined(conn, fallback.peer_reason.unwrap_or(fallback.reason));
        }
        Err(Ending::Fallback(fallback)) => Machine::Declines(fallback.reason),
        // An answer that no server gives: its sender knows what it did.
        Err(Ending::Failed(_)) => Machine::Declines(DeclineCode::INTERR),
    };
    machines::keep(conn, machine);
    super::enter(conn, Step::Accepted);
    confirm(fd, conn);
}

/// What follows from the server's answer, if that is an Accept for this device.
fn accepted(conn: &Conn, answer: Clc) -> Result<AcceptedD, Ending> {
    let Machine::Proposed(state) = machines::take(conn) else {
        return Err(Ending::Failed(Fault::Closed));
    };
    let Accepted::D(accepted) = state.on_message(answer)? else {
        return Err(Ending::Failed(Fault::Closed));
    };
    let answer = accepted.answer();
    let SmcdVersion::V2 { gid_ext, chid, .. } = answer.version else {
        return Err(accepted.decline(DeclineCode::VERSMISMAT));
    };
    match identity::reaches(id_of(conn).device, SmcdGid { gid: answer.gid, ext: gid_ext }, chid) {
        true => Ok(accepted),
        false => Err(accepted.decline(DeclineCode::NOSMCD2DEV)),
    }
}

/// Hands memory over and confirms, or declines.
pub fn confirm(fd: i32, conn: &Conn) {
    let id = id_of(conn);
    if board(conn).stage(id) != Stage::Answered {
        // The acceptor does not wait any more.
        leave_answered(id);
        return give_up(conn, Reason::PeerGone);
    }
    if !is_free(fd, conn) {
        return;
    }
    let Some(_rx) = stop_calls(fd, conn) else { return };
    let mut why = None;
    let code = match machines::take(conn) {
        Machine::Accepted(accepted) => match offer(fd, conn, accepted) {
            Ok(()) => return,
            Err(Failed::NotNow) => return conn.go_on_with_kernel_calls(),
            Err(Failed::PeerGone) => {
                conn.go_on_with_kernel_calls();
                leave_answered(id);
                return give_up(conn, Reason::PeerGone);
            }
            Err(Failed::NoMemory(reason)) => {
                why = Some(reason);
                DeclineCode::MEM
            }
            Err(Failed::Decline(code)) => code,
        },
        machine => machine.code(),
    };
    let decline = Clc::Decline(Decline::new(false, PeerId::default(), code));
    if !say(fd, conn, Message::Confirm, [Stage::Answered, Stage::Confirmed], &decline) {
        leave_answered(id);
    }
    conn.go_on_with_kernel_calls();
    match why {
        Some(reason) => give_up(conn, reason),
        None => declined(conn, code),
    }
}

enum Failed {
    NotNow,
    PeerGone,
    NoMemory(Reason),
    Decline(DeclineCode),
}

/// The listener whose connections share memory with this one, and the mailbox that gets it, if one does.
fn shared_with(conn: &Conn, accepted: &AcceptedD) -> Result<(Tuple, Option<Mailbox>), DeclineCode> {
    if device::hand_over(id_of(conn)) == HandOver::Name {
        conn.clc.is_own_user.store(0, Relaxed);
        // All connections of this process: memory is scarce there.
        return Ok((Tuple { netns: 1 << 63, ..Tuple::default() }, None));
    }
    let process = machines::process_of(accepted.answer().link_id);
    let identity = host::mailbox::identity(process).ok_or(DeclineCode::NOSMCDDEV)?;
    conn.clc.is_own_user.store(host::mailbox::is_own(process).into(), Relaxed);
    // Of the processes that listen at that address: memory is shared with one process of it, which is known by its mailbox, for the
    // link id is its own word.
    let pair = Tuple { netns: 1 << 63 | identity, ..transition::stored(conn) };
    Ok((pair, Some(Mailbox { process, identity })))
}

/// The mailbox of the acceptor's process.
struct Mailbox {
    process: PeerProcess,
    identity: u64,
}

/// Ties the record to a slot of a segment that the server's process is given, and confirms.
fn offer(fd: i32, conn: &Conn, accepted: AcceptedD) -> Result<(), Failed> {
    let (id, to) = (id_of(conn), accepted.answer().token);
    let (pair, mailbox) = shared_with(conn, &accepted).map_err(Failed::Decline)?;
    if !transition::puts_aside(conn, id.device, segment::shifts()) {
        return Err(Failed::Decline(DeclineCode::MEM));
    }
    let bound = segment::take_slot(id.device, &pair)
        .and_then(|own| transition::bind_own(fd, conn, &own).map(|usage| (own, usage)));
    let (own, usage) = match bound {
        Ok(bound) => bound,
        Err(reason) => {
            conn.clc.give_back();
            return Err(Failed::NoMemory(reason));
        }
    };
    let undo = |failed| {
        transition::release_slot(conn);
        Err(failed)
    };
    let Some(token) = sys::secret().map(|bits| bits | 1) else {
        return undo(Failed::Decline(DeclineCode::INTERR));
    };
    let Some(side) = machines::side(id.device, token) else {
        return undo(Failed::Decline(DeclineCode::NOSMCDDEV));
    };
    let dmb = DmbRef { segment: own.id, slot: own.slot, usage: Use::to_bits(usage) };
    let given = match mailbox {
        Some(mailbox) => deliver(conn, &mailbox, &own, dmb, [to, token]),
        None => {
            transition::store_tokens(conn, [token, to]);
            board(conn).name_memory(id, dmb);
            Ok(())
        }
    };
    match given {
        Ok(()) => {}
        Err(libc::EAGAIN) => {
            machines::keep(conn, Machine::Accepted(accepted));
            return undo(Failed::NotNow);
        }
        Err(errno) => {
            log::warn(format_args!("fd {fd}: segment not handed over, errno {errno}"));
            return undo(Failed::Decline(DeclineCode::MEM));
        }
    }
    let Ok((_, confirm)) = accepted.confirm(&side) else {
        return undo(Failed::Decline(DeclineCode::INTERR));
    };
    // Still early: a thread that sends by the slot waits until it is offered, behind the Confirm.
    if !say(fd, conn, Message::Confirm, [Stage::Answered, Stage::Confirmed], &confirm) {
        transition::call_off(conn);
        return undo(Failed::PeerGone);
    }
    super::enter(conn, Step::None);
    conn.reason.store(Reason::Pending as u32, Relaxed);
    if !conn.leave_early(Event::Offers) {
        // A signal handler of this thread wants it to stay TCP.
        transition::call_off(conn);
        return Ok(());
    }
    log::debug(format_args!("fd {fd}: confirmed with slot {}", own.slot));
    Ok(())
}

/// Mails the segment to the acceptor's process, with the acceptor's token and ours.
fn deliver(
    conn: &Conn,
    mailbox: &Mailbox,
    own: &OwnSlot,
    dmb: DmbRef,
    [to, from]: [u64; 2],
) -> Result<(), Errno> {
    let fd = segment::fd_of(own.segment.index).ok_or(libc::ENOMEM)?;
    let what = Delivery { fd, dmb, to, from, is_own_user: conn.clc.is_with_kin() };
    host::current().deliver(mailbox.process, mailbox.identity, &what)
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::{Answers, Stage, answers};

    #[test]
    fn a_question_that_is_answered_during_the_look_is_not_over() {
        // A second look at the same question gets the second stage.
        for (stages, found) in [
            ([Stage::Open, Stage::Held], Answers::Open),
            ([Stage::Held, Stage::Proposed], Answers::Held(7)),
            ([Stage::Over, Stage::Over], Answers::Over),
        ] {
            let looks = Cell::new(0);
            let stage = |_: &u32| stages[looks.replace(looks.get() + 1).min(1)];
            assert_eq!(answers([7].into_iter(), stage), found);
        }
    }
}
