//! Pods of a real containerd that `usmc nri` brings under uSMC, on a bridge network of its own plugins, with users of their own.
//! Run by `make test-kubernetes` (USMC_TESTS_KUBERNETES=1).

use std::fs;
use std::time::Duration;

use serde_json::Value;
use usmc_tests::node::{self, Node, Pod, Running};
use usmc_tests::ss::Socket;
use usmc_tests::{Fixture, Process, build};

/// Where redis listens. Each pod has a network of its own.
const PORT: &str = "7777";
const LISTENS: u16 = 7777;

/// Clients that ask for as long as they live, of which each connection is in one of these states.
const SERVER: [&str; 9] =
    ["redis-server", "--port", PORT, "--save", "", "--protected-mode", "no", "--dir", "/tmp"];

/// root's entry points change their user, as that of redis' image does.
const AS_REDIS: [&str; 6] = ["setpriv", "--reuid", "999", "--regid", "999", "--clear-groups"];

/// A node with the plugin.
struct Plugged<'a> {
    node: Node<'a>,
    plugin: Process,
    fixture: &'a Fixture,
}

impl<'a> Plugged<'a> {
    fn start(fixture: &'a Fixture) -> Plugged<'a> {
        let node = Node::start(fixture);
        node.run(build::usmc(), &["export", "--quiet", "/opt/usmc"]);
        let plugin = plugin(fixture, &node, "/run/nri/nri.sock");
        let plugged = Plugged { node, plugin, fixture };
        plugged.list("shop");
        plugged.until_ready(true);
        plugged
    }

    /// Writes the list of namespaces.
    fn list(&self, namespaces: &str) {
        fs::write(self.node.root().join("run/namespaces"), namespaces)
            .expect("the node's own file");
    }

    fn until_ready(&self, is_ready: bool) {
        self.fixture.wait_until("the plugin's registration", || {
            let mut probe = self.node.command(build::usmc());
            probe.args(["nri", "--ready"]);
            probe.status().expect("nsenter").success() == is_ready
        });
    }

    fn server(&self, pod: &Pod<'_>) -> Running {
        let command = [&AS_REDIS[..], &SERVER].concat();
        let running = self.node.start_pod(&Pod { command: &command, ..pod.clone() });
        self.fixture.wait_until("the server", || {
            let mut ask = self.node.command("redis-cli");
            ask.args(["-h", &running.address, "-p", PORT, "ping"]);
            ask.output().is_ok_and(|out| out.stdout.starts_with(b"PONG"))
        });
        running
    }

    fn client(&self, pod: &Pod<'_>, server: &Running) -> Running {
        let load = ["redis-benchmark", "-h", &server.address, "-p", PORT, "-c", "3"];
        let command = [&load[..], &["-t", "get", "-l", "-q"]].concat();
        self.node.start_pod(&Pod { command: &command, ..pod.clone() })
    }

    /// What containerd has made of the adjustment.
    fn has_library(&self, running: &Running) -> bool {
        let spec = &self.node.inspect(running)["info"]["runtimeSpec"];
        let env = text(&spec["process"]["env"]);
        let mounts = text(&spec["mounts"]);
        let has = [
            env.contains("LD_PRELOAD=/usmc/"),
            env.contains("USMC_ISM_DIR=/usmc-ism"),
            mounts.contains("\"/usmc\""),
            mounts.contains("\"/usmc-ism\""),
        ];
        assert!(has.iter().all(|one| *one == has[0]), "all of it or nothing: {spec}");
        has[0]
    }

    /// Connections between two pods, at both ends.
    fn between(&self, server: &Running, client: &Running) -> Vec<Socket> {
        let of = |socket: &Socket, one: &Running| {
            let is_it =
                |end: &str| end.rsplit_once(':').is_some_and(|(host, _)| host == one.address);
            is_it(&socket.local) || is_it(&socket.peer)
        };
        let all = self.fixture.connections(LISTENS).into_iter();
        all.filter(|socket| of(socket, server) && of(socket, client)).collect()
    }

    /// All three connections are in shared memory, at both ends.
    fn until_smcd(&self, server: &Running, client: &Running) {
        let mut last = Vec::new();
        self.fixture.wait_until("SMC-D at both ends", || {
            last = self.between(server, client);
            last.len() == 6 && last.iter().all(Socket::is_smcd)
        });
        assert!(last.iter().all(|socket| socket.tx_bytes > 0), "{last:#?}");
    }
}

fn plugin(fixture: &Fixture, node: &Node<'_>, socket: &str) -> Process {
    let mut plugin = node.command(build::usmc());
    plugin.args(["nri", "--namespaces", "/run/namespaces", "--socket", socket]);
    fixture.spawn(plugin)
}

fn text(value: &Value) -> String {
    value.to_string()
}

#[test]
fn pods_of_a_namespace_share_memory_and_others_stay_as_they_are() {
    if !node::is_wanted() {
        return;
    }
    let fixture = Fixture::with_limit("pods", Duration::from_secs(180));
    let here = Plugged::start(&fixture);
    let shop = Pod { namespace: "shop", ..Pod::default() };

    // root's entry point, which becomes user 999, and user 1000: neither is in any group of the other's.
    let server = here.server(&Pod { name: "cache", ..shop.clone() });
    let app = here.client(&Pod { name: "app", user: Some(1000), ..shop.clone() }, &server);
    assert!(here.has_library(&server) && here.has_library(&app));
    here.until_smcd(&server, &app);

    // The way out.
    let out = Pod { name: "out", labels: &[("usmc.io/enabled", "false")], ..shop.clone() };
    let out = here.client(&out, &server);
    assert!(!here.has_library(&out));
    fixture.wait_until("the reason at the server", || {
        let seen = here.between(&server, &out);
        assert!(seen.iter().all(|s| s.mode == "TCP"), "{seen:#?}");
        seen.len() == 3 && seen.iter().all(|s| !s.fallback_reason.is_empty())
    });
    here.node.end_pod(out);
    here.node.end_pod(app);

    // A namespace that nobody has listed, and a pod of it that has the label; then the list changes.
    let web = Pod { namespace: "web", command: &["sleep", "600"], ..Pod::default() };
    let plain = here.node.start_pod(&Pod { name: "plain", ..web.clone() });
    assert!(!here.has_library(&plain));
    let labels = [("usmc.io/enabled", "true")];
    let labelled = here.node.start_pod(&Pod { name: "labelled", labels: &labels, ..web.clone() });
    assert!(here.has_library(&labelled));
    here.list("shop\nweb\n");
    let system = Pod { namespace: "kube-system", labels: &labels, ..web.clone() };
    let system = here.node.start_pod(&Pod { name: "system", ..system });
    assert!(!here.has_library(&system));

    // Namespaces share no memory, and what a pod preloads itself stays.
    let own = [("LD_PRELOAD", "/lib/x86_64-linux-gnu/libc.so.6")];
    let other = Pod { name: "other", namespace: "web", env: &own, ..Pod::default() };
    let other = here.client(&other, &server);
    assert!(here.has_library(&other));
    let env = text(&here.node.inspect(&other)["info"]["runtimeSpec"]["process"]["env"]);
    assert!(env.contains("libusmc_preload.so:/lib/x86_64-linux-gnu/libc.so.6"), "{env}");
    fixture.wait_until("connections between namespaces", || {
        // The client's own address is not known of one that stays TCP.
        let seen = fixture.connections(LISTENS);
        assert!(!seen.iter().any(Socket::is_smcd), "{seen:#?}");
        seen.len() == 6 && seen.iter().all(|s| !s.fallback_reason.is_empty())
    });
    here.plugin_ends();
    fixture.finish();
}

#[test]
fn pods_start_whatever_becomes_of_the_plugin_and_of_containerd() {
    if !node::is_wanted() {
        return;
    }
    let fixture = Fixture::with_limit("pods without", Duration::from_secs(180));
    let mut here = Plugged::start(&fixture);
    let shop = Pod { namespace: "shop", command: &["sleep", "600"], ..Pod::default() };
    let first = here.node.start_pod(&Pod { name: "first", ..shop.clone() });
    assert!(here.has_library(&first));

    // Killed, it is no part of anything; a pod that had the library goes on.
    node::kill(here.plugin);
    here.plugin = plugin(&fixture, &here.node, "/run/nonexistent.sock");
    here.until_ready(false);
    let second = here.node.start_pod(&Pod { name: "second", ..shop.clone() });
    assert!(!here.has_library(&second));
    node::kill(here.plugin);

    // One that stands still: containerd waits for two seconds, and goes on without it.
    here.plugin = plugin(&fixture, &here.node, "/run/nri/nri.sock");
    here.until_ready(true);
    node::signal(&here.plugin, libc::SIGSTOP);
    let third = here.node.start_pod(&Pod { name: "third", ..shop.clone() });
    assert!(!here.has_library(&third));
    node::signal(&here.plugin, libc::SIGCONT);
    here.until_ready(true);
    let fourth = here.node.start_pod(&Pod { name: "fourth", ..shop.clone() });
    assert!(here.has_library(&fourth));

    here.node.kill_containerd();
    here.until_ready(false);
    here.node.start_containerd();
    here.until_ready(true);
    let fifth = here.node.start_pod(&Pod { name: "fifth", ..shop.clone() });
    assert!(here.has_library(&fifth) && here.has_library(&first));

    // Nothing to be given: pods start without.
    fs::remove_file(here.node.root().join("opt/usmc/libusmc_preload.so")).expect("the library");
    let sixth = here.node.start_pod(&Pod { name: "sixth", ..shop.clone() });
    assert!(!here.has_library(&sixth));
    assert!(here.plugin.errors().contains("usmc export"), "{}", here.plugin.errors());
    here.plugin_ends();
    fixture.finish();
}

impl Plugged<'_> {
    /// Ends the plugin as a kubelet does, and the node.
    fn plugin_ends(mut self) {
        node::signal(&self.plugin, libc::SIGTERM);
        assert!(self.plugin.wait().success(), "{}", self.plugin.errors());
        self.node.end();
    }
}

