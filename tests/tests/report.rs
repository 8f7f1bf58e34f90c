//! `usmc report`: what is in the bundle, and what is not.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use usmc_tests::{Fixture, Process, build};

const SECRETS: [&str; 3] = ["argument-4711-secret", "variable-4712-secret", "payload-4713-secret"];

fn redis(fixture: &Fixture, port: u16) -> Process {
    let mut command = fixture.command("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""]);
    command.args(["--dir", &fixture.scratch().to_string_lossy(), "--daemonize", "no"]);
    command.args(["--requirepass", SECRETS[0]]).env("DATABASE_PASSWORD", SECRETS[1]);
    let mut server = fixture.spawn(command);
    while !server.line().contains("Ready to accept connections") {}
    server
}

/// The members of a bundle, which tar(1) unpacks.
fn unpack(fixture: &Fixture, bundle: &Path) -> BTreeMap<String, Vec<u8>> {
    let dir = fixture.scratch().join("unpacked");
    fs::create_dir(&dir).expect("our own directory");
    let mut tar = fixture.plain("tar");
    tar.arg("-xzf").arg(bundle).arg("-C").arg(&dir);
    fixture.run(tar);
    let mut found = BTreeMap::new();
    let mut dirs = vec![dir.clone()];
    while let Some(next) = dirs.pop() {
        for entry in fs::read_dir(next).expect("a directory").flatten() {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            let name = path.strip_prefix(dir.join("usmc-report")).expect("one top directory");
            let name = name.display().to_string();
            found.insert(name, fs::read(&path).expect("a member"));
        }
    }
    found
}

/// Each member with a text that it has to have.
fn expected(fixture: &Fixture, port: u16, [pid, client]: [i32; 2]) -> Vec<(String, String)> {
    let dir = fixture.ism_dir().display().to_string();
    let of_process = |name: &str| format!("processes/{pid}-redis-server/{name}");
    let said = [
        ("README", "It does not hold"),
        ("usmc/check.txt", "SMC-D works here"),
        ("usmc/ss.json", "\"comm\":\"redis-server\""),
        ("usmc/stats.json", "smc_connections"),
        ("usmc/fallback-reasons.txt", "TCP fallback"),
        ("usmc/device.json", "\"type\": \"loopback\""),
        ("usmc/linkgroup.json", "\"mode\": \"SMCD\""),
        ("usmc/links.json", "["),
        ("usmc/regions.txt", ""),
        ("usmc/ebpf.txt", ""),
        ("usmc/versions.txt", "libusmc_preload.so"),
        ("usmc/environment.txt", "USMC_ISM_DIR="),
        ("system/os-release", "ID="),
        ("system/kernel", "Linux version"),
        ("system/sysctl.txt", "/proc/sys/net/ipv4/tcp_rmem: "),
        ("system/sysctl.txt", "/proc/sys/net/ipv4/tcp_fastopen: "),
        ("system/limits", "Max open files"),
        ("system/cpu.txt", "/sys/devices/system/cpu/online: "),
        ("system/cgroup.txt", ":"),
        ("system/mounts.txt", "tmpfs"),
        ("system/modules.txt", ""),
        ("system/meminfo", "MemTotal:"),
        ("processes/README", "processes under uSMC have sockets"),
    ];
    let of_it = [
        ("name", "redis-server".to_owned()),
        ("status", format!("Pid:\t{pid}")),
        ("limits", "Max open files".to_owned()),
        ("maps", "libusmc_preload.so".to_owned()),
        ("maps", "libc.so.6".to_owned()),
        ("cgroup", ":".to_owned()),
        ("sockets.json", format!("127.0.0.1:{port}")),
    ];
    let said = said.map(|(name, text)| (name.to_owned(), text.to_owned()));
    let of_it = of_it.map(|(name, text)| (of_process(name), text));
    let listing = ["system/ism-directories.txt", "usmc/configuration.txt"];
    let listing = listing.map(|name| (name.to_owned(), dir.clone()));
    // The server writes its title over its own.
    let environment =
        (format!("processes/{client}-redis-cli/environment"), format!("USMC_ISM_DIR={dir}\n"));
    said.into_iter().chain(of_it).chain(listing).chain([environment]).collect()
}

#[test]
fn the_bundle_has_what_it_says_and_no_secret() {
    let fixture = Fixture::new("report");
    let port = fixture.port();
    let mut server = redis(&fixture, port);
    let mut command = fixture.command("redis-cli");
    command.args(["-p", &port.to_string(), "-a", SECRETS[0], "--no-auth-warning"]);
    command.env("DATABASE_PASSWORD", SECRETS[1]);
    let mut client = fixture.spawn(command);
    for _ in 0..50 {
        client.say(&format!("set key {}", SECRETS[2]));
        assert_eq!(client.line(), "OK");
    }
    fixture.assert_serves_smcd(port);
    let bundle = fixture.scratch().join("report.tar.gz");
    let report = |args: &[&str]| {
        let mut command = fixture.plain(build::usmc());
        command.arg("report").args(args).env("SESSION_TOKEN", SECRETS[1]);
        fixture.spawn(command)
    };
    let listed = report(&["--list"]).succeed_lines();
    assert!(!bundle.exists());
    let path = bundle.to_string_lossy();
    report(&["-o", &path]).succeed();
    let mode = fs::metadata(&bundle).expect("the bundle").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // It stays what it is.
    let mut second = report(&["-o", &path]);
    assert_eq!(second.wait().code(), Some(1));
    assert!(second.errors().contains("name another file by -o"), "{}", second.errors());

    let found = unpack(&fixture, &bundle);
    for (name, text) in expected(&fixture, port, [server.pid(), client.pid()]) {
        let content = found.get(&name).unwrap_or_else(|| panic!("no {name}"));
        let content = String::from_utf8_lossy(content);
        assert!(content.contains(&text), "{name} without {text:?}: {content}");
    }
    // Others' processes come and go.
    let is_ours = |name: &&String| {
        let pid = name.strip_prefix("processes/").and_then(|rest| rest.split('-').next());
        let pid = pid.and_then(|pid| pid.parse::<i32>().ok());
        **name != "README" && pid.is_none_or(|pid| [server.pid(), client.pid()].contains(&pid))
    };
    for name in found.keys().filter(is_ours) {
        assert!(listed.iter().any(|line| line.starts_with(&format!("{name}: "))), "{name}");
    }
    for (name, content) in &found {
        for secret in SECRETS {
            let has = content.windows(secret.len()).any(|part| part == secret.as_bytes());
            assert!(!has, "{secret} is in {name}");
        }
    }
    // The client has them: they could have been found.
    for (file, secret) in [("cmdline", SECRETS[0]), ("environ", SECRETS[1])] {
        let content = fs::read(format!("/proc/{}/{file}", client.pid())).expect("its own user's");
        assert!(content.windows(secret.len()).any(|part| part == secret.as_bytes()), "{file}");
    }
    client.succeed();
    assert!(server.terminate().success());
    drop(server);
    fixture.finish();
}

/// Lines of a process that succeeds.
trait Lines {
    fn succeed_lines(self) -> Vec<String>;
}

impl Lines for Process {
    fn succeed_lines(mut self) -> Vec<String> {
        self.succeed().lines().map(str::to_owned).collect()
    }
}

/// What cannot be had is told, and the rest is there: no library, and a configuration that is refused.
#[test]
fn what_cannot_be_had_is_told() {
    let fixture = Fixture::new("report failures");
    let bundle = fixture.scratch().join("report.tar.gz");
    let mut command = fixture.plain(build::usmc());
    command.args(["report", "-o"]).arg(&bundle);
    command.env("USMC_RING_SIZE", "3").env("USMC_LIBRARY", "/nonexistent/lib.so");
    let mut report = fixture.spawn(command);
    report.succeed();
    assert!(report.errors().contains("could not be had"), "{}", report.errors());
    let found = unpack(&fixture, &bundle);
    let text = |name: &str| String::from_utf8_lossy(&found[name]).into_owned();
    assert!(text("usmc/configuration.txt").contains("USMC_RING_SIZE"));
    assert!(text("README").contains("usmc/configuration.txt: values in effect: FAILED: "));
    assert!(text("usmc/versions.txt").contains("there is no file /nonexistent/lib.so"));
    assert!(text("system/kernel").contains("Linux version"));
    fixture.finish();
}
