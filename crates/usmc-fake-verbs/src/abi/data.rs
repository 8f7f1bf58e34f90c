//! The data path: functions of a context's table.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use usmc_verbs::sys::*;

use crate::fabric::Call;
use crate::memory;
use crate::nic::{nic_as_is, nic_for_post};
use crate::pair::Pair;
use crate::request::Work;
use crate::respond::Receive;

/// A completion queue, with the number of its entries, so that a poll of an empty one takes no lock.
#[repr(C)]
pub(crate) struct CompletionQueue {
    pub(crate) base: ibv_cq,
    pub(crate) pending: Arc<AtomicUsize>,
}

/// # Safety
///
/// The queue is there, and `into` has room for `max`.
pub(crate) unsafe extern "C" fn poll_cq(
    queue: *mut ibv_cq,
    max: c_int,
    into: *mut ibv_wc,
) -> c_int {
    // SAFETY: The caller's promise; `base` is the first field.
    let queue = unsafe { &*queue.cast::<CompletionQueue>() };
    if queue.pending.load(Ordering::Acquire) == 0 {
        return 0;
    }
    let Some(mut guard) = nic_as_is() else { return -1 };
    let nic = &mut *guard;
    let Some(entries) = nic.core.queues.queues.get_mut(&queue.base.handle) else { return -1 };
    let mut taken = 0;
    while taken < max {
        let Some(entry) = entries.pop() else { break };
        if let Some(pair) = nic.pairs.get_mut(&entry.pair) {
            let is_receive = entry.completion.opcode == IBV_WC_RECV;
            let used = if is_receive { &mut pair.responder.used } else { &mut pair.requester.used };
            *used = used.saturating_sub(entry.freed);
        }
        // SAFETY: Fewer than `max` were written.
        unsafe { *into.add(taken as usize) = entry.completion };
        taken += 1;
    }
    taken
}

/// # Safety
///
/// The queue is there.
pub(crate) unsafe extern "C" fn req_notify_cq(queue: *mut ibv_cq, solicited_only: c_int) -> c_int {
    let Some(mut nic) = nic_as_is() else { return libc::ENODEV };
    // SAFETY: The caller's promise.
    let Some(queue) = nic.core.queues.queues.get_mut(&unsafe { (*queue).handle }) else {
        return libc::EINVAL;
    };
    queue.arm(solicited_only != 0);
    0
}

/// # Safety
///
/// The queue pair is there, the chain and its lists can be read, inline data as well; `bad` can be written.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    chain: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    let Some(mut guard) = nic_for_post() else { return libc::ENODEV };
    let nic = &mut *guard;
    // SAFETY: The caller's promise.
    let id = unsafe { (*qp).handle };
    let Some(pair) = nic.pairs.get_mut(&id) else { return libc::EINVAL };
    let mut next = chain;
    let mut errno = nic.core.state.refusal(pair.made.device, Call::PostSend).unwrap_or(0);
    while errno == 0 && !next.is_null() {
        // SAFETY: A request of the chain.
        let request = unsafe { &*next };
        // SAFETY: As above.
        match unsafe { work(pair, request) } {
            Ok(work) => {
                pair.requester.post(work);
                next = request.next;
            }
            Err(refused) => errno = refused,
        }
    }
    if errno != 0 {
        // SAFETY: The caller's promise.
        unsafe { *bad = next };
    }
    if pair.state == IBV_QPS_ERR {
        pair.fail(&mut nic.core, None);
    }
    if nic.core.state.is_direct {
        // SAFETY: The caller's promise: what was posted stays mapped until it is complete.
        unsafe { nic.pass(id) };
    } else {
        nic.wake();
    }
    errno
}

/// # Safety
///
/// That of [`post_send`].
unsafe fn work(pair: &Pair, request: &ibv_send_wr) -> Result<Work, c_int> {
    let (caps, is_inline) = (&pair.made.caps, request.send_flags & IBV_SEND_INLINE != 0);
    let is_known = request.opcode == IBV_WR_SEND || request.opcode == IBV_WR_RDMA_WRITE;
    let may_post = pair.state == IBV_QPS_RTS || pair.state == IBV_QPS_ERR;
    // SAFETY: The caller's promise.
    let pieces = unsafe { list(request.sg_list, request.num_sge, caps.max_send_sge)? };
    let len = length(&pieces)?;
    if !is_known || !may_post || (is_inline && len > caps.max_inline_data) {
        return Err(libc::EINVAL);
    }
    if pair.requester.used >= caps.max_send_wr {
        return Err(libc::ENOMEM);
    }
    let inline = is_inline.then(|| {
        let mut data = Vec::with_capacity(len as usize);
        // SAFETY: The caller's promise for inline data.
        unsafe { memory::gather(&pieces, 0, len as usize, &mut data) };
        data
    });
    Ok(Work::new(request, pieces, inline, len))
}

/// # Safety
///
/// The queue pair is there, the chain and its lists can be read; `bad` can be written.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    chain: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    let Some(mut guard) = nic_for_post() else { return libc::ENODEV };
    let nic = &mut *guard;
    // SAFETY: The caller's promise.
    let id = unsafe { (*qp).handle };
    let Some(pair) = nic.pairs.get_mut(&id) else { return libc::EINVAL };
    let mut next = chain;
    let mut errno = nic.core.state.refusal(pair.made.device, Call::PostRecv).unwrap_or(0);
    if pair.state == IBV_QPS_RESET {
        errno = libc::EINVAL;
    }
    while errno == 0 && !next.is_null() {
        // SAFETY: A request of the chain.
        let request = unsafe { &*next };
        // SAFETY: As above.
        match unsafe { list(request.sg_list, request.num_sge, pair.made.caps.max_recv_sge) } {
            Ok(_) if pair.responder.used >= pair.made.caps.max_recv_wr => errno = libc::ENOMEM,
            Ok(pieces) => {
                pair.responder.used += 1;
                pair.responder.receives.push_back(Receive { wr_id: request.wr_id, pieces });
                next = request.next;
            }
            Err(refused) => errno = refused,
        }
    }
    if errno != 0 {
        // SAFETY: The caller's promise.
        unsafe { *bad = next };
    }
    if pair.state == IBV_QPS_ERR {
        pair.fail(&mut nic.core, None);
        nic.wake();
    }
    if nic.core.state.is_direct
        && let Some(sender) = nic.peer_of(id)
    {
        // SAFETY: The caller's promise, and that of whoever has posted to send.
        unsafe { nic.pass(sender) };
    }
    errno
}

/// # Safety
///
/// The list has that many pieces.
unsafe fn list(first: *const ibv_sge, count: c_int, max: u32) -> Result<Vec<ibv_sge>, c_int> {
    let count = usize::try_from(count).map_err(|_| libc::EINVAL)?;
    if count > max as usize {
        return Err(libc::EINVAL);
    }
    // SAFETY: The caller's promise.
    Ok((0..count).map(|at| unsafe { *first.add(at) }).collect())
}

/// All pieces together: a message has less than 2 GiB.
fn length(pieces: &[ibv_sge]) -> Result<u32, c_int> {
    let len: u64 = pieces.iter().map(|piece| u64::from(piece.length)).sum();
    u32::try_from(len).ok().filter(|len| *len <= 1 << 31).ok_or(libc::EINVAL)
}
