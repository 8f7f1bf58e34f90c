//! All that a process has of the fabric, behind one lock, and the thread that is its device.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use usmc_verbs::sys::*;

use crate::fabric;
use crate::link;
use crate::memory::Memory;
use crate::pair::{Made, Pair};
use crate::queues::{Asynchronous, Queues};
use crate::state::{Effect, State};

/// What queue pairs work with.
pub(crate) struct Core {
    pub(crate) state: State,
    pub(crate) memory: Memory,
    pub(crate) queues: Queues,
    directory: File,
    file: File,
}

pub(crate) struct Nic {
    pub(crate) core: Core,
    pub(crate) pairs: BTreeMap<u32, Pair>,
    /// Protection domains, with their contexts and devices.
    pub(crate) domains: BTreeMap<u32, (u32, usize)>,
    /// The library's `ibv_device`s, by their places in the fabric. They stay.
    pub(crate) devices: BTreeMap<usize, usize>,
    numbers: u32,
    /// The number of the last queue pair in the fabric. Devices keep the lowest ones for themselves.
    last_pair: u32,
    /// Written to when there is something to send.
    wake: OwnedFd,
    /// Readable when the fabric's file has grown.
    watch: OwnedFd,
    has_thread: bool,
}

static NIC: OnceLock<Option<Mutex<Nic>>> = OnceLock::new();

/// This process's device, having read what is new in the fabric; `None` where no fabric is named.
pub(crate) fn nic() -> Option<MutexGuard<'static, Nic>> {
    let mut nic = nic_as_is()?;
    nic.catch_up();
    Some(nic)
}

/// The same for a post. Where posts move data themselves the thread reads what is new: that is a system call.
pub(crate) fn nic_for_post() -> Option<MutexGuard<'static, Nic>> {
    let mut nic = nic_as_is()?;
    if !nic.core.state.is_direct {
        nic.catch_up();
    }
    Some(nic)
}

/// The same for what the fabric's file does not matter to.
pub(crate) fn nic_as_is() -> Option<MutexGuard<'static, Nic>> {
    Some(bare()?.lock().unwrap_or_else(PoisonError::into_inner))
}

fn bare() -> Option<&'static Mutex<Nic>> {
    let make = || {
        let directory = std::env::var_os(fabric::DIRECTORY)?;
        match Nic::new(Path::new(&directory)) {
            Ok(nic) => Some(Mutex::new(nic)),
            Err(error) => {
                eprintln!("usmc-fake-verbs: {}: {error}", Path::new(&directory).display());
                None
            }
        }
    };
    NIC.get_or_init(make).as_ref()
}

impl Core {
    pub(crate) fn directory(&self) -> RawFd {
        self.directory.as_raw_fd()
    }
}

