//! Protection domains, memory regions, completion channels and queues, queue pairs.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::zeroed;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use usmc_verbs::sys::*;

use crate::abi::data::CompletionQueue;
use crate::abi::devices::{MAX_CQE, MAX_INLINE, MAX_SGE, MAX_WR};
use crate::abi::{busy, null, number_of, set_errno};
use crate::fabric::Call;
use crate::memory;
use crate::nic::{nic, nic_as_is};
use crate::pair::Made;
use crate::queues::{Events, Queue};

/// A completion channel.
#[repr(C)]
struct Channel {
    base: ibv_comp_channel,
    number: u32,
}

/// # Safety
///
/// The context is open.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    let Some(mut nic) = nic() else { return null(libc::ENODEV) };
    // SAFETY: The caller's promise.
    let number = unsafe { number_of(context) };
    let Some(device) = nic.core.queues.contexts.get(&number).map(|open| open.device) else {
        return null(libc::EINVAL);
    };
    if let Some(errno) = nic.core.state.refusal(device, Call::AllocPd) {
        return null(errno);
    }
    let handle = nic.number();
    nic.domains.insert(handle, (number, device));
    Box::into_raw(Box::new(ibv_pd { context, handle }))
}

/// # Safety
///
/// The domain is there.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(domain: *mut ibv_pd) -> c_int {
    let Some(mut nic) = nic_as_is() else { return libc::ENODEV };
    // SAFETY: The caller's promise.
    let handle = unsafe { (*domain).handle };
    if nic.core.memory.has_domain(handle) || nic.has_pair_of(|made| made.domain == handle) {
        return busy("ibv_dealloc_pd");
    }
    nic.domains.remove(&handle);
    // SAFETY: Made by `ibv_alloc_pd`, and gone with this call.
    drop(unsafe { Box::from_raw(domain) });
    0
}

/// # Safety
///
/// The domain is there; the memory stays mapped while it is registered.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(
    domain: *mut ibv_pd,
    start: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    let Some(mut nic) = nic() else { return null(libc::ENODEV) };
    // SAFETY: The caller's promise.
    let (context, handle) = unsafe { ((*domain).context, (*domain).handle) };
    let Some(&(_, device)) = nic.domains.get(&handle) else { return null(libc::EINVAL) };
    if let Some(errno) = nic.core.state.refusal(device, Call::RegMr) {
        return null(errno);
    }
    let access = access as c_uint;
    if len == 0
        || access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE) == IBV_ACCESS_REMOTE_WRITE
    {
        return null(libc::EINVAL);
    }
    if !memory::is_mapped(start as u64, len as u64) {
        return null(libc::EFAULT);
    }
    let (lkey, rkey) = nic.core.memory.register(handle, start as u64, len as u64, access);
    Box::into_raw(Box::new(ibv_mr {
        context,
        pd: domain,
        addr: start,
        length: len,
        handle: lkey,
        lkey,
        rkey,
    }))
}

/// # Safety
///
/// The region is there.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(region: *mut ibv_mr) -> c_int {
    let Some(mut nic) = nic_as_is() else { return libc::ENODEV };
    // SAFETY: Made by `ibv_reg_mr`, and gone with this call.
    let region = unsafe { Box::from_raw(region) };
    nic.core.memory.deregister(region.lkey);
    0
}

/// # Safety
///
/// The context is open.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let Some(mut nic) = nic() else { return null(libc::ENODEV) };
    let Ok(events) = Events::new() else { return null(libc::EMFILE) };
    let number = nic.number();
    let base = ibv_comp_channel { context, fd: events.fd(), refcnt: 0 };
    nic.core.queues.channels.insert(number, events);
    Box::into_raw(Box::new(Channel { base, number })).cast()
}

/// # Safety
///
/// The channel is there.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let Some(mut nic) = nic_as_is() else { return libc::ENODEV };
    // SAFETY: The caller's promise; `base` is the first field.
    let number = unsafe { (*channel.cast::<Channel>()).number };
    if nic.core.queues.queues.values().any(|queue| queue.channel == Some(number)) {
        return busy("ibv_destroy_comp_channel");
    }
    nic.core.queues.channels.remove(&number);
    // SAFETY: Made by `ibv_create_comp_channel`, and gone with this call.
    drop(unsafe { Box::from_raw(channel.cast::<Channel>()) });
    0
}

