//! Containers of Docker (Debian's docker.io) on a bridge network: with users, PID, mount and network namespaces of
//! their own, they leave TCP where they share the ISM directory by a volume, and nowhere else.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use usmc_tests::docker::Docker;
use usmc_tests::{Fixture, is_plain};

const GROUP: u32 = 61_000;

/// The beginning of a command in a new container of this user; `device` is its ISM directory.
fn container(name: &str, user: u32, device: Option<&Path>) -> Vec<String> {
    let words = |text: String| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let mut args = words(format!("--name {name} --network net --user {user}:{user}"));
    args.extend(words(format!("--group-add {GROUP} --tmpfs /data:mode=1777 --workdir /data")));
    if let Some(dir) = device {
        args.extend(words(format!("-v {}:/ism -e USMC_ISM_DIR=/ism", dir.display())));
    }
    args.push("usmc".to_owned());
    if !is_plain() {
        args.extend(["/usmc/usmc", "run", "--"].map(str::to_owned));
    }
    args
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// redis in one container, its clients in others: what `check` finds while the benchmark runs.
fn redis_in_containers(name: &str, shared: bool, check: impl Fn(&Fixture, u16)) {
    let fixture = Fixture::with_limit(name, Duration::from_secs(120));
    let port = fixture.port();
    let number = port.to_string();
    let dir = fixture.ism_dir();
    std::os::unix::fs::chown(dir, None, Some(GROUP)).expect("we are root");
    fs::set_permissions(dir, fs::Permissions::from_mode(0o3770)).expect("our own directory");
    let docker = Docker::start(&fixture);
    docker.import();
    docker.run(&["network", "create", "--driver", "bridge", "net"]);

    let server = container("server", 61_001, Some(dir));
    let redis = ["redis-server", "--port", &number, "--save", "", "--protected-mode", "no"];
    docker.run(&[&["run", "--detach"], &strs(&server)[..], &redis].concat());
    fixture.wait_until("redis", || docker.run(&["logs", "server"]).contains("Ready to accept"));

    let client = container("client", 61_002, Some(dir).filter(|_| shared));
    let load = ["redis-benchmark", "-h", "server", "-p", &number, "-q", "-t", "set,get"];
    let much = ["-n", "400000", "-c", "20", "-d", "1024", "-r", "1000"];
    let mut load = fixture
        .spawn(docker.command(&[&["run", "--rm"], &strs(&client)[..], &load, &much].concat()));
    check(&fixture, port);
    let out = load.succeed();
    assert!(!out.to_lowercase().contains("error"), "{out}");
    assert!(out.contains("SET: ") && out.contains("GET: "), "{out}");

    let cli = container("cli", 61_003, Some(dir).filter(|_| shared));
    let ask = ["redis-cli", "-h", "server", "-p", &number, "strlen", "key:000000000007"];
    assert_eq!(docker.run(&[&["run", "--rm"], &strs(&cli)[..], &ask].concat()).trim(), "1024");
    docker.run(&["rm", "--force", "server"]);
    docker.run(&["network", "rm", "net"]);
    docker.end();
    fixture.finish();
}

#[test]
fn containers_that_share_the_device_use_smcd() {
    redis_in_containers("containers", true, |fixture, port| {
        if is_plain() {
            return;
        }
        let mut last = Vec::new();
        fixture.wait_until("SMC-D at both ends", || {
            let seen = fixture.connections(port);
            if !seen.is_empty() {
                last = seen;
            }
            let smcd = |server: bool| {
                last.iter().any(|s| s.is_smcd() && (s.local_port() == port) == server)
            };
            smcd(true) && smcd(false)
        });
    });
}

#[test]
fn containers_that_do_not_share_it_stay_on_tcp() {
    redis_in_containers("containers apart", false, |fixture, port| {
        if is_plain() {
            return;
        }
        fixture.wait_until("the reason", || {
            let seen = fixture.connections(port);
            assert!(!seen.iter().any(|s| s.is_smcd()), "{seen:#?}");
            seen.iter().any(|s| s.fallback_reason == "peer is not under uSMC on this device")
        });
    });
}
