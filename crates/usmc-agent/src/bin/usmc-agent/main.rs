//! `usmc-agent`: the owner of a host's RDMA devices, for programs under `usmc run`.

mod options;
mod signals;
mod systemd;

use std::env;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;

use options::Options;
use sd_notify::NotifyState;
use smc_proto::handshake::Host;
use smc_proto::ids::PeerId;
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Release};
use usmc_agent::adapter::Adapter;
use usmc_agent::agent::{Agent, Stage};
use usmc_agent::control::Control;
use usmc_agent::driver::Driver;
use usmc_agent::nic::Adapters;
use usmc_agent::rest::Rest;
use usmc_agent::service::Service;
use usmc_agent::sys;
use usmc_rdma::nic::DeviceId;
use usmc_rdma::{Config, Event};
use usmc_verbs::Library;

/// Names another file than libibverbs.so.1, for tests.
const LIBRARY: &str = "USMC_IBVERBS";
/// What the first byte of an own hardware address has set: it is nobody's by assignment.
const LOCAL: u8 = 0x02;

fn main() -> ExitCode {
    let done = match options::parse(env::args_os().skip(1)) {
        Ok(Some(options)) => run(&options),
        Ok(None) => {
            print!("{}", options::HELP);
            Ok(())
        }
        Err(wrong) => Err(wrong.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(format_args!("usmc-agent: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let given = systemd::listener()?;
    if given.is_none() && options.socket.as_os_str().is_empty() {
        return Err("--socket PATH is needed: where programs find the agent".into());
    }
    let signals = signals::listen()?;
    sys::allow_many_descriptors();
    let adapters = adapters(options)?;
    let devices: Vec<DeviceId> = adapters.ids().collect();
    let config = Config {
        host: host(options)?,
        devices,
        first_token: u32::from_ne_bytes(sys::random()?),
        test_interval: options.test_interval,
    };
    let mut driver = Driver::new(config, adapters)?;
    driver.set_port_delay(options.port_delay);
    let service = Service::new(driver, Rest::new(options.spin)?, options.rings())?;
    let control = match given {
        Some(listener) => Control::given(listener, &service).map_err(|error| {
            format!("the socket that systemd has made: {error}; ListenSequentialPacket= makes the right one")
        })?,
        None => listen(options, &service)?,
    };
    let mut agent = Agent::new(service, control);
    agent.watch_orders(&signals)?;
    let mut out = std::io::stdout();
    writeln!(out, "ready")?;
    out.flush()?;
    systemd::tell(NotifyState::Ready);
    let mut has_told = false;
    while agent.stage() != Stage::Done {
        let found = agent.turn(|event| {
            if options.is_verbose {
                tell(event);
            }
        })?;
        let refusal = agent.service().driver().adapters.refusal().filter(|_| !has_told);
        if let Some(refusal) = refusal {
            has_told = true;
            say(format_args!("usmc-agent: connections stay TCP: {refusal}"));
        }
        if found.order && signals::take(&signals) {
            systemd::tell(NotifyState::Stopping);
            agent.end();
        }
    }
    Ok(())
}

/// The agent's own socket.
fn listen(options: &Options, service: &Service) -> Result<Control, Box<dyn Error>> {
    let control = Control::listen(&options.socket, service)
        .map_err(|error| format!("{}: {error}", options.socket.display()))?;
    fs::set_permissions(&options.socket, fs::Permissions::from_mode(options.mode))?;
    Ok(control)
}

/// The devices that were named, or all.
fn adapters(options: &Options) -> Result<Adapters, Box<dyn Error>> {
    let library = match env::var_os(LIBRARY) {
        // SAFETY: the user vouches for the file.
        Some(path) => unsafe { Library::open_file(Path::new(&path)) },
        None => Library::open(),
    };
    let library = library
        .map_err(|error| format!("{error}\ninstall libibverbs (rdma-core), or do without RDMA"))?;
    let names = match options.devices.is_empty() {
        true => library.devices()?,
        false => options.devices.clone(),
    };
    let mut adapters = Adapters::default();
    adapters.set_pnet(options.pnet.clone());
    for name in &names {
        match Adapter::open_device(library, name, options.settings) {
            Ok(Some(adapter)) => {
                if options.is_verbose {
                    say(format_args!("{name}: {}", adapter.address()));
                }
                adapters.add(adapter);
            }
            // One that was named has to be there.
            Ok(None) if options.devices.is_empty() => {}
            Ok(None) => {
                return Err(format!(
                    "{name} has no RoCEv2 address: give its network device an IP address"
                )
                .into());
            }
            Err(error) => return Err(format!("{name}: {error}").into()),
        }
    }
    if adapters.ids().next().is_none() {
        let remedy = "`rdma link` shows what the kernel has, and `rdma link add NAME type rxe netdev DEVICE` makes one";
        return Err(format!("no RDMA device has a RoCEv2 address: {remedy}").into());
    }
    Ok(adapters)
}

fn host(options: &Options) -> Result<Host, Box<dyn Error>> {
    let mut id: [u8; 8] = sys::random()?;
    // Two bytes of its own and a hardware address. It is never 0 by that.
    id[2] = id[2] & !1 | LOCAL;
    let mut ueids = List::new();
    for ueid in &options.ueids {
        ueids.push(*ueid).map_err(|_| "there are too many UEIDs: 8 at most")?;
    }
    let name = rustix::system::uname();
    Ok(Host {
        peer_id: PeerId(id),
        hostname: Hostname::new(&name.nodename().to_string_lossy()),
        release: Release::V2_1,
        features: FeatureMask(0),
        max_conns: options.max_conns,
        max_links: options.max_links,
        ueids,
        seid: None,
        smcd_v2: false,
    })
}

/// Nobody may read it: that ends nothing.
fn say(what: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{what}");
}

fn tell(event: &Event) {
    match event {
        Event::Established { conn, path, first_contact, .. } => {
            let first = if *first_contact { ", first contact" } else { "" };
            say(format_args!("connection {}: SMC {path:?}{first}", conn.token()));
        }
        other => say(format_args!("{other:?}")),
    }
}