/// # Safety
///
/// The context is open, the channel is there or null.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    capacity: c_int,
    token: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    let Some(mut nic) = nic() else { return null(libc::ENODEV) };
    // SAFETY: The context is open.
    let number = unsafe { number_of(context) };
    let Some(device) = nic.core.queues.contexts.get(&number).map(|open| open.device) else {
        return null(libc::EINVAL);
    };
    if let Some(errno) = nic.core.state.refusal(device, Call::CreateCq) {
        return null(errno);
    }
    if !(1..=MAX_CQE as c_int).contains(&capacity) {
        return null(libc::EINVAL);
    }
    // SAFETY: All-zero is a value of the header's structure.
    let mut base: ibv_cq = unsafe { zeroed() };
    (base.context, base.channel, base.cq_context, base.cqe) = (context, channel, token, capacity);
    base.handle = nic.number();
    let (handle, pending) = (base.handle, Arc::new(AtomicUsize::new(0)));
    let raw = Box::into_raw(Box::new(CompletionQueue { base, pending: pending.clone() }));
    // SAFETY: The channel is there, or null.
    let channel = (!channel.is_null()).then(|| unsafe { (*channel.cast::<Channel>()).number });
    let queue = Queue::new(raw as usize, number, channel, capacity as usize, pending);
    nic.core.queues.queues.insert(handle, queue);
    raw.cast()
}

/// # Safety
///
/// The queue is there.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(queue: *mut ibv_cq) -> c_int {
    let Some(mut nic) = nic_as_is() else { return libc::ENODEV };
    // SAFETY: The caller's promise.
    let handle = unsafe { (*queue).handle };
    let is_used = nic.has_pair_of(|made| made.send_queue == handle || made.receive_queue == handle);
    // The real one would wait for acknowledgements, for ever.
    let is_owed = nic.core.queues.queues.get(&handle).is_some_and(|queue| queue.unacknowledged > 0);
    if is_used || is_owed {
        return busy("ibv_destroy_cq");
    }
    nic.core.queues.remove_queue(handle);
    // SAFETY: Made by `ibv_create_cq`, and gone with this call.
    drop(unsafe { Box::from_raw(queue.cast::<CompletionQueue>()) });
    0
}

/// # Safety
///
/// The channel is there, and both places can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    queue: *mut *mut ibv_cq,
    token: *mut *mut c_void,
) -> c_int {
    let mut count = [0u8; 8];
    // SAFETY: The channel is there; eight bytes. The read waits, or not, as the application has set the descriptor.
    if unsafe { libc::read((*channel).fd, count.as_mut_ptr().cast(), count.len()) } < 0 {
        return -1;
    }
    // SAFETY: As above.
    let number = unsafe { (*channel.cast::<Channel>()).number };
    let Some(mut nic) = nic_as_is() else { return -1 };
    let taken = nic.core.queues.channels.get_mut(&number).and_then(Events::take);
    let Some(raw) = taken.map(|raw| raw as *mut ibv_cq) else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    // SAFETY: Events go with their queue, so that it is there. Both places are the caller's promise.
    let handle = unsafe {
        (*queue, *token) = (raw, (*raw).cq_context);
        (*raw).handle
    };
    if let Some(queue) = nic.core.queues.queues.get_mut(&handle) {
        queue.unacknowledged += 1;
    }
    0
}

/// # Safety
///
/// The queue is there.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_ack_cq_events(queue: *mut ibv_cq, count: c_uint) {
    let Some(mut nic) = nic_as_is() else { return };
    // SAFETY: The caller's promise.
    if let Some(queue) = nic.core.queues.queues.get_mut(&unsafe { (*queue).handle }) {
        queue.unacknowledged = queue.unacknowledged.saturating_sub(count);
    }
}