impl Nic {
    fn new(directory: &Path) -> io::Result<Nic> {
        let file = File::open(directory.join(fabric::FILE))?;
        let core = Core {
            state: State::default(),
            memory: Memory::default(),
            queues: Queues::default(),
            directory: File::open(directory)?,
            file,
        };
        // SAFETY: No pointers.
        let wake = owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: No pointers.
        let watch = owned(unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) })?;
        let path = format!("/proc/self/fd/{}\0", core.file.as_raw_fd());
        // SAFETY: The path ends in NUL.
        let added = unsafe {
            libc::inotify_add_watch(watch.as_raw_fd(), path.as_ptr().cast(), libc::IN_MODIFY)
        };
        if added < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut nic = Nic {
            core,
            pairs: BTreeMap::new(),
            domains: BTreeMap::new(),
            devices: BTreeMap::new(),
            numbers: 0,
            // Another one for each process, so that a mistake shows.
            last_pair: 16 + (std::process::id() & 0xfff) * 16,
            wake,
            watch,
            has_thread: false,
        };
        nic.catch_up();
        nic.sweep(directory);
        Ok(nic)
    }

    /// Removes names of queue pairs whose processes were killed. A connection tells, and does no harm where it succeeds.
    fn sweep(&self, directory: &Path) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let pair = name.strip_prefix("qp-").and_then(|rest| rest.rsplit_once('-'));
            if let Some((device, Ok(number))) =
                pair.map(|(device, number)| (device, number.parse()))
            {
                link::connect(self.core.directory(), device, number);
            }
        }
    }

    /// A number that no object has.
    pub(crate) fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers
    }

    /// Devices that this process may see, by their places in the fabric.
    pub(crate) fn visible(&self) -> Vec<usize> {
        let names = std::env::var(fabric::VISIBLE).ok();
        let is_visible =
            |name: &str| names.as_ref().is_none_or(|names| names.split(',').any(|one| one == name));
        let devices = self.core.state.devices.iter().enumerate();
        devices.filter(|(_, device)| is_visible(&device.name)).map(|(at, _)| at).collect()
    }

    pub(crate) fn catch_up(&mut self) {
        for Effect { device, kind, qp_num } in self.core.state.catch_up(&self.core.file) {
            if qp_num == 0 {
                let contexts = self.core.queues.contexts.iter();
                let open: Vec<_> = contexts
                    .filter(|(_, it)| it.device == device)
                    .map(|(number, _)| *number)
                    .collect();
                for context in open {
                    self.core.queues.report(context, Asynchronous { kind, element: 1 });
                }
                continue;
            }
            let mut pairs = self.pairs.values_mut();
            let Some(pair) =
                pairs.find(|pair| pair.made.device == device && pair.made.number == qp_num)
            else {
                continue;
            };
            pair.report(&mut self.core, kind);
            if kind == IBV_EVENT_QP_FATAL {
                pair.fail(&mut self.core, None);
            }
        }
    }

    /// A new queue pair, with a free number of the fabric.
    pub(crate) fn create_pair(&mut self, mut made: Made) -> io::Result<u32> {
        let device = &self.core.state.devices[made.device].name;
        let (listener, number) = link::listen(self.core.directory(), device, self.last_pair + 1)?;
        // Numbers of a process rise, so that a late packet rarely finds a successor.
        (made.number, self.last_pair) = (number, number);
        self.pairs.insert(made.id, Pair::new(made, listener));
        self.wake();
        Ok(number)
    }

    pub(crate) fn destroy_pair(&mut self, id: u32) {
        let Some(pair) = self.pairs.remove(&id) else { return };
        let device = &self.core.state.devices[pair.made.device].name;
        link::remove(self.core.directory(), device, pair.made.number);
        self.core.queues.forget(pair.made.context, pair.made.raw);
        self.wake();
    }

    /// Lets the thread look.
    pub(crate) fn wake(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: Eight bytes.
        unsafe { libc::write(self.wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Starts the thread, once. Signals are the application's, so the thread takes none.
    pub(crate) fn start(&mut self) {
        if self.has_thread {
            return;
        }
        // SAFETY: Sets of signals that are locals; the mask is put back.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            let started = std::thread::Builder::new().name("fake-verbs".into()).spawn(serve);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
            self.has_thread = started.is_ok();
        }
    }

    fn turn(&mut self, ready: &HashSet<RawFd>) {
        self.catch_up();
        if self.core.state.is_direct {
            return;
        }
        let now = Instant::now();
        for pair in self.pairs.values_mut() {
            pair.turn(&mut self.core, now, &|fd| ready.contains(&fd));
        }
    }

    fn waits(&self, fds: &mut Vec<libc::pollfd>) -> Option<Instant> {
        fds.clear();
        for fd in [self.wake.as_raw_fd(), self.watch.as_raw_fd()] {
            fds.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        }
        self.pairs.values().filter_map(|pair| pair.waits(&self.core, fds)).min()
    }

    pub(crate) fn has_pair_of(&self, is_user: impl Fn(&Made) -> bool) -> bool {
        self.pairs.values().any(|pair| is_user(&pair.made))
    }

    /// Whether something was made of an open device that is there still.
    pub(crate) fn is_in_use(&self, context: u32) -> bool {
        self.has_pair_of(|made| made.context == context)
            || self.core.queues.queues.values().any(|queue| queue.context == context)
            || self.domains.values().any(|(of, _)| *of == context)
    }
}

/// The thread: waits without the lock, works with it.
fn serve() {
    let (mut fds, mut ready) = (Vec::new(), HashSet::new());
    loop {
        let Some(mut nic) = nic_as_is() else { return };
        nic.turn(&ready);
        let due = nic.waits(&mut fds);
        let (wake, watch) = (nic.wake.as_raw_fd(), nic.watch.as_raw_fd());
        drop(nic);
        wait(&mut fds, due);
        ready.clear();
        ready.extend(fds.iter().filter(|entry| entry.revents != 0).map(|entry| entry.fd));
        for fd in [wake, watch] {
            let mut ignored = [0u8; 4096];
            if ready.contains(&fd) {
                // SAFETY: The buffer is as long as that; neither descriptor makes a read wait.
                while unsafe { libc::read(fd, ignored.as_mut_ptr().cast(), ignored.len()) } > 0 {}
            }
        }
    }
}

fn wait(fds: &mut [libc::pollfd], due: Option<Instant>) {
    let left =
        due.map(|due| due.saturating_duration_since(Instant::now()).min(Duration::from_secs(3600)));
    let time = left.map(|left| libc::timespec {
        tv_sec: left.as_secs() as libc::time_t,
        tv_nsec: left.subsec_nanos() as libc::c_long,
    });
    let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: The array is as long as that; the time is a local, or none.
    unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, time, ptr::null()) };
}

fn owned(fd: RawFd) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: A new descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
