//! Devices, ports, addresses and asynchronous events.

use std::ffi::{CString, c_char, c_int};
use std::mem::zeroed;
use std::ptr;

use usmc_verbs::sys::*;

use crate::abi::{Context, busy, data, null, number_of, set_errno};
use crate::fabric::Call;
use crate::nic::{Nic, nic, nic_as_is};
use crate::queues::{Context as Open, Events};

/// Limits that the device tells, and holds to.
pub(crate) const MAX_WR: u32 = 16384;
pub(crate) const MAX_SGE: u32 = 32;
pub(crate) const MAX_CQE: u32 = 32767;
pub(crate) const MAX_INLINE: u32 = 512;
const MAX_MESSAGE: u32 = 1 << 23;
const GID_TABLE: c_int = 1024;

/// # Safety
///
/// `count` is null or can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let devices: Vec<_> = match nic() {
        Some(mut nic) => nic.visible().into_iter().map(|at| device(&mut nic, at)).collect(),
        None => Vec::new(),
    };
    if !count.is_null() {
        // SAFETY: The caller's promise.
        unsafe { *count = devices.len() as c_int };
    }
    // SAFETY: A zeroed array with one place more, which is null.
    unsafe {
        let list =
            libc::calloc(devices.len() + 1, size_of::<*mut ibv_device>()).cast::<*mut ibv_device>();
        if !list.is_null() {
            ptr::copy_nonoverlapping(devices.as_ptr(), list, devices.len());
        }
        list
    }
}

/// The library's structure of a device, which is made once and stays.
fn device(nic: &mut Nic, at: usize) -> *mut ibv_device {
    let name = &nic.core.state.devices[at].name;
    let made = nic.devices.entry(at).or_insert_with(|| {
        // SAFETY: All-zero is a value of the structure.
        let mut device: Box<ibv_device> = unsafe { Box::new(zeroed()) };
        (device.node_type, device.transport_type) = (IBV_NODE_CA, IBV_TRANSPORT_IB);
        put(&mut device.name, name);
        put(&mut device.dev_name, &format!("uverbs{at}"));
        put(&mut device.ibdev_path, &format!("/sys/class/infiniband/{name}"));
        Box::into_raw(device) as usize
    });
    *made as *mut ibv_device
}

fn put(to: &mut [c_char], text: &str) {
    let last = to.len() - 1;
    for (to, from) in to[..last].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// # Safety
///
/// The list is one that this library made.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: The caller's promise.
    unsafe { libc::free(list.cast()) };
}

/// # Safety
///
/// The device is of a list.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: The caller's promise.
    unsafe { (&raw const (*device).name).cast() }
}

/// # Safety
///
/// The device is of a list.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let Some(mut nic) = nic() else { return null(libc::ENODEV) };
    let Some((&at, _)) = nic.devices.iter().find(|(_, made)| **made == device as usize) else {
        return null(libc::ENODEV);
    };
    if let Some(errno) = nic.core.state.refusal(at, Call::OpenDevice) {
        return null(errno);
    }
    let Ok(events) = Events::new() else { return null(libc::EMFILE) };
    // SAFETY: All-zero is a value of the structure: no functions, and mutexes that are new.
    let mut context: Box<Context> = unsafe { Box::new(zeroed()) };
    context.base.device = device;
    context.base.ops.poll_cq = Some(data::poll_cq);
    context.base.ops.req_notify_cq = Some(data::req_notify_cq);
    context.base.ops.post_send = Some(data::post_send);
    context.base.ops.post_recv = Some(data::post_recv);
    (context.base.cmd_fd, context.base.async_fd) = (-1, events.fd());
    context.base.num_comp_vectors = 1;
    context.number = nic.number();
    nic.core.queues.contexts.insert(context.number, Open { device: at, events });
    nic.start();
    Box::into_raw(context).cast()
}

/// # Safety
///
/// The context is open.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let Some(mut nic) = nic_as_is() else { return libc::ENODEV };
    // SAFETY: The caller's promise.
    let number = unsafe { number_of(context) };
    if nic.is_in_use(number) {
        return busy("ibv_close_device");
    }
    nic.core.queues.contexts.remove(&number);
    // SAFETY: Made by `ibv_open_device`, and closed once.
    drop(unsafe { Box::from_raw(context.cast::<Context>()) });
    0
}

