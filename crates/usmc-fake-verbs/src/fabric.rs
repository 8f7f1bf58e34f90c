//! The fabric as tests see it: devices, and faults that hold from the next packet on.
//!
//! Each call appends a line to the file `fabric`. A process reads new lines before it sends or takes a packet and before each call, so
//! what was written before something is caused holds for it. Faults that count (`refuse`, `fail`) are counted by each process by itself,
//! also by one that starts later; as a device belongs to one process in most tests, naming the device is enough.
//!
//! `*` stands for any device where two are named.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// The variable that names the directory.
pub const DIRECTORY: &str = "USMC_FAKE_VERBS";

/// The variable that names the devices that a process sees, with commas between them; all if it is not set.
pub const VISIBLE: &str = "USMC_FAKE_VERBS_DEVICES";

/// The file in the directory.
pub(crate) const FILE: &str = "fabric";

/// A directory that is a fabric. It stays when this is dropped.
pub struct Fabric {
    directory: PathBuf,
    file: File,
}

/// Calls that can be refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// `ibv_open_device`
    OpenDevice,
    /// `ibv_alloc_pd`
    AllocPd,
    /// `ibv_reg_mr`
    RegMr,
    /// `ibv_create_cq`
    CreateCq,
    /// `ibv_create_qp`
    CreateQp,
    /// `ibv_modify_qp`
    ModifyQp,
    /// `ibv_post_send`
    PostSend,
    /// `ibv_post_recv`
    PostRecv,
}

impl Call {
    pub(crate) const ALL: [(Call, &str); 8] = [
        (Call::OpenDevice, "open_device"),
        (Call::AllocPd, "alloc_pd"),
        (Call::RegMr, "reg_mr"),
        (Call::CreateCq, "create_cq"),
        (Call::CreateQp, "create_qp"),
        (Call::ModifyQp, "modify_qp"),
        (Call::PostSend, "post_send"),
        (Call::PostRecv, "post_recv"),
    ];

    fn name(self) -> &'static str {
        Call::ALL.iter().find(|(call, _)| *call == self).map_or("", |(_, name)| name)
    }
}

impl Fabric {
    /// Makes the directory and its file, or takes those that are there.
    ///
    /// # Errors
    ///
    /// Those of the file system.
    pub fn create(directory: &Path) -> io::Result<Fabric> {
        fs::create_dir_all(directory)?;
        let file = OpenOptions::new().create(true).append(true).open(directory.join(FILE))?;
        Ok(Fabric { directory: directory.into(), file })
    }

    /// The directory, for [`DIRECTORY`].
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Adds a device with one port, which is active. `mtu` is 256, 512, 1024, 2048 or 4096 bytes.
    ///
    /// # Errors
    ///
    /// Those of writing a file, as for all that follow.
    pub fn device(&self, name: &str, mtu: u32) -> io::Result<()> {
        self.line(&format!("device {name} {mtu}"))
    }

    /// Puts a RoCEv2 address into the device's table, and reports GID_CHANGE. `netdev` is a network device by name or index.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn gid(&self, device: &str, index: u32, address: Ipv6Addr, netdev: &str) -> io::Result<()> {
        self.line(&format!("gid {device} {index} v2 {address} {netdev}"))
    }

    /// The same for RoCEv1.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn gid_v1(
        &self,
        device: &str,
        index: u32,
        address: Ipv6Addr,
        netdev: &str,
    ) -> io::Result<()> {
        self.line(&format!("gid {device} {index} v1 {address} {netdev}"))
    }

    /// Takes an address out of the device's table, and reports GID_CHANGE.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn remove_gid(&self, device: &str, index: u32) -> io::Result<()> {
        self.line(&format!("gid {device} {index} none"))
    }

    /// Takes the device's port down or up, and reports PORT_ERR or PORT_ACTIVE. What is on its way is lost; what is posted while it is
    /// down ends its queue pair, as with rxe.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn port(&self, device: &str, is_up: bool) -> io::Result<()> {
        self.line(&format!("port {device} {}", if is_up { "up" } else { "down" }))
    }

    /// Loses all packets from one device to another, silently. Acknowledgements are packets.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn cut(&self, from: &str, to: &str) -> io::Result<()> {
        self.line(&format!("cut {from} {to}"))
    }

    /// Ends a cut that bears the same names.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn heal(&self, from: &str, to: &str) -> io::Result<()> {
        self.line(&format!("heal {from} {to}"))
    }

    /// Keeps all packets from one device to another back, without loss, repetition or timeout.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn hold(&self, from: &str, to: &str) -> io::Result<()> {
        self.line(&format!("hold {from} {to}"))
    }

    /// Lets go what a hold of the same names has kept back.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn release(&self, from: &str, to: &str) -> io::Result<()> {
        self.line(&format!("release {from} {to}"))
    }

    /// Lets each packet from one device to another take that many microseconds; 0 ends it. No timeout becomes longer.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn delay(&self, from: &str, to: &str, microseconds: u32) -> io::Result<()> {
        self.line(&format!("delay {from} {to} {microseconds}"))
    }

    /// Refuses the next `count` calls of that kind on the device with that error number.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn refuse(&self, device: &str, call: Call, count: u32, errno: i32) -> io::Result<()> {
        self.line(&format!("refuse {device} {} {count} {errno}", call.name()))
    }

    /// Lets the next request of a queue pair of the device fail with that status (a number of `ibv_wc_status`) instead of being
    /// sent. `None`: of any queue pair.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn fail(&self, device: &str, qp_num: Option<u32>, status: u32) -> io::Result<()> {
        let qp_num = qp_num.map_or("*".into(), |number| number.to_string());
        self.line(&format!("fail {device} {qp_num} {status}"))
    }

    /// Reports an asynchronous event, a number of `ibv_event_type`, to all that have the device open; one of a queue pair to that
    /// which has it. QP_FATAL takes the queue pair into error.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn event(&self, device: &str, kind: u32, qp_num: Option<u32>) -> io::Result<()> {
        self.line(&format!("event {device} {kind} {}", qp_num.unwrap_or(0)))
    }

    /// From here on a post moves its data itself, between queue pairs of one process, without a system call, a thread or a packet: what
    /// is left is what the application's own work costs. A send waits for a receive. No fault holds any more.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn direct(&self) -> io::Result<()> {
        self.line("direct")
    }

    /// Names of sockets that are in the directory: one for each queue pair.
    ///
    /// # Errors
    ///
    /// Those of reading a directory.
    pub fn sockets(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != FILE {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// One write, so that lines of several writers do not mix.
    fn line(&self, text: &str) -> io::Result<()> {
        (&self.file).write_all(format!("{text}\n").as_bytes())
    }
}
