//! `usmc agent`: starts the owner of RDMA devices, which is a program of its own.

use std::env;
use std::ffi::{OsString, c_int};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args as ClapArgs;

use crate::config::agent::Agent;
use crate::config::{Config, ConfigArgs, DirArgs};
use crate::exec;

/// The program, which opens libibverbs: a static one, as this may be, opens no library.
const NAME: &str = "usmc-agent";
/// The socket in the ISM directory.
const SOCKET: &str = usmc_shm::agent::SOCKET;

/// Carry connections to other hosts by RDMA
///
/// Owns this host's RDMA devices, and the link groups with other hosts. Programs under `usmc run` with the same ISM directory hand it
/// their connections to peers that speak SMC.
#[derive(ClapArgs, Debug)]
pub struct Args {
    /// An RDMA device to use, as rdma(8) names it; may be repeated [default: all]
    #[arg(long = "device", value_name = "NAME")]
    devices: Vec<String>,
    /// Who may hand connections over, in octal: 666 is all users [default: 600]
    #[arg(long, value_name = "MODE")]
    socket_mode: Option<String>,
    /// How long it looks for work before it sleeps: never, always, or microseconds at most, as far as that pays [default: 50]
    #[arg(long, value_name = "TIME")]
    spin: Option<String>,
    /// Bytes of a connection's send buffer and of its RMB, a power of two from 16384 to 4194304 [default: 262144]
    #[arg(long, value_name = "BYTES")]
    buffer_size: Option<String>,
    /// Bytes of a connection's send buffer alone [default: as --buffer-size]
    #[arg(long, value_name = "BYTES")]
    sndbuf: Option<String>,
    /// Bytes of a connection's receive buffer, its RMB, alone [default: as --buffer-size]
    #[arg(long, value_name = "BYTES")]
    rcvbuf: Option<String>,
    /// Messages under way on a link, 4 to 512; three times as many receives are posted [default: 16]
    #[arg(long, value_name = "COUNT")]
    ctrl_buffer_count: Option<String>,
    /// Largest path MTU of a link: 256, 512, 1024, 2048 or 4096 [default: the port's]
    #[arg(long, value_name = "BYTES")]
    mtu: Option<String>,
    /// How long a port is not used after it has come up, in seconds, to 3600 [default: 0]
    #[arg(long, value_name = "SECONDS")]
    port_add_delay: Option<String>,
    /// Links of a link group at most: 1 or 2 [default: 1]
    #[arg(long, value_name = "COUNT")]
    max_links: Option<String>,
    /// Connections of a link group at most, 16 to 255 [default: 255]
    #[arg(long, value_name = "COUNT")]
    max_conns: Option<String>,
    /// How long a link may be idle before it is tested, in seconds; 0 tests none [default: 30]
    #[arg(long, value_name = "SECONDS")]
    testlink_time: Option<String>,
    /// Tell what happens to devices, link groups, links and connections, on standard error
    #[arg(long, short)]
    verbose: bool,
    #[command(flatten)]
    dir: DirArgs,
    /// User-defined enterprise IDs: comma list, repeatable, at most four
    #[arg(long = "ueid", alias = "ueids", value_name = "UEIDS")]
    ueids: Vec<String>,
}

/// Becomes the agent.
///
/// # Errors
/// It is not installed, or the ISM directory cannot be made.
pub fn run(args: &Args) -> Result<c_int> {
    let ueids = args.ueids.clone();
    let config = Config::load(&ConfigArgs { ueids, ..args.dir.config() })?;
    let dir = config.ism_dir();
    let settings = settings(args, &config);
    let mode = settings.iter().rev().find(|(option, _)| *option == "--socket-mode");
    let is_shared = mode
        .is_some_and(|(_, mode)| mode.trim_start_matches('0').len() == 3 && !mode.ends_with("00"));
    make(&dir, if is_shared { 0o755 } else { 0o700 })?;
    let program = find()?;
    let mut command: Vec<OsString> = vec![program.clone().into(), "--socket".into()];
    command.push(dir.join(SOCKET).into());
    let mut say = |option: &str, value: &str| command.extend([option.into(), value.into()]);
    config.ueids().for_each(|ueid| say("--ueid", ueid));
    settings.iter().for_each(|(option, value)| say(option, value));
    for entry in &config.pnet {
        let devices = [("--pnet", &entry.interface), ("--pnet-device", &entry.ibdevice)];
        for (option, device) in devices {
            let device = device.iter().map(|device| format!("{}={device}", entry.pnetid));
            device.for_each(|device| say(option, &device));
        }
    }
    command.extend(args.verbose.then(|| "--verbose".into()));
    let variables: Vec<_> = env::vars_os().filter(|(name, _)| name != "LD_PRELOAD").collect();
    let failure = exec::replace(&command, &variables);
    bail!("cannot start {}: {failure}; install uSMC anew", program.display())
}

/// What the agent is told: the file's settings, but for those that an option is there for.
fn settings(args: &Args, config: &Config) -> Agent {
    let one = |option, value: &Option<String>| Some((option, value.clone()?));
    let options = [
        one("--socket-mode", &args.socket_mode),
        one("--spin", &args.spin),
        one("--ring-size", &args.buffer_size),
        one("--sndbuf", &args.sndbuf),
        one("--rcvbuf", &args.rcvbuf),
        one("--ctrl-buffer-count", &args.ctrl_buffer_count),
        one("--mtu", &args.mtu),
        one("--port-add-delay", &args.port_add_delay),
        one("--max-links", &args.max_links),
        one("--max-conns", &args.max_conns),
        one("--testlink-time", &args.testlink_time),
    ];
    let devices = args.devices.iter().map(|device| ("--device", device.clone()));
    let options: Agent = options.into_iter().flatten().chain(devices).collect();
    let is_said = |option: &str| options.iter().any(|(said, _)| *said == option);
    let file = config.agent.iter().filter(|(option, _)| !is_said(option)).cloned();
    file.collect::<Agent>().into_iter().chain(options.iter().cloned()).collect()
}

/// The directory that programs under uSMC would make.
fn make(dir: &Path, mode: u32) -> Result<()> {
    let made = std::fs::DirBuilder::new().mode(mode).create(dir);
    match made {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| {
                format!(
                    "cannot make the ISM directory {}; name another one by --ism-dir",
                    dir.display()
                )
            })
        }
        _ => Ok(()),
    }
}

/// Beside this program, or in PREFIX/lib/usmc.
fn find() -> Result<PathBuf> {
    let own = env::current_exe().context("/proc is not mounted; mount it")?;
    let dir = own.parent().unwrap_or(Path::new("/"));
    let places = [dir.join(NAME), dir.join("../lib/usmc").join(NAME)];
    let found = places.iter().find(|place| place.is_file()).cloned();
    found.with_context(|| {
        format!(
            "{NAME} is neither in {} nor in ../lib/usmc beside it; install uSMC anew",
            dir.display()
        )
    })
}