/// # Safety
///
/// The context is open, and the attributes can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attributes: *mut ibv_device_attr,
) -> c_int {
    // SAFETY: All-zero is a value of the structure.
    let mut filled: ibv_device_attr = unsafe { zeroed() };
    put(&mut filled.fw_ver, "fake");
    // SAFETY: The context is open.
    filled.node_guid = (0x0200_0000_fa4e_0000 + u64::from(unsafe { number_of(context) })).to_be();
    filled.max_mr_size = u64::MAX >> 1;
    (filled.max_qp, filled.max_cq, filled.max_mr, filled.max_pd) =
        (1 << 16, 1 << 16, 1 << 16, 1 << 16);
    (filled.max_qp_wr, filled.max_cqe, filled.max_sge) =
        (MAX_WR as c_int, MAX_CQE as c_int, MAX_SGE as c_int);
    (filled.max_pkeys, filled.phys_port_cnt) = (1, 1);
    // SAFETY: The caller's promise.
    unsafe { *attributes = filled };
    0
}

/// # Safety
///
/// As above.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
) -> c_int {
    let Some(nic) = nic() else { return libc::ENODEV };
    // SAFETY: The context is open.
    let Some(open) = nic.core.queues.contexts.get(&unsafe { number_of(context) }) else {
        return libc::EINVAL;
    };
    if port != 1 {
        return libc::EINVAL;
    }
    let device = &nic.core.state.devices[open.device];
    // SAFETY: The caller's promise.
    let filled = unsafe { &mut *attributes };
    filled.state = if device.is_up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    (filled.max_mtu, filled.active_mtu) = (IBV_MTU_4096, device.mtu);
    (filled.gid_tbl_len, filled.max_msg_sz, filled.pkey_tbl_len) = (GID_TABLE, MAX_MESSAGE, 1);
    filled.link_layer = IBV_LINK_LAYER_ETHERNET;
    0
}

/// # Safety
///
/// The context is open, and `entries` has room for `max` of them.
#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    if flags != 0 || size != size_of::<ibv_gid_entry>() {
        return -(libc::EINVAL as isize);
    }
    let Some(nic) = nic() else { return -(libc::ENODEV as isize) };
    // SAFETY: The context is open.
    let Some(open) = nic.core.queues.contexts.get(&unsafe { number_of(context) }) else {
        return -(libc::EINVAL as isize);
    };
    let gids = &nic.core.state.devices[open.device].gids;
    if gids.len() > max {
        return -(libc::EINVAL as isize);
    }
    for (at, (index, gid)) in gids.iter().enumerate() {
        let entry = ibv_gid_entry {
            gid: ibv_gid { raw: gid.address },
            gid_index: *index,
            port_num: 1,
            gid_type: gid.kind,
            ndev_ifindex: index_of(&gid.netdev),
        };
        // SAFETY: There are no more than `max`.
        unsafe { *entries.add(at) = entry };
    }
    gids.len() as isize
}

/// A network device of this process's namespace, by index or name; 0 if there is none.
fn index_of(netdev: &str) -> u32 {
    let by_name = || {
        let name = CString::new(netdev).ok()?;
        // SAFETY: The name ends in NUL.
        Some(unsafe { libc::if_nametoindex(name.as_ptr()) })
    };
    netdev.parse().ok().or_else(by_name).unwrap_or(0)
}

/// # Safety
///
/// The context is open, and the event can be written.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    let mut count = [0u8; 8];
    // SAFETY: The context is open; eight bytes. The read waits, or not, as the application has set the descriptor.
    if unsafe { libc::read((*context).async_fd, count.as_mut_ptr().cast(), count.len()) } < 0 {
        return -1;
    }
    // SAFETY: As above.
    let number = unsafe { number_of(context) };
    let taken =
        nic_as_is().and_then(|mut nic| nic.core.queues.contexts.get_mut(&number)?.events.take());
    let Some(taken) = taken else {
        set_errno(libc::EAGAIN);
        return -1;
    };
    // SAFETY: The caller's promise. The port's number is an integer in the pointer's first four bytes.
    unsafe {
        (*event).event_type = taken.kind;
        (*event).element = event_element { qp: ptr::null_mut() };
        match taken.element {
            1 => (*event).element.port_num = 1,
            pointer => (*event).element.qp = pointer as *mut ibv_qp,
        }
    }
    0
}

/// Nothing is counted, as nobody is waited for.
#[unsafe(no_mangle)]
extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {}
