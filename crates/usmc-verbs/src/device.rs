//! Devices: which there are, what their ports are, and the addresses they have.

use std::ffi::{CStr, c_int, c_uint};
use std::fmt;
use std::net::Ipv6Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;

use crate::error::Error;
use crate::gids;
use crate::library::Library;
use crate::sys::*;

/// An open device. Copies are the same device, which is closed with the last thing that uses it.
#[derive(Clone)]
pub struct Device {
    pub(crate) inner: Rc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) library: Library,
    pub(crate) context: *mut ibv_context,
    pub(crate) name: String,
}

/// An address of a port: an IPv6 address, or an IPv4 one mapped into IPv6. The bytes are in network order.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
pub struct Gid(pub [u8; 16]);

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

/// Which protocol carries what an entry of the table sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GidType {
    /// InfiniBand.
    InfiniBand,
    /// RoCE version 1: an Ethernet frame of its own type.
    RoceV1,
    /// RoCE version 2: UDP, port 4791.
    RoceV2,
}

/// An entry of a port's table of GIDs that is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GidEntry {
    /// The address.
    pub gid: Gid,
    /// Its place in the port's table.
    pub index: u32,
    /// The port, from 1 on.
    pub port: u8,
    /// What carries it.
    pub kind: GidType,
    /// The index of the network device that has the address; 0 where there is none in this network namespace.
    pub ifindex: u32,
}

/// A packet's largest payload in bytes; the numbers are those of the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256 = 1,
    /// 512 bytes.
    Bytes512 = 2,
    /// 1024 bytes, which an Ethernet of 1500 has room for.
    Bytes1024 = 3,
    /// 2048 bytes.
    Bytes2048 = 4,
    /// 4096 bytes.
    Bytes4096 = 5,
}

impl Mtu {
    /// From the number of the wire, 1 to 5.
    pub fn from_number(number: u32) -> Option<Mtu> {
        Some(match number {
            IBV_MTU_256 => Mtu::Bytes256,
            IBV_MTU_512 => Mtu::Bytes512,
            IBV_MTU_1024 => Mtu::Bytes1024,
            IBV_MTU_2048 => Mtu::Bytes2048,
            IBV_MTU_4096 => Mtu::Bytes4096,
            _ => return None,
        })
    }

    /// In bytes.
    pub fn bytes(self) -> u32 {
        128 << self as u32
    }
}

/// What a port does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PortState {
    /// No link.
    Down,
    /// The link is being set up.
    Starting,
    /// It carries data.
    Active,
    /// A number that is not known here.
    Other(u32),
}

/// The attributes of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Port {
    /// What it does.
    pub state: PortState,
    /// The largest MTU that it takes now; 256 bytes where its number is not known.
    pub mtu: Mtu,
    /// Places in its table of GIDs.
    pub gid_table_len: u32,
    /// The longest message, in bytes.
    pub max_message: u32,
    /// Whether it is Ethernet, so that its protocol is RoCE.
    pub is_ethernet: bool,
}

/// Limits of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceAttributes {
    /// Its GUID, in host order.
    pub node_guid: u64,
    /// Ports, which are numbered from 1.
    pub ports: u8,
    /// Queue pairs.
    pub max_qp: u32,
    /// Requests of one queue.
    pub max_qp_wr: u32,
    /// Pieces of one request.
    pub max_sge: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of one completion queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes of one memory region.
    pub max_mr_size: u64,
}

impl Library {
    /// The names of the devices, in the library's order.
    ///
    /// # Errors
    ///
    /// [`Error::Call`] where the kernel has no verbs.
    pub fn devices(self) -> Result<Vec<String>, Error> {
        let list = List::new(self)?;
        Ok(list.names().map(|(name, _)| name).collect())
    }

    /// Opens the device of that name, such as `mlx5_0`. Its asynchronous events are read without waiting from then on.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`], and [`Error::Call`] where it may not be opened.
    pub fn device(self, name: &str) -> Result<Device, Error> {
        let list = List::new(self)?;
        let Some((_, device)) = list.names().find(|(present, _)| present == name) else {
            let present = list.names().map(|(name, _)| name).collect();
            return Err(Error::NoDevice { name: name.into(), present });
        };
        // SAFETY: The device is of the list, which is there still.
        let context = unsafe { (self.functions.ibv_open_device)(device) };
        if context.is_null() {
            return Err(Error::last("ibv_open_device"));
        }
        let inner = Inner { library: self, context, name: name.into() };
        // SAFETY: The context is open.
        set_nonblocking(unsafe { (*context).async_fd })?;
        Ok(Device { inner: Rc::new(inner) })
    }
}

