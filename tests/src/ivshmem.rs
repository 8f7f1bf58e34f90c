//! The other ends of `usmc ivshmem-server`: virtual machines as QEMU connects them, and systemd as it keeps descriptors.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use usmc_shm::region::Region;
use usmc_shm::region::peers::Identity;

/// No answer of the server's takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// Receives bytes and descriptors. 0 bytes: the end.
///
/// # Panics
/// When nothing comes.
pub fn receive(socket: RawFd, bytes: &mut [u8]) -> (usize, Vec<OwnedFd>) {
    let mut control = [0u64; 16];
    let mut iov = [IoSliceMut::new(bytes)];
    // SAFETY: all-zero is a valid msghdr; the buffers outlive the call; the kernel says how much of them it has filled.
    unsafe {
        let mut msg: libc::msghdr = std::mem::zeroed();
        msg.msg_iov = iov.as_mut_ptr().cast();
        msg.msg_iovlen = 1;
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = size_of_val(&control);
        let count = libc::recvmsg(socket, &raw mut msg, libc::MSG_CMSG_CLOEXEC);
        let error = std::io::Error::last_os_error();
        // A server that closes what has unread bytes resets it.
        let is_end = count < 0 && error.raw_os_error() == Some(libc::ECONNRESET);
        assert!(count >= 0 || is_end, "nothing came: {error}");
        let mut fds = Vec::new();
        let mut header = libc::CMSG_FIRSTHDR(&raw const msg);
        while !is_end && !header.is_null() {
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            let len = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
            let all = (0..len / 4).map(|at| OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
            fds.extend(all);
            header = libc::CMSG_NXTHDR(&raw const msg, header);
        }
        (usize::try_from(count).unwrap_or(0), fds)
    }
}

/// A message: a number, and what came with it.
#[derive(Debug)]
pub struct Message {
    /// The number.
    pub value: i64,
    /// The descriptor.
    pub fd: Option<OwnedFd>,
}

/// A virtual machine.
pub struct Client {
    /// Its connection.
    pub socket: UnixStream,
    /// Its id.
    pub id: i64,
    /// The memory.
    pub memory: Option<File>,
    /// Doorbells by client, its own among them.
    pub doorbells: BTreeMap<i64, Vec<File>>,
}

impl Client {
    /// Connects, and reads nothing yet.
    ///
    /// # Panics
    /// Without a server.
    pub fn silent(path: &Path) -> Client {
        let socket = UnixStream::connect(path).expect("a server");
        socket.set_read_timeout(Some(PATIENCE)).expect("a time");
        Client { socket, id: -1, memory: None, doorbells: BTreeMap::new() }
    }

    /// Connects, and reads up to its own doorbells, which come last.
    ///
    /// # Panics
    /// When the server says anything in another order.
    pub fn connect(path: &Path, vectors: usize) -> Client {
        let mut client = Client::silent(path);
        client.read_greeting();
        while client.doorbells.get(&client.id).is_none_or(|own| own.len() < vectors) {
            client.learn();
        }
        client
    }

    /// Reads what QEMU waits for: the version, the id, the memory.
    ///
    /// # Panics
    /// When anything else comes.
    pub fn read_greeting(&mut self) {
        let version = self.message().expect("a version");
        assert!(version.value == 0 && version.fd.is_none(), "{version:?}");
        let id = self.message().expect("an id");
        assert!((0..1 << 16).contains(&id.value) && id.fd.is_none(), "{id:?}");
        let memory = self.message().expect("the memory");
        assert_eq!(memory.value, -1);
        self.id = id.value;
        self.memory = Some(memory.fd.expect("a descriptor").into());
    }

    /// The next message; `None` at the end.
    ///
    /// # Panics
    /// When none comes.
    pub fn message(&mut self) -> Option<Message> {
        let mut bytes = [0; 8];
        let (count, mut fds) = receive(self.socket.as_raw_fd(), &mut bytes);
        if count == 0 {
            return None;
        }
        assert!(count == 8 && fds.len() < 2, "{count} bytes, {} descriptors", fds.len());
        Some(Message { value: i64::from_le_bytes(bytes), fd: fds.pop() })
    }

    /// Reads one message about a client and says whose it was: a doorbell is kept, a departure forgets all of them.
    ///
    /// # Panics
    /// When it makes no sense.
    pub fn learn(&mut self) -> (i64, bool) {
        let message = self.message().expect("a message");
        let id = message.value;
        match message.fd {
            Some(doorbell) => self.doorbells.entry(id).or_default().push(doorbell.into()),
            None => assert!(self.doorbells.remove(&id).is_some(), "{id} left, and never came"),
        }
        (id, self.doorbells.contains_key(&id))
    }

    /// Reads `count` doorbells of a client that arrives.
    ///
    /// # Panics
    /// When anything else comes.
    pub fn sees_arrival(&mut self, id: i64, count: usize) {
        (0..count).for_each(|_| assert_eq!(self.learn(), (id, true)));
    }

    /// Reads that a client has left.
    ///
    /// # Panics
    /// When anything else comes.
    pub fn sees_departure(&mut self, id: i64) {
        assert_eq!(self.learn(), (id, false));
    }

    /// Reads that these have left, in any order.
    ///
    /// # Panics
    /// When anything else comes.
    pub fn sees_departures(&mut self, ids: &[i64]) {
        let mut gone: Vec<i64> =
            ids.iter().map(|_| self.learn()).filter(|its| !its.1).map(|its| its.0).collect();
        gone.sort_unstable();
        assert_eq!(gone, ids);
    }

    /// Rings another client.
    ///
    /// # Panics
    /// When it knows no such doorbell.
    pub fn ring(&self, id: i64, vector: usize) {
        let mut doorbell = &self.doorbells[&id][vector];
        doorbell.write_all(&1u64.to_ne_bytes()).expect("an eventfd");
    }

    /// How often each of its own doorbells was rung since the last look.
    ///
    /// # Panics
    /// When one is no eventfd.
    pub fn rings(&self) -> Vec<u64> {
        let own = &self.doorbells[&self.id];
        own.iter()
            .map(|mut doorbell| {
                let mut count = [0; 8];
                match doorbell.read(&mut count) {
                    Ok(8) => u64::from_ne_bytes(count),
                    Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => 0,
                    other => panic!("{other:?}"),
                }
            })
            .collect()
    }

    /// The region, mapped for the rest of the process' life.
    ///
    /// # Panics
    /// When it is none.
    pub fn region(&self) -> Region {
        map(self.memory.as_ref().expect("the memory"))
    }

    /// Joins the region as a process of this virtual machine would: the number of its peer.
    ///
    /// # Panics
    /// When there is no place.
    pub fn join(&self, region: &Region) -> u8 {
        join(region, self.id)
    }
}

/// Joins a region as a process of the virtual machine with this id.
///
/// # Panics
/// When there is no place.
pub fn join(region: &Region, id: i64) -> u8 {
    let identity = Identity { host: [id as u64 + 1, 1], directory: [1, 1], station: id as u64 + 1 };
    region.peers().join(&identity, b"vm").expect("a place")
}

/// Maps a region for the rest of the process' life.
///
/// # Panics
/// When it is none.
pub fn map(file: &File) -> Region {
    let len = file.metadata().expect("a file").len() as usize;
    // SAFETY: a fresh mapping of the whole file, which stays.
    unsafe {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let base =
            libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(base, libc::MAP_FAILED, "a mapping");
        Region::open(base.cast(), len).expect("a region")
    }
}

/// systemd, as far as a service sees it: it keeps descriptors.
pub struct Manager {
    path: PathBuf,
    /// Connected to the reader, also once the path is gone.
    own: UnixDatagram,
    store: Arc<Mutex<Store>>,
    /// Says that all that was sent before [`SETTLE`] is heard.
    settled: Receiver<()>,
    reader: Option<JoinHandle<()>>,
}

/// Messages to the reader that are not a service's.
const SETTLE: &str = "SETTLE";
const END: &str = "END";

#[derive(Default)]
struct Store {
    fds: Vec<(String, OwnedFd)>,
    is_ready: bool,
}

impl Manager {
    /// One that hears at a socket in this directory.
    ///
    /// # Panics
    /// When that cannot be made.
    pub fn new(dir: &Path) -> Manager {
        let path = dir.join("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        let own = UnixDatagram::unbound().expect("a socket");
        own.connect(&path).expect("our own socket");
        let store = Arc::new(Mutex::new(Store::default()));
        let shared = Arc::clone(&store);
        let (to, settled) = channel();
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                let (count, fds) = receive(socket.as_raw_fd(), &mut bytes);
                let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
                match text.as_str() {
                    SETTLE => _ = to.send(()),
                    END => break,
                    _ => shared.lock().expect("the store").hear(&text, fds),
                }
            }
        });
        Manager { path, own, store, settled, reader: Some(reader) }
    }

    /// Whether a service has said that it is ready since [`Manager::start`].
    ///
    /// # Panics
    /// When the reader has.
    pub fn is_ready(&self) -> bool {
        self.store.lock().expect("the store").is_ready
    }

    fn say(&self, text: &str) {
        self.own.send(text.as_bytes()).expect("the reader");
    }

    /// Waits until all is heard that was sent before.
    fn settle(&self) {
        self.say(SETTLE);
        self.settled.recv_timeout(PATIENCE).expect("the reader");
    }

    /// The names of all that is kept, in order.
    ///
    /// # Panics
    /// When the reader has.
    pub fn names(&self) -> Vec<String> {
        self.settle();
        let store = self.store.lock().expect("the store");
        let mut names: Vec<String> = store.fds.iter().map(|(name, _)| name.clone()).collect();
        names.sort();
        names
    }

    /// A command that starts a service: with these sockets, and with all that is kept, the last one first.
    ///
    /// # Panics
    /// When a descriptor cannot be copied.
    pub fn start(&self, program: &Command, sockets: &[(&str, RawFd)]) -> Command {
        self.settle();
        let mut store = self.store.lock().expect("the store");
        store.is_ready = false;
        let mut names: Vec<String> = sockets.iter().map(|(name, _)| (*name).to_owned()).collect();
        let mut fds: Vec<RawFd> = sockets.iter().map(|(_, fd)| *fd).collect();
        for (name, fd) in store.fds.iter().rev() {
            names.push(name.clone());
            fds.push(fd.as_raw_fd());
        }
        // Copies beyond the numbers that the service gets, which end with the command.
        let copy = |fd: RawFd| {
            // SAFETY: fcntl(2) touches no memory of ours; the new descriptor is nobody else's.
            unsafe {
                let copy = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 1000);
                assert!(copy >= 0, "a copy");
                OwnedFd::from_raw_fd(copy)
            }
        };
        let copies: Vec<OwnedFd> = fds.into_iter().map(copy).collect();
        // The shell becomes the service: it knows the number of its process.
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]);
        command.arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("NOTIFY_SOCKET", &self.path);
        command.env("LISTEN_FDS", copies.len().to_string());
        command.env("LISTEN_FDNAMES", names.join(":"));
        // SAFETY: dup2(2) allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(move || {
                for (at, copy) in copies.iter().enumerate() {
                    if libc::dup2(copy.as_raw_fd(), 3 + at as RawFd) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command
    }
}

impl Store {
    fn hear(&mut self, text: &str, mut fds: Vec<OwnedFd>) {
        let value =
            |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let name = value("FDNAME").unwrap_or("stored").to_owned();
        if value("FDSTORE").is_some() {
            let fd = fds.pop().expect("a descriptor");
            // One that is kept already is kept once.
            if !self.fds.iter().any(|(its, kept)| *its == name && inode(kept) == inode(&fd)) {
                self.fds.push((name, fd));
            }
        } else if value("FDSTOREREMOVE").is_some() {
            self.fds.retain(|(its, _)| *its != name);
        }
        self.is_ready |= value("READY").is_some();
    }
}

fn inode(fd: &OwnedFd) -> u64 {
    let file = fd.try_clone().map(File::from).and_then(|file| file.metadata());
    file.expect("an open file").ino()
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.say(END);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Sends bytes without a descriptor, which no virtual machine does.
///
/// # Panics
/// When they cannot be sent.
pub fn say(client: &Client, bytes: &[u8]) {
    (&client.socket).write_all(bytes).expect("room");
}