/// # Safety
///
/// The domain and the queues are there; the attributes can be read and written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(
    domain: *mut ibv_pd,
    attributes: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    let Some(mut nic) = nic() else { return null(libc::ENODEV) };
    // SAFETY: The caller's promise.
    let (wanted, context, handle) =
        unsafe { (&mut *attributes, (*domain).context, (*domain).handle) };
    let Some(&(_, device)) = nic.domains.get(&handle) else { return null(libc::EINVAL) };
    if let Some(errno) = nic.core.state.refusal(device, Call::CreateQp) {
        return null(errno);
    }
    let cap = &mut wanted.cap;
    let is_valid = wanted.qp_type == IBV_QPT_RC
        && wanted.srq.is_null()
        && !wanted.send_cq.is_null()
        && !wanted.recv_cq.is_null()
        && cap.max_send_wr.max(cap.max_recv_wr) <= MAX_WR
        && cap.max_send_sge.max(cap.max_recv_sge) <= MAX_SGE
        && cap.max_inline_data <= MAX_INLINE;
    if !is_valid {
        return null(libc::EINVAL);
    }
    // As real devices do: no less than a few.
    cap.max_inline_data = cap.max_inline_data.max(32);
    let id = nic.number();
    // SAFETY: All-zero is a value of the structure.
    let mut qp: Box<ibv_qp> = unsafe { Box::new(zeroed()) };
    (qp.context, qp.qp_context, qp.pd) = (context, wanted.qp_context, domain);
    (qp.send_cq, qp.recv_cq) = (wanted.send_cq, wanted.recv_cq);
    (qp.handle, qp.qp_type) = (id, IBV_QPT_RC);
    let raw = Box::into_raw(qp);
    // SAFETY: The context is open and the queues are there.
    let (context, send_queue, receive_queue) =
        unsafe { (number_of(context), (*wanted.send_cq).handle, (*wanted.recv_cq).handle) };
    let made = Made {
        id,
        raw: raw as usize,
        context,
        device,
        domain: handle,
        send_queue,
        receive_queue,
        caps: *cap,
        signals_all: wanted.sq_sig_all != 0,
        number: 0,
    };
    match nic.create_pair(made) {
        // SAFETY: Made above; nobody else knows it.
        Ok(number) => unsafe { (*raw).qp_num = number },
        Err(error) => {
            // SAFETY: As above.
            drop(unsafe { Box::from_raw(raw) });
            return null(error.raw_os_error().unwrap_or(libc::ENOMEM));
        }
    }
    raw
}

/// # Safety
///
/// The queue pair is there, and the attributes can be read.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    let Some(mut guard) = nic() else { return libc::ENODEV };
    let nic = &mut *guard;
    // SAFETY: The caller's promise.
    let (handle, wanted) = unsafe { ((*qp).handle, *attributes) };
    let Some(pair) = nic.pairs.get_mut(&handle) else { return libc::EINVAL };
    if let Some(errno) = nic.core.state.refusal(pair.made.device, Call::ModifyQp) {
        return errno;
    }
    if let Err(errno) = pair.modify(&mut nic.core, &wanted, mask) {
        return errno;
    }
    // SAFETY: As above.
    unsafe { (*qp).state = pair.state };
    nic.wake();
    0
}

/// # Safety
///
/// The queue pair is there, and both structures can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    let Some(nic) = nic() else { return libc::ENODEV };
    // SAFETY: The caller's promise.
    let Some(pair) = nic.pairs.get(&unsafe { (*qp).handle }) else { return libc::EINVAL };
    // SAFETY: As above.
    unsafe {
        *attributes = pair.attributes;
        ((*attributes).qp_state, (*attributes).cur_qp_state) = (pair.state, pair.state);
        (*init).cap = pair.made.caps;
        (*qp).state = pair.state;
    }
    0
}

/// # Safety
///
/// The queue pair is there.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let Some(mut nic) = nic_as_is() else { return libc::ENODEV };
    // SAFETY: Made by `ibv_create_qp`, and gone with this call.
    let qp = unsafe { Box::from_raw(qp) };
    nic.destroy_pair(qp.handle);
    0
}