impl Device {
    /// The device's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// What the device can do.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn attributes(&self) -> Result<DeviceAttributes, Error> {
        // SAFETY: All-zero is a value of a structure of integers.
        let mut raw: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: The context is open, and the structure is the whole of what is written.
        let returned =
            unsafe { (self.functions().ibv_query_device)(self.inner.context, &raw mut raw) };
        Error::check("ibv_query_device", returned)?;
        let count = |limit: c_int| u32::try_from(limit).unwrap_or(0);
        Ok(DeviceAttributes {
            node_guid: u64::from_be(raw.node_guid),
            ports: raw.phys_port_cnt,
            max_qp: count(raw.max_qp),
            max_qp_wr: count(raw.max_qp_wr),
            max_sge: count(raw.max_sge),
            max_cq: count(raw.max_cq),
            max_cqe: count(raw.max_cqe),
            max_mr: count(raw.max_mr),
            max_mr_size: raw.max_mr_size,
        })
    }

    /// The attributes of a port; the first is 1.
    ///
    /// # Errors
    ///
    /// [`Error::Call`], for instance where there is no such port.
    pub fn port(&self, port: u8) -> Result<Port, Error> {
        // SAFETY: All-zero is a value of a structure of integers.
        let mut raw: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: The context is open, and the function writes a part of the structure.
        let returned =
            unsafe { (self.functions().ibv_query_port)(self.inner.context, port, &raw mut raw) };
        Error::check("ibv_query_port", returned)?;
        Ok(Port {
            state: match raw.state {
                IBV_PORT_DOWN => PortState::Down,
                IBV_PORT_INIT | IBV_PORT_ARMED => PortState::Starting,
                IBV_PORT_ACTIVE => PortState::Active,
                other => PortState::Other(other),
            },
            mtu: Mtu::from_number(raw.active_mtu).unwrap_or(Mtu::Bytes256),
            gid_table_len: u32::try_from(raw.gid_tbl_len).unwrap_or(0),
            max_message: raw.max_msg_sz,
            is_ethernet: raw.link_layer == IBV_LINK_LAYER_ETHERNET,
        })
    }

    /// The GIDs of all ports that are in use, in the order of ports and indices.
    ///
    /// A library without that function (before rdma-core 32), or one whose kernel does not tell, leaves it to sysfs.
    ///
    /// # Errors
    ///
    /// [`Error::Call`].
    pub fn gids(&self) -> Result<Vec<GidEntry>, Error> {
        gids::table(self)
    }

    /// The descriptor that is readable when [`Device::next_event`] has something.
    pub fn events_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: The descriptor is the context's, which outlives the borrow.
        unsafe { BorrowedFd::borrow_raw((*self.inner.context).async_fd) }
    }

    /// Whether both are one open device. What is made of two does not mix, even if they have one name.
    pub(crate) fn is(&self, other: &Device) -> bool {
        Rc::ptr_eq(&self.inner, &other.inner)
    }

    pub(crate) fn functions(&self) -> &'static crate::library::Functions {
        self.inner.library.functions
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events_fd()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: The context is open; whatever was made of it held this and is gone.
        let _ = unsafe { (self.library.functions.ibv_close_device)(self.context) };
    }
}

/// The library's list of devices.
struct List {
    library: Library,
    first: *mut *mut ibv_device,
    len: usize,
}

impl List {
    fn new(library: Library) -> Result<List, Error> {
        let mut len: c_int = 0;
        // SAFETY: The count is written to a local.
        let first = unsafe { (library.functions.ibv_get_device_list)(&raw mut len) };
        if first.is_null() {
            return Err(Error::last("ibv_get_device_list"));
        }
        Ok(List { library, first, len: usize::try_from(len).unwrap_or(0) })
    }

    fn names(&self) -> impl Iterator<Item = (String, *mut ibv_device)> + '_ {
        (0..self.len).map(|index| {
            // SAFETY: The list has `len` devices, each with a name that lives as long.
            unsafe {
                let device = *self.first.add(index);
                let name = CStr::from_ptr((self.library.functions.ibv_get_device_name)(device));
                (name.to_string_lossy().into_owned(), device)
            }
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: The list is the library's, and is freed once. Open devices are counted apart.
        unsafe { (self.library.functions.ibv_free_device_list)(self.first) };
    }
}

/// The number of a GID's type: the library's, for the table.
pub(crate) fn gid_type(number: c_uint) -> Option<GidType> {
    Some(match number {
        IBV_GID_TYPE_IB => GidType::InfiniBand,
        IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
        IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
        _ => return None,
    })
}

/// Makes reads of a descriptor of the library's return at once, so that a loop of events never sleeps in them.
pub(crate) fn set_nonblocking(fd: c_int) -> Result<(), Error> {
    // SAFETY: Flags of an open descriptor that is ours by way of the library.
    let returned = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if returned < 0 { Err(Error::last("fcntl")) } else { Ok(()) }
}
