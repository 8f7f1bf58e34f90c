//! One test's world.

use std::cell::RefCell;
use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Once, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::process::Process;
use crate::ss::{self, Socket};
use crate::{build, is_plain, leftovers, procfs};

/// A private ISM directory, the ports and the processes of one test.
pub struct Fixture {
    dir: PathBuf,
    scratch: PathBuf,
    marker: String,
    deadline: Instant,
    ports: RefCell<Vec<u16>>,
    expired: Arc<AtomicBool>,
    /// Dropped to end the watchdog.
    watchdog: Option<Sender<()>>,
}

/// Marks every process of a test, whatever it does to its group and session.
const MARKER: &str = "USMC_TESTS_ID";

impl Fixture {
    /// For a test that ends within [`crate::TEST_LIMIT`].
    pub fn new(name: &str) -> Fixture {
        Fixture::with_limit(name, crate::TEST_LIMIT)
    }

    /// For a test with a limit of its own, on a machine with two cores and nothing else to do: others get as much longer as
    /// they are slower.
    pub fn with_limit(name: &str, limit: Duration) -> Fixture {
        let limit = limit * slowness();
        static SWEPT: Once = Once::new();
        allow_many_files();
        let parents = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
        SWEPT.call_once(|| parents.iter().for_each(|parent| leftovers::sweep(parent)));
        let id = leftovers::name();
        let [dir, scratch] = parents.map(|parent| parent.join(&id));
        fs::DirBuilder::new().create(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        set_mode(&dir, 0o700);
        fs::create_dir(&scratch).unwrap_or_else(|e| panic!("{}: {e}", scratch.display()));
        // Programs that drop their rights (PostgreSQL, nginx workers) work in here.
        set_mode(&scratch, 0o755);
        let marker = format!("{MARKER}={id}");
        let expired = Arc::new(AtomicBool::new(false));
        let watchdog = watch(name.to_owned(), marker.clone(), limit, Arc::clone(&expired));
        Fixture {
            dir,
            scratch,
            marker,
            deadline: Instant::now() + limit,
            ports: RefCell::new(Vec::new()),
            expired,
            watchdog: Some(watchdog),
        }
    }

    /// The ISM directory.
    pub fn ism_dir(&self) -> &Path {
        &self.dir
    }

    /// What is in the environment of all its processes, `NAME=value`.
    pub fn marker(&self) -> &str {
        &self.marker
    }

    /// A directory for the test's own files.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// Hands both directories to another user, for programs that refuse to run as root.
    ///
    /// # Panics
    /// When there is no such user, or we are not root.
    pub fn give_to(&self, user: &str) {
        for dir in [&self.dir, &self.scratch] {
            let out = tool("chown", &["-R", user, &dir.to_string_lossy()]);
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        }
    }

    /// A command that runs `program` under `usmc run`, or plainly in a plain run.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        if is_plain() {
            return self.plain(program);
        }
        let mut command = Command::new(build::usmc());
        command.args(["run", "--"]).arg(program.as_ref());
        self.dress(&mut command);
        command
    }

    /// A command that never runs under uSMC.
    pub fn plain(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        self.dress(&mut command);
        command
    }

    fn dress(&self, command: &mut Command) {
        let (name, value) = self.marker.split_once('=').expect("NAME=value");
        command.env(name, value).env("USMC_ISM_DIR", &self.dir).env("LC_ALL", "C");
        command.env_remove("LD_PRELOAD").current_dir(&self.scratch);
    }

    /// Starts a command as a process group of its own.
    pub fn spawn(&self, command: Command) -> Process {
        Process::start(command, self.deadline)
    }

    /// Runs a command to its end, which has to be exit status 0, and returns what it printed.
    pub fn run(&self, command: Command) -> String {
        self.spawn(command).succeed()
    }

    /// Time left.
    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// A TCP port nobody listens at, below the range that connect(2) takes from.
    pub fn port(&self) -> u16 {
        static NEXT: OnceLock<AtomicU32> = OnceLock::new();
        let start = || AtomicU32::new(std::process::id() * 37);
        let next = NEXT.get_or_init(start);
        for _ in 0..10_000 {
            let port = 12_000 + (next.fetch_add(1, Ordering::Relaxed) % 20_000) as u16;
            if TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok() {
                self.ports.borrow_mut().push(port);
                return port;
            }
        }
        panic!("no free port");
    }

    /// Waits until a server accepts connections at `port` of 127.0.0.1.
    pub fn wait_for_port(&self, port: u16) {
        self.wait_until("the server to listen", || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
        });
    }

    /// Polls for a condition, giving the processor away in between. For what has no event to wait for.
    ///
    /// # Panics
    /// When the test's time is over.
    pub fn wait_until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        while !condition() {
            assert!(self.time_left() > Duration::ZERO, "waited too long for {what}");
            thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// The same, with what was seen last for the message.
    ///
    /// # Panics
    /// As there.
    pub fn wait_until_so<T: std::fmt::Display>(
        &self,
        what: &str,
        mut look: impl FnMut() -> T,
        is_so: impl Fn(&T) -> bool,
    ) -> T {
        loop {
            let seen = look();
            if is_so(&seen) {
                return seen;
            }
            // What is started to look has to end in time, too.
            assert!(
                self.time_left() > Duration::from_secs(2),
                "waited too long for {what}:\n{seen}"
            );
            thread::park_timeout(Duration::from_millis(1));
        }
    }

    /// What `usmc ss --json` shows; nothing in a plain run.
    pub fn sockets(&self) -> Vec<Socket> {
        if is_plain() { Vec::new() } else { ss::list() }
    }

    /// Waits until the connection between two ports is SMC-D at both ends. Nothing in a plain run.
    ///
    /// # Panics
    /// When it is not in time, with the reasons that `usmc ss` gives.
    pub fn assert_smcd(&self, one: u16, other: u16) {
        assert_ends((one, other), "SMC-D", Socket::is_smcd);
    }

    /// The same for SMC-R.
    ///
    /// # Panics
    /// As there.
    pub fn assert_smcr(&self, one: u16, other: u16) {
        assert_ends((one, other), "SMC-R", Socket::is_smcr);
    }

    /// Asserts that the connection between two ports is plain TCP at both ends.
    ///
    /// # Panics
    /// When it is not.
    pub fn assert_tcp(&self, one: u16, other: u16) {
        if is_plain() {
            return;
        }
        let ends = ends(one, other);
        assert!(
            !ends.is_empty() && !ends.iter().any(Socket::is_smcd),
            "ports {one} and {other} are connected by SMC-D: {ends:#?}"
        );
    }

    /// The connections to or from a server's port that `usmc ss` shows, SMC-D or not.
    pub fn connections(&self, port: u16) -> Vec<Socket> {
        let all = self.sockets().into_iter();
        all.filter(|s| s.peer_port() == port || (s.local_port() == port && s.peer_port() != 0))
            .collect()
    }

    /// Asserts that a connection of the server at `port` is SMC-D now. Nothing in a plain run.
    pub fn assert_serves_smcd(&self, port: u16) {
        if is_plain() {
            return;
        }
        let mut last = Vec::new();
        // Ten thousand connections take their time on a busy machine.
        let until = Instant::now() + Duration::from_secs(40).min(self.time_left());
        while Instant::now() < until {
            let seen = self.connections(port);
            if seen.iter().any(|s| s.is_smcd() && s.local_port() == port) {
                return;
            }
            // For the message: what there was while there was something.
            if !seen.is_empty() {
                last = seen;
            }
        }
        panic!("no connection of port {port} is SMC-D: {last:#?}");
    }

    /// Ends the test: asserts that no process, port or file is left.
    ///
    /// # Panics
    /// When something leaked.
    pub fn finish(mut self) {
        assert!(!self.expired.load(Ordering::Relaxed), "the test ran out of time");
        // A process that was reaped a moment ago is gone; one that goes on needs a reason.
        let mut left = Vec::new();
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            left = procfs::marked(&self.marker);
            if left.is_empty() {
                break;
            }
            thread::park_timeout(Duration::from_millis(1));
        }
        assert!(left.is_empty(), "processes left:\n{}", procfs::describe(&self.marker));
        // A process that is about to end has lost its memory, where its name stands, before its sockets.
        let listens = |port: u16| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok();
        for &port in self.ports.borrow().iter() {
            while listens(port) {
                assert!(Instant::now() < until, "somebody still listens at port {port}");
                thread::park_timeout(Duration::from_millis(1));
            }
        }
        let files: Vec<String> = file_names(&self.dir);
        // The device file is permanent; a killed process' mailbox stays until its index is taken again.
        let odd: Vec<&String> = files.iter().filter(|f| !is_device_file(f)).collect();
        assert!(odd.is_empty(), "left in the ISM directory: {odd:?}");
        self.watchdog = None;
    }
}

