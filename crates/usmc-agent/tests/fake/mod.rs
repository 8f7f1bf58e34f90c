//! Hosts whose devices are the fake library's, in a fabric of the test program's.

use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use smc_proto::handshake::Host as Identity;
use smc_proto::ids::{Eid, PeerId};
use smc_proto::list::List;
use smc_proto::wire::clc::{FeatureMask, Hostname, Release};
use usmc_agent::adapter::Adapter;
use usmc_agent::nic::Adapters;
use usmc_fake_verbs::fabric::{DIRECTORY, Fabric};
use usmc_rdma::Config;
use usmc_rdma::nic::DeviceId;
use usmc_verbs::Library;

/// The fabric of this program: each test has devices of its own in it.
pub(crate) fn fabric() -> &'static (Fabric, Library) {
    static FABRIC: OnceLock<(Fabric, Library)> = OnceLock::new();
    FABRIC.get_or_init(|| {
        let dir =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("agent-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        let fabric = Fabric::create(&dir).expect("a directory");
        // SAFETY: the fake reads it when it is opened, below; no other thread reads the environment meanwhile.
        unsafe { std::env::set_var(DIRECTORY, &dir) };
        let beside =
            std::env::current_exe().expect("this program").with_file_name("libusmc_fake_verbs.so");
        // SAFETY: a library of this workspace, with the interface of libibverbs.
        let library = unsafe { Library::open_file(&beside) }.expect("the fake library");
        (fabric, library)
    })
}

/// A number of a test's own.
pub(crate) fn next_test() -> u8 {
    static NEXT: AtomicU8 = AtomicU8::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The device's name, by test and host.
pub(crate) fn device(test: u8, host: u8) -> String {
    format!("t{test}h{host}")
}

/// A host's address, as its device has it.
pub(crate) fn address(test: u8, host: u8) -> IpAddr {
    Ipv4Addr::new(10, 1, test, host + 1).into()
}

/// A device of a test, with the address of that host.
pub(crate) fn adapter(test: u8, host: u8) -> Adapter {
    let (fabric, library) = fabric();
    let (name, address) = (device(test, host), address(test, host));
    let IpAddr::V4(v4) = address else { panic!("{address}") };
    fabric.device(&name, 1024).expect("a device");
    fabric.gid(&name, 1, v4.to_ipv6_mapped(), "lo").expect("an address");
    Adapter::open(*library, address).expect("a device").expect("one with the address")
}

/// What a host of a test says of itself, and its one device.
pub(crate) fn host(test: u8, host: u8) -> (Config, Adapters) {
    let mut adapters = Adapters::default();
    let id = adapters.add(adapter(test, host));
    assert_eq!(id, DeviceId(0));
    let mut ueids = List::new();
    ueids.push(Eid::user("AGENT").expect("an EID")).expect("room");
    let identity = Identity {
        peer_id: PeerId([7, test, 2, 0, 0, 0, 0, host + 1]),
        hostname: Hostname::new("agent"),
        release: Release::V2_1,
        features: FeatureMask(0),
        max_conns: 255,
        max_links: 1,
        ueids,
        seid: None,
        smcd_v2: false,
    };
    let config = Config {
        host: identity,
        devices: vec![DeviceId(0)],
        first_token: 5 * u32::from(host),
        test_interval: Duration::from_secs(30),
    };
    (config, adapters)
}
