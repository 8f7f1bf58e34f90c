//! `usmc exporter`: what connections under uSMC do, for Prometheus.

use std::ffi::c_int;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::{Config, ConfigArgs};
use crate::exporter::http::Listener;
use crate::exporter::ledger::Names;
use crate::exporter::state::{Kept, State};
use crate::exporter::tracked::Tracker;
use crate::exporter::work::{Exporter, Settings};
use crate::ivshmem::server::fill_standard_descriptors;
use crate::ivshmem::socket::{Named, Place};
use crate::ivshmem::systemd::{self, Manager};

/// Where clients connect by default.
const LISTEN: &str = "127.0.0.1:9477";
/// Descriptors of the exporter's own.
const OWN_FILES: u64 = 128;
/// Processes that are held at most.
const MOST: u64 = 1 << 14;

/// Serve metrics of connections under uSMC to Prometheus
///
/// Counts what all programs under uSMC do, also those that have ended, and serves the sums at /metrics.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "As root it sees the programs of all users, else those of its own. See usmc-exporter(8)."
)]
pub struct Args {
    /// ADDRESS:PORT, or the path of a UNIX socket; not needed where systemd has made the socket [default: 127.0.0.1:9477]
    #[arg(long, value_name = "WHERE")]
    listen: Option<String>,
    /// The ISM directory that is watched from before its first program on [default: /dev/shm/usmc-UID]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    ism_dir: Option<String>,
    /// Keep the sums in FILE while no exporter runs
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    state: Option<PathBuf>,
    /// How often to look at all processes at least, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// How many programs to tell apart; others are summed up as `other`
    #[arg(long, value_name = "COUNT", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    max_programs: u64,
}

/// Serves until a signal comes.
///
/// # Errors
/// What is in the way, and what to do.
pub fn run(args: &Args) -> Result<c_int> {
    // Before anything is opened.
    let given = systemd::given();
    fill_standard_descriptors();
    let config = ConfigArgs { ism_dir: args.ism_dir.clone(), ..ConfigArgs::default() };
    let ism_dir = Config::load(&config)?.ism_dir();
    let (state, kept) = match &args.state {
        Some(path) => {
            let (state, kept) = State::open(path)?;
            (Some(state), kept)
        }
        None => (None, Kept::default()),
    };
    let names = Names::new(args.max_programs as usize);
    let tracker = Tracker::new(names, kept.ended, kept.live, files())?;
    let settings = Settings { ism_dir, interval: Duration::from_secs(args.interval) };
    let exporter = Rc::new(Exporter::new(settings, tracker, kept.agents, state)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot make an epoll set; raise the limit of open files")?;
    let work = async {
        let (listener, where_to, _named) = listen(args.listen.as_deref(), given)?;
        let manager = Manager::of_this_process();
        let ready = || {
            // For the program that has started it. There may be nobody to read it.
            let _ = writeln!(io::stdout(), "listening at {where_to}");
            manager.iter().for_each(Manager::ready);
        };
        exporter.work(listener, ready).await
    };
    tokio::task::LocalSet::new().block_on(&runtime, work)?;
    Ok(0)
}

/// How many processes can be held: each has its record file and a descriptor of its own, and the file is opened once more by each look.
fn files() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    (limit.saturating_sub(OWN_FILES) / 3).min(MOST) as usize
}

/// The socket, its name, and what removes that.
fn listen(
    wanted: Option<&str>,
    given: Vec<(String, std::os::fd::OwnedFd)>,
) -> Result<(Listener, String, Option<Named>)> {
    let mut given = given.into_iter().map(|(_, socket)| socket);
    if let Some(socket) = given.next() {
        if wanted.is_some() || given.next().is_some() {
            bail!("systemd gives a socket already; have one ListenStream= and no --listen");
        }
        return Ok((Listener::given(socket)?, "systemd's socket".to_owned(), None));
    }
    let wanted = wanted.unwrap_or(LISTEN);
    if let Some(path) = wanted.strip_prefix("unix:").or(wanted.contains('/').then_some(wanted)) {
        let (socket, named) = Place { path: path.as_ref(), mode: 0o660, group: None }.listen()?;
        return Ok((Listener::unix(socket)?, path.to_owned(), Some(named)));
    }
    let Ok(address) = wanted.parse::<SocketAddr>() else {
        bail!(
            "--listen: {wanted:?} is neither an address with a port, such as {LISTEN}, nor a path"
        );
    };
    let socket = TcpListener::bind(address)
        .with_context(|| format!("cannot listen at {address}; name another address by --listen"))?;
    let address = socket.local_addr().context("getsockname")?;
    Ok((Listener::tcp(socket)?, address.to_string(), None))
}