/// Begins the names of the device's files.
pub const DEVICE_PREFIX: &str = "v5.";

fn is_device_file(name: &str) -> bool {
    let of_ours = name.strip_prefix(DEVICE_PREFIX);
    let is_mailbox = |name: &str| name.strip_prefix("m.").is_some_and(|n| n.parse::<u32>().is_ok());
    of_ours.is_some_and(|name| name == "device" || is_mailbox(name))
}

fn file_names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .expect("chmod of our own directory");
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.watchdog = None;
        kill_marked(&self.marker);
        if !leftovers::is_kept() {
            let _ = fs::remove_dir_all(&self.dir);
            let _ = fs::remove_dir_all(&self.scratch);
        }
    }
}

fn kill_marked(marker: &str) {
    for _ in 0..3 {
        for pid in procfs::marked(marker) {
            // SAFETY: kill(2) touches no memory of ours; the process carries this test's marker.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
}

/// Starts the thread that ends a test's processes when its time is over.
fn watch(name: String, marker: String, limit: Duration, expired: Arc<AtomicBool>) -> Sender<()> {
    let (alive, gone) = channel::<()>();
    thread::spawn(move || {
        // A little after the limits of the waits, which know better what they waited for.
        let limit = limit + Duration::from_secs(2);
        if gone.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{name}: no end after {limit:?}\n{}", procfs::describe(&marker));
            expired.store(true, Ordering::Relaxed);
            kill_marked(&marker);
        }
    });
    alive
}

/// How many times longer than on two idle cores of the machine that limits were made on a test may take: by the cores that there are, by the
/// share of them that this process gets, and by how long a program takes to start and end.
pub fn slowness() -> u32 {
    const SPIN: Duration = Duration::from_millis(50);
    const STARTS: usize = 5;
    /// What the fastest of some starts takes there.
    const START: Duration = Duration::from_millis(1);
    /// A tenth of a core for each of two threads.
    const MOST: u32 = 10;
    static SLOWNESS: OnceLock<u32> = OnceLock::new();
    *SLOWNESS.get_or_init(|| {
        let (start, begun) = (Instant::now(), procfs::thread_time());
        while procfs::thread_time() - begun < SPIN && start.elapsed() < SPIN * MOST {}
        let (spent, used) = (start.elapsed(), procfs::thread_time() - begun);
        let share = spent.as_secs_f64() / used.max(SPIN / MOST).as_secs_f64();
        let few =
            if thread::available_parallelism().map_or(1, usize::from) < 2 { 2.0 } else { 1.0 };
        let starts = (0..STARTS).filter_map(|_| {
            let start = Instant::now();
            Command::new("true").status().is_ok().then(|| start.elapsed())
        });
        let start = starts.min().unwrap_or(START).as_secs_f64() / START.as_secs_f64();
        ((share * few).max(1.0) * start.max(1.0)).round().clamp(1.0, f64::from(MOST)) as u32
    })
}

/// Programs with ten thousand connections need as many fds as we may have at all.
fn allow_many_files() {
    // SAFETY: both calls get a valid struct of ours.
    unsafe {
        let mut limit = std::mem::zeroed::<libc::rlimit>();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// Runs a tool that has nothing to do with uSMC and returns its output.
///
/// # Panics
/// When it cannot be started.
pub fn tool(name: &str, args: &[&str]) -> Output {
    let out = Command::new(name).args(args).stdin(Stdio::null()).output();
    out.unwrap_or_else(|e| panic!("running {name}: {e} (make test-deps installs it)"))
}

/// The ends of one connection that `usmc ss` shows.
fn ends(one: u16, other: u16) -> Vec<Socket> {
    let ports = [(one, other), (other, one)];
    ss::list().into_iter().filter(|s| ports.contains(&(s.local_port(), s.peer_port()))).collect()
}

fn assert_ends((one, other): (u16, u16), kind: &str, is_kind: fn(&Socket) -> bool) {
    if is_plain() {
        return;
    }
    let ends = ends(one, other);
    assert!(
        ends.len() >= 2 && ends.iter().all(is_kind),
        "ports {one} and {other} are not connected by {kind}: {ends:#?}"
    );
}
