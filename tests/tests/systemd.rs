//! Services of a real systemd, as Debian ships them, brought under uSMC by `usmc enable`: in namespaces of their own, over a
//! copy-on-write view of this machine's root (`systemd/boot.sh`). Where systemd cannot be started so, the tests say so and end.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use usmc_fake_verbs::fabric::{DIRECTORY, Fabric};
use usmc_tests::fixture::{slowness, tool};
use usmc_tests::ss::{self, Socket};
use usmc_tests::{Fixture, Process, build, is_plain, procfs};

/// `boot.sh`, which takes its control groups down when it is asked to end, also where a test panics.
struct Boot(Process);

impl Drop for Boot {
    fn drop(&mut self) {
        let pid = self.0.pid();
        if !procfs::has_ended(pid) {
            self.0.signal(libc::SIGTERM);
        }
        let until = Instant::now() + Duration::from_secs(5);
        while !procfs::has_ended(pid) && Instant::now() < until {
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

/// A running systemd.
struct Machine {
    /// Dropped before the fixture, which would kill it.
    boot: Boot,
    fixture: Fixture,
    /// Its number here.
    first: String,
}

impl Machine {
    fn boot(name: &str) -> Option<Machine> {
        // Without the library there is nothing to be brought anywhere.
        if is_plain() {
            return None;
        }
        let fixture = Fixture::with_limit(name, Duration::from_secs(120));
        let (usmc, dir) = (build::usmc(), fixture.scratch().join("machine"));
        std::fs::create_dir(&dir).expect("our own directory");
        let mut boot = fixture.plain("sh");
        boot.arg(build::tests_dir().join("systemd/boot.sh")).arg(dir).arg(usmc);
        boot.arg(usmc.with_file_name("libusmc_preload.so"));
        let mut boot = fixture.spawn(boot);
        let told =
            boot.try_line().and_then(|line| line.strip_prefix("first process ").map(str::to_owned));
        let Some(first) = told.filter(|first| !first.is_empty()) else {
            eprintln!("{name}: systemd cannot be started here: {}", boot.errors());
            return None;
        };
        let machine = Machine { boot: Boot(boot), fixture, first };
        let is_up = || {
            let state = machine.output("systemctl is-system-running");
            state.starts_with("running") || state.starts_with("degraded")
        };
        machine.fixture.wait_until("systemd", is_up);
        Some(machine)
    }

    fn command(&self, script: &str) -> Command {
        let mut command = self.fixture.plain("nsenter");
        let spaces = ["--mount", "--pid", "--net", "--uts", "--ipc", "--cgroup", "--root", "--wd"];
        command.args(["--target", &self.first]).args(spaces).args(["sh", "-ec", script]);
        // The machine's own.
        command.env_remove("USMC_ISM_DIR").env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Runs a script, which has to succeed.
    fn run(&self, script: &str) -> String {
        self.fixture.run(self.command(script))
    }

    /// Runs one that may fail, and returns what it prints to either output.
    fn output(&self, script: &str) -> String {
        let out = self.command(script).output().expect("nsenter");
        String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
    }

    /// Connections to a port, at both ends, as `usmc ss` in there shows them.
    fn connections(&self, port: u16) -> Vec<Socket> {
        let all = ss::parse(&self.run("usmc ss --json")).into_iter();
        all.filter(|s| s.local_port() == port || s.peer_port() == port).collect()
    }

    /// What `client` does until it is killed is in shared memory at both ends, on all connections to the port.
    fn assert_smcd(&self, port: u16, client: &str) {
        let load = self.start(client);
        self.until(port, client, |seen| {
            let servers = seen.iter().filter(|s| s.local_port() == port).count();
            servers > 0 && servers * 2 == seen.len() && seen.iter().all(Socket::is_smcd)
        });
        stop(load);
    }

    /// None of them is.
    fn assert_tcp(&self, port: u16, client: &str) {
        let load = self.start(client);
        self.until(port, client, |seen| {
            assert!(seen.iter().all(|s| s.mode == "TCP"), "{seen:#?}");
            seen.iter().map(|s| s.tx_bytes).sum::<u64>() > 50_000
        });
        stop(load);
    }

    /// Waits until the connections of a port are as they should be.
    fn until(&self, port: u16, what: &str, mut is_it: impl FnMut(&[Socket]) -> bool) {
        let until = Instant::now() + Duration::from_secs(20) * slowness();
        loop {
            let seen = self.connections(port);
            if is_it(&seen) {
                return;
            }
            assert!(Instant::now() < until, "{what}: {seen:#?}");
        }
    }

    /// Waits until something listens.
    fn wait_for_port(&self, port: u16) {
        let listens = format!("ss -Hltn sport = :{port}");
        self.fixture.wait_until("a listener", || !self.output(&listens).is_empty());
    }

    /// A service of redis with settings of its own, enabled in the group `all` and started; what was said of it.
    fn redis(&self, name: &str, port: u16, settings: &str) -> String {
        self.run(&format!(
            "cat >/etc/systemd/system/{name}.service <<'E'\n[Service]\nType=exec\n\
             ExecStart=/usr/bin/redis-server --port {port} --save '' --dir /\n{settings}\nE\n\
             systemctl daemon-reload; usmc enable {name} --name all && systemctl start {name}"
        ))
    }

    /// Until it is the user that it changes to: `usmc enable` looks at that.
    fn start_memcached(&self) {
        self.run("systemctl start memcached");
        let user = "ps -o user= -p $(systemctl show memcached -P MainPID)";
        self.fixture.wait_until("memcached", || self.output(user).trim() == "memcache");
    }

    /// Starts a program that goes on until [`stop`].
    fn start(&self, program: &str) -> Process {
        self.fixture.spawn(self.command(&format!("exec {program}")))
    }

    fn end(self) {
        drop(self.boot);
        self.fixture.finish();
    }
}

/// Ends what nsenter(1) has started, and so that itself.
fn stop(mut load: Process) {
    for child in procfs::children(load.pid()) {
        // SAFETY: kill(2) touches no memory of ours; its parent, which we have not reaped, keeps the number.
        unsafe { libc::kill(child, libc::SIGKILL) };
    }
    load.wait();
}

/// What keeps asking redis, or a web server, under uSMC in a group's directory.
fn redis_load(group: &str, port: u16) -> String {
    format!(
        "env USMC_ISM_DIR=/run/usmc/{group} usmc run -- redis-benchmark -p {port} -c 4 -t set,get -l -q"
    )
}

fn web_load(group: &str) -> String {
    format!("env USMC_ISM_DIR=/run/usmc/{group} usmc run -- wrk -t1 -c4 -d60 http://127.0.0.1/")
}

/// All that `usmc enable` may have changed.
const CHANGED: &str = "find /etc/systemd/system /etc/tmpfiles.d /run/usmc | sort; cat /etc/group; stat -c '%a %U %G' /etc/systemd/system";

#[test]
fn debians_services_leave_tcp_and_come_back() {
    let Some(machine) = Machine::boot("debians_services") else { return };
    let before = machine.output(CHANGED);
    machine.run("systemctl start redis-server nginx");
    machine.start_memcached();
    let dry = machine.run("usmc enable redis nginx memcached --name web --dry-run");
    assert!(
        dry.contains("would write /etc/systemd/system/redis-server.service.d/50-usmc.conf"),
        "{dry}"
    );
    assert_eq!(machine.output(CHANGED), before, "a dry run changes nothing");

    let done = machine.run("usmc enable redis nginx memcached --name web");
    let hint = "systemctl restart redis-server.service nginx.service memcached.service";
    assert!(done.contains(hint), "{done}");
    let status = machine.run("usmc status redis-server");
    assert!(status.contains("not started anew"), "{status}");
    let again = machine.run("usmc enable redis nginx memcached --name web --restart");
    assert_eq!(again.matches("50-usmc.conf is as it should be").count(), 3, "{again}");

    machine.assert_smcd(6379, &redis_load("web", 6379));
    // Its user namespace has no other users: they are met by messages.
    let other = format!(
        "setpriv --reuid=www-data --regid=www-data --clear-groups {}",
        redis_load("web", 6379)
    );
    machine.assert_smcd(6379, &other);
    machine.assert_smcd(80, &web_load("web"));
    let status: Value = serde_json::from_str(&machine.run("usmc status --json")).expect("JSON");
    let rows = status.as_array().expect("a list");
    assert_eq!(rows.len(), 3, "{status}");
    for row in rows {
        assert_eq!(
            (&row["library"], &row["problem"]),
            (&Value::Bool(true), &Value::Null),
            "{status}"
        );
    }

    machine.run("usmc disable nginx memcached --restart");
    machine.assert_tcp(80, &web_load("web"));
    machine.assert_smcd(6379, &redis_load("web", 6379));
    machine.run("usmc disable redis --restart");
    machine.assert_tcp(6379, "usmc run -- redis-benchmark -c 4 -t set,get -l -q");
    assert_eq!(machine.output(CHANGED), before, "nothing is left");
    let refused = machine.output("usmc disable redis");
    assert!(refused.contains("redis.service is not enabled"), "{refused}");
    machine.end();
}

/// memcached drops its groups with its rights.
#[test]
fn a_service_that_drops_its_groups_is_served() {
    let Some(machine) = Machine::boot("drops_groups") else { return };
    machine.start_memcached();
    machine.run("usmc enable memcached --restart");
    machine.wait_for_port(11211);
    machine.run(
        "cat >/tmp/ask.py <<'E'\n\
         import socket\n\
         s = socket.create_connection(('127.0.0.1', 11211))\n\
         while True:\n    s.sendall(b'set a 0 0 3\\r\\nabc\\r\\n'); assert s.recv(100) == b'STORED\\r\\n'\n\
         E\n",
    );
    machine.assert_smcd(
        11211,
        "env USMC_ISM_DIR=/run/usmc/default usmc run -- /usr/bin/python3 /tmp/ask.py",
    );
    machine.end();
}

/// A service of redis with settings of its own, which starts and is in shared memory once it is enabled.
#[test]
fn restrictions_are_answered() {
    let Some(machine) = Machine::boot("restrictions") else { return };
    // What its root needs, and the library's directory does not come with it.
    let root = "RootDirectory=/srv/tree\nBindReadOnlyPaths=/usr /lib /lib64 /etc\nMountAPIVFS=yes\n\
                TemporaryFileSystem=/usr/lib/usmc";
    machine.run("mkdir -p /srv/tree/usr /srv/tree/lib /srv/tree/lib64 /srv/tree/etc /srv/tree/run");
    let units = [
        ("dynamic", "DynamicUser=yes"),
        (
            "strict",
            "User=redis\nProtectSystem=strict\nPrivateTmp=yes\nPrivateDevices=yes\nUMask=0077",
        ),
        ("hidden", "User=redis\nTemporaryFileSystem=/run/usmc /usr/lib/usmc"),
        (
            "noexec",
            "User=redis\nNoExecPaths=/\nExecPaths=/usr/bin /usr/lib/x86_64-linux-gnu /usr/lib64",
        ),
        ("families", "User=redis\nRestrictAddressFamilies=AF_INET AF_INET6"),
        (
            "calls",
            "User=redis\nSystemCallFilter=@system-service\nSystemCallFilter=~memfd_create @privileged",
        ),
        ("proc", "User=redis\nProtectProc=invisible\nPrivateUsers=yes"),
        (
            "memory",
            "User=redis\nMemoryDenyWriteExecute=yes\nRestrictSUIDSGID=yes\nLockPersonality=yes\nRemoveIPC=yes",
        ),
        ("root", root),
    ];
    for (at, (name, settings)) in units.iter().enumerate() {
        let port = 7000 + at as u16;
        let said = machine.redis(name, port, settings);
        machine.wait_for_port(port);
        assert!(!said.contains("stays TCP"), "{said}");
        machine.assert_smcd(port, &redis_load("all", port));
        assert_eq!(machine.run(&format!("redis-cli -p {port} ping")).trim(), "PONG", "{name}");
    }
    let said = machine.redis("subset", 7100, "User=redis\nProcSubset=pid");
    machine.wait_for_port(7100);
    assert!(said.contains("to programs of other users it stays TCP"), "{said}");
    machine.assert_tcp(7100, &redis_load("all", 7100));
    let names: Vec<&str> = units.iter().map(|(name, _)| *name).collect();
    machine.run(&format!("usmc disable subset {} --restart", names.join(" ")));
    assert_eq!(machine.output("ls /run/usmc /etc/tmpfiles.d/usmc-all.conf 2>/dev/null"), "");
    machine.end();
}

#[test]
fn the_library_never_keeps_a_service_from_starting() {
    let Some(machine) = Machine::boot("never_keeps") else { return };
    machine.run("systemctl start redis-server && usmc enable redis-server --restart");
    for (what, damage) in [
        ("a directory for everybody", "chmod 1777 /run/usmc/default"),
        ("no directory", "rm -r /run/usmc/default"),
        ("a file in its place", "echo >/run/usmc/default"),
        ("no group", "groupdel usmc-default"),
        ("no library", "mv /usr/lib/usmc /usr/lib/usmc.away"),
    ] {
        machine.run(&format!("{damage}; systemctl reset-failed; systemctl restart redis-server"));
        machine.fixture.wait_until(what, || machine.output("redis-cli ping").trim() == "PONG");
    }
    machine.run("mv /usr/lib/usmc.away /usr/lib/usmc");
    machine.assert_tcp(6379, "usmc run -- redis-benchmark -c 4 -t set,get -l -q");
    let status = machine.run("usmc status");
    assert!(status.contains("usmc enable --name default redis-server.service"), "{status}");
    // As it says; what is in the way has to be removed first.
    machine.run("rm /run/usmc/default; usmc enable redis-server --restart");
    machine.assert_smcd(6379, &redis_load("default", 6379));
    machine.end();
}

#[test]
fn a_filter_that_kills_does_not_kill_for_the_library() {
    let Some(machine) = Machine::boot("filter_kills") else { return };
    machine.run(
        "cat >/srv/call.py <<'E'\n\
         import ctypes\n\
         libc = ctypes.CDLL(None, use_errno=True)\n\
         for number in 438, 260:\n    assert libc.syscall(number, -1, -1, -1, -1, -1) == -1\n    assert ctypes.get_errno() == 1\n\
         E\n\
         cat >/etc/systemd/system/call.service <<'E'\n[Service]\nType=oneshot\nExecStart=/usr/bin/python3 /srv/call.py\n\
         SystemCallFilter=@system-service\nSystemCallFilter=~@privileged\nE\n\
         systemctl daemon-reload",
    );
    let result = || {
        machine.output("systemctl start call");
        machine.run("systemctl show call --property Result,ExecMainStatus --value")
    };
    // SIGSYS, at the first of pidfd_getfd(2) and fchownat(2).
    assert_eq!(result(), "signal\n31");
    machine.run("usmc enable call");
    assert_eq!(result(), "success\n0");
    machine.end();
}

#[test]
fn a_service_that_does_not_start_with_it_starts_without() {
    let Some(machine) = Machine::boot("does_not_start") else { return };
    machine.run(
        "printf '#!/bin/sh\\n[ -z \"$LD_PRELOAD\" ] && exec sleep 1000\\n' >/srv/picky && chmod 755 /srv/picky\n\
         printf '[Service]\\nType=exec\\nExecStartPre=/srv/picky-too\\nExecStart=/srv/picky\\n' >/etc/systemd/system/picky.service\n\
         printf '#!/bin/sh\\n[ -z \"$LD_PRELOAD\" ]\\n' >/srv/picky-too && chmod 755 /srv/picky-too\n\
         systemctl daemon-reload && systemctl start picky",
    );
    let refused = machine.output("usmc enable picky --restart");
    assert!(refused.contains("it runs without"), "{refused}");
    assert_eq!(machine.run("systemctl is-active picky").trim(), "active");
    assert_eq!(machine.output("ls /etc/systemd/system/picky.service.d 2>/dev/null"), "");
    // What comes after the drop-in, and what counts more.
    machine.run(
        "mkdir -p /etc/systemd/system/picky.service.d\n\
         printf '[Service]\\nEnvironment=LD_PRELOAD=/x.so\\n' >/etc/systemd/system/picky.service.d/override.conf",
    );
    let refused = machine.output("systemctl daemon-reload; usmc enable picky");
    assert!(refused.contains("override.conf is read after the drop-in"), "{refused}");
    let refused = machine.output("usmc enable nonesuch");
    assert!(refused.contains("systemd has no unit nonesuch.service"), "{refused}");
    machine.end();
}

/// What `usmc enable` and `usmc disable` could not finish can be done again, or leaves nothing.
#[test]
fn a_failure_leaves_nothing_behind() {
    let Some(machine) = Machine::boot("failure_leaves") else { return };
    // One that does not start with the library, one that does not start anew at all, and one that is well.
    machine.run(
        "for name in picky last well; do\n\
         printf '[Service]\\nType=exec\\nExecStartPre=/srv/%s\\nExecStart=/bin/sleep 1000\\n' $name >/etc/systemd/system/$name.service\n\
         printf '#!/bin/sh\\n' >/srv/$name; chmod 755 /srv/$name; done\n\
         echo '[ -z \"$LD_PRELOAD\" ]' >>/srv/picky\n\
         systemctl daemon-reload && systemctl start picky last well",
    );
    let before = machine.output(CHANGED);
    let refused = machine.output("usmc enable picky --restart");
    assert!(refused.contains("it runs without"), "{refused}");
    assert_eq!(machine.output(CHANGED), before, "no group, no directory");
    // The others are started anew all the same.
    let refused = machine.output("usmc enable picky well --restart");
    assert!(refused.contains("run `systemctl restart well.service`: done"), "{refused}");
    let status = machine.run("usmc status");
    assert!(status.contains("well.service") && !status.contains("picky"), "{status}");
    machine.run("usmc disable well --restart");
    assert_eq!(machine.output(CHANGED), before);
    // A service that does not start any more is disabled, and nothing is left of its group.
    machine.run("usmc enable last --restart; echo false >>/srv/last");
    let refused = machine.output("usmc disable last --restart || echo failed");
    let hint = "journalctl -u last.service";
    assert!(refused.contains(hint) && refused.contains("failed\n"), "{refused}");
    assert_eq!(machine.output(CHANGED), before, "{refused}");
    // What an administrator has made is not taken away.
    machine.run(
        "mkdir -p /run/usmc/mine; touch /run/usmc/mine/file\n\
         echo 'd /run/usmc/mine' >/etc/tmpfiles.d/usmc-mine.conf",
    );
    let made = machine.output(CHANGED);
    let refused = machine.output("usmc enable well --name mine");
    assert!(refused.contains("usmc-mine.conf was not made by usmc"), "{refused}");
    assert_eq!(machine.output(CHANGED), made);
    machine.run("rm /etc/tmpfiles.d/usmc-mine.conf");
    let made = machine.output(CHANGED);
    machine.output("usmc enable picky --name mine --restart");
    assert!(machine.output(CHANGED).contains("/run/usmc/mine/file"), "{made}");
    machine.run("rm -r /run/usmc; rm -f /etc/tmpfiles.d/usmc-mine.conf; groupdel usmc-mine");
    // All is looked at before anything is changed.
    machine.run("mkdir /etc/systemd/system/well.service.d; echo >/etc/systemd/system/well.service.d/50-usmc.conf");
    let before = machine.output(CHANGED);
    let refused = machine.output("usmc enable picky well");
    assert!(refused.contains("was not made by usmc"), "{refused}");
    assert_eq!(machine.output(CHANGED), before, "{refused}");
    machine.end();
}

/// Units that are written as others are not.
#[test]
fn odd_units_are_understood() {
    let Some(machine) = Machine::boot("odd_units") else { return };
    let redis_by = |port: u16, by: &str| {
        format!(
            "Type=exec\\nExecStart={by} /usr/bin/redis-server --port {port} --save \"\" --dir /\\n"
        )
    };
    let redis = |port: u16| redis_by(port, "");
    // A comment in Latin-1 in a unit that is strict; a template whose user is its instance's name; a program that becomes a user without a name; a name
    // with an escape, with a drop-in that makes it strict.
    machine.run(&format!(
        "cd /etc/systemd/system; mkdir 'da\\x2dsh.service.d'\n\
         printf '# Stra\\337e\\n[Service]\\nUser=redis\\nProtectSystem=strict\\n{}' >latin.service\n\
         printf '[Service]\\nUser=%%i\\n{}' >of@.service\n\
         printf '[Service]\\n{}' >number.service\n\
         printf '[Service]\\nUser=redis\\n{}' >'da\\x2dsh.service'\n\
         printf '[Service]\\nProtectSystem=strict\\n' >'da\\x2dsh.service.d/10-strict.conf'\n\
         ln -s /dev/null masked.service; systemctl daemon-reload",
        redis(7201),
        redis(7202),
        redis_by(7203, "/usr/bin/setpriv --reuid=4711 --regid=4711 --clear-groups"),
        redis(7204),
    ));
    for (at, unit) in ["latin", "of@redis", "number --user 4711", "da\\x2dsh"].iter().enumerate() {
        let port = 7201 + at as u16;
        let name = unit.split(' ').next().unwrap_or(unit).replace('\\', "\\\\");
        let unit = unit.replace('\\', "\\\\");
        machine.run(&format!("usmc enable {unit} --name all && systemctl start {name}"));
        machine.wait_for_port(port);
        machine.assert_smcd(port, &redis_load("all", port));
    }
    let refused = machine.output("usmc enable masked");
    assert!(refused.contains("masked.service is masked; unmask it first"), "{refused}");
    let refused = machine.output("usmc enable latin --name agent");
    assert!(refused.contains("--name \"agent\""), "{refused}");

    // Whoever owns a directory around the library can exchange it.
    machine.run(
        "mkdir -p /srv/lib/x; cp /usr/lib/usmc/libusmc_preload.so /srv/lib/x; chown redis /srv/lib",
    );
    let refused = machine.output("USMC_LIBRARY=/srv/lib/x/libusmc_preload.so usmc enable latin");
    assert!(refused.contains("/srv/lib can be changed by others"), "{refused}");

    // Of a template all instances are told, and of an alias its service.
    machine.run("usmc disable 'of@redis' --restart; usmc enable of@ --name all --user redis");
    machine.run("systemctl restart of@redis");
    machine.wait_for_port(7202);
    machine.assert_smcd(7202, &redis_load("all", 7202));
    let status: Value = serde_json::from_str(&machine.run("usmc status of@ --json")).expect("JSON");
    assert_eq!(
        (&status[0]["library"], &status[0]["problem"]),
        (&true.into(), &Value::Null),
        "{status}"
    );
    machine.run("usmc enable redis --name all");
    let status = machine.run("usmc status redis");
    assert!(status.contains("redis-server.service"), "{status}");

    // The library for programs of both classes.
    machine.run(
        "mkdir -p /usr/lib/usmc/lib/x86_64-linux-gnu; ln -s ../../libusmc_preload.so /usr/lib/usmc/lib/x86_64-linux-gnu/\n\
         export USMC_LIBRARY='/usr/lib/usmc/$LIB/libusmc_preload.so'; usmc enable redis --name all; systemctl start redis",
    );
    machine.wait_for_port(6379);
    machine.assert_smcd(6379, &redis_load("all", 6379));
    machine.end();
}

/// The agent's own units, with a device of the fake libibverbs. That alone needs its directory, and mincore(2).
#[test]
fn the_agent_is_started_and_drained() {
    let Some(machine) = Machine::boot("agent") else { return };
    let root = PathBuf::from(format!("/proc/{}/root", machine.first));
    let put = |from: &Path, to: &str| {
        fs::copy(from, root.join(to)).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    };
    put(build::agent(), "usr/lib/usmc/usmc-agent");
    put(build::fake_verbs(), "usr/lib/usmc/libibverbs.so.1");
    for end in ["service", "socket"] {
        let name = format!("usmc-agent.{end}");
        let unit = fs::read_to_string(build::tests_dir().join("../docs/systemd").join(&name));
        // As packages/install.sh has it.
        let unit = unit.expect("the unit").replace("/usr/local/bin", "/usr/bin");
        fs::write(root.join("lib/systemd/system").join(name), unit).expect("our own root");
    }
    machine.run(&format!(
        "mkdir -p /srv/fabric /etc/systemd/system/usmc-agent.service.d\n\
         printf '[Service]\\nEnvironment=USMC_IBVERBS=/usr/lib/usmc/libibverbs.so.1 {DIRECTORY}=/srv/fabric\\n\
         ReadWritePaths=/srv/fabric\\nSystemCallFilter=mincore\\n' >/etc/systemd/system/usmc-agent.service.d/test.conf\n\
         echo 'ueids = [\"HOSTS\"]' >/etc/usmc.toml; systemctl daemon-reload"
    ));
    let fabric = Fabric::create(&root.join("srv/fabric")).expect("our own root");
    fabric.device("rxe0", 1024).expect("a line");
    fabric.gid("rxe0", 1, Ipv4Addr::LOCALHOST.to_ipv6_mapped(), "lo").expect("a line");

    machine.run("systemctl start usmc-agent.socket");
    assert_eq!(machine.run("stat -c '%a %U' /run/usmc/agent").trim(), "666 root");
    machine.run("systemctl start usmc-agent.service");
    // Of another user, whose own directory has no agent.
    let checked = machine.output("setpriv --reuid=redis --regid=redis --clear-groups usmc check");
    assert!(checked.contains("device rxe0 port 1 is ACTIVE"), "{checked}");

    // A connection of two users' programs goes by it.
    let by = |user: &str, program: &str| {
        format!(
            "setpriv --reuid={user} --regid={user} --clear-groups env USMC_PEERS=127.0.0.1 USMC_LOOPBACK=off \
             usmc run -- {program}"
        )
    };
    let server = machine.start(&by("redis", "redis-server --port 7300 --save '' --dir /tmp"));
    machine.wait_for_port(7300);
    let load = machine.start(&by("www-data", "redis-benchmark -p 7300 -c 2 -t set,get -l -q"));
    machine.until(7300, "by RDMA", |seen| seen.len() == 4 && seen.iter().all(|s| s.mode == "SMCR"));
    let groups = machine.run("usmc linkgroup --json");
    assert!(groups.contains("SMCR") && groups.contains("rxe0"), "{groups}");

    // It lets connections end first.
    let state = || machine.output("systemctl show usmc-agent.service -P ActiveState");
    let pid = machine.run("systemctl show usmc-agent.service -P MainPID");
    machine.run("systemctl stop --no-block usmc-agent.service usmc-agent.socket");
    machine.fixture.wait_until("the stop", || state().trim() == "deactivating");
    assert!(machine.connections(7300).iter().any(|s| s.mode == "SMCR"), "it drains");
    stop(load);
    stop(server);
    machine.fixture.wait_until("the agent's end", || state().trim() == "inactive");
    let result = machine.run(&format!(
        "systemctl show usmc-agent.service -P Result; [ ! -e /proc/{} ]",
        pid.trim()
    ));
    assert_eq!(result.trim(), "success");
    assert_eq!(machine.output("ls /run/usmc"), "");
    machine.end();
}

#[test]
fn advice_names_the_services() {
    let Some(machine) = Machine::boot("advice") else { return };
    machine.run("systemctl start redis-server");
    let load = machine.start("redis-benchmark -c 3 -t get -l -q");
    machine.fixture.wait_until("connections", || {
        machine
            .run("ss -Htn state established dport = :6379 | wc -l")
            .trim()
            .parse::<u32>()
            .is_ok_and(|n| n >= 3)
    });
    let told: Value =
        serde_json::from_str(&machine.run("usmc advise --seconds 1 --json")).expect("JSON");
    stop(load);
    let pair = &told["pairs"][0];
    assert_eq!(pair["server"]["service"], "redis-server.service", "{told}");
    assert_eq!(
        (&pair["port"], &pair["client"]["program"]),
        (&6379.into(), &"redis-benchmark".into())
    );
    assert_eq!(pair["connections"], 3, "{told}");
    let number = |key: &str| pair[key].as_u64().expect("a number");
    assert!(number("segments_per_second") > 1000 && number("bytes_per_second") > 10_000, "{told}");
    let wake_ups = number("wake_ups_per_second_at_most");
    assert!(wake_ups > 0 && wake_ups <= number("segments_per_second"), "{told}");
    assert_eq!(pair["commands"][0], "usmc enable redis-server", "{told}");
    assert_eq!(pair["commands"][1], "USMC_ISM_DIR=/run/usmc/default usmc run -- redis-benchmark");
    let text = machine.run("usmc advise --seconds 1");
    assert!(text.contains("no connection") || text.contains("moved nothing"), "{text}");
    machine.end();
}

#[test]
fn nothing_is_left_outside() {
    let Some(machine) = Machine::boot("nothing_left") else { return };
    machine.run("touch /etc/systemd/system/left /dev/shm/left /run/left /tmp/left");
    machine.end();
    let found = tool(
        "find",
        &["/etc/systemd/system", "/dev/shm", "/run", "/tmp", "-maxdepth", "1", "-name", "left"],
    );
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
}