/// Makes `kubernetes/frames.runtime` and `kubernetes/frames.plugin` anew, of which `nri.rs` plays the former:
/// `cargo test -p usmc-tests --test kubernetes -- --ignored`.
#[test]
#[ignore = "writes files of the repository"]
fn frames_are_recorded() {
    let fixture = Fixture::with_limit("frames", Duration::from_secs(120));
    let node = Node::start(&fixture);
    node.run(build::usmc(), &["export", "--quiet", "/opt/usmc"]);
    fs::write(node.root().join("run/namespaces"), "shop\n").expect("the node's own file");
    let at = |name: &str| fixture.scratch().join(name).to_string_lossy().into_owned();
    let mut proxy = node.command("socat");
    proxy.args(["-r", &at("plugin"), "-R", &at("runtime")]);
    proxy.args(["UNIX-LISTEN:/run/recorded.sock", "UNIX-CONNECT:/run/nri/nri.sock"]);
    let proxy = fixture.spawn(proxy);
    let socket = node.root().join("run/recorded.sock");
    fixture.wait_until("socat", || socket.exists());
    let plugin = plugin(&fixture, &node, "/run/recorded.sock");
    fixture.wait_until("registration", || plugin.errors().contains("registered"));
    let shop = Pod { namespace: "shop", command: &["sleep", "600"], ..Pod::default() };
    let jemalloc = [("LD_PRELOAD", "/lib/libjemalloc.so.2")];
    node.start_pod(&Pod { name: "root", env: &jemalloc, ..shop.clone() });
    node.start_pod(&Pod { name: "user", user: Some(1000), ..shop.clone() });
    let labels = [("usmc.io/enabled", "false")];
    node.start_pod(&Pod { name: "out", labels: &labels, ..shop.clone() });
    node.start_pod(&Pod { name: "other", namespace: "web", ..shop.clone() });
    node::kill(plugin);
    node::kill(proxy);
    for name in ["runtime", "plugin"] {
        let to = build::tests_dir().join(format!("kubernetes/frames.{name}"));
        fs::copy(at(name), to).expect("a file of the repository");
    }
    node.end();
    fixture.finish();
}
