//! Pods of a real containerd that `usmc nri` brings under uSMC, on a bridge network of its own plugins, with users of their own.
//! Run by `make test-kubernetes` (USMC_TESTS_KUBERNETES=1).

use std::fs;
use std::time::Duration;

use serde_json::Value;
use usmc_tests::api_server::ApiServer;
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
    pods: Pods<'a>,
    plugin: Process,
}

/// A node whose pods have redis.
struct Pods<'a> {
    node: Node<'a>,
    fixture: &'a Fixture,
}

impl<'a> std::ops::Deref for Plugged<'a> {
    type Target = Pods<'a>;

    fn deref(&self) -> &Pods<'a> {
        &self.pods
    }
}

impl<'a> Plugged<'a> {
    fn start(fixture: &'a Fixture) -> Plugged<'a> {
        let node = Node::start(fixture);
        node.run(build::usmc(), &["export", "--quiet", "/opt/usmc"]);
        let plugin = plugin(fixture, &node, "/run/nri/nri.sock");
        let plugged = Plugged { pods: Pods { node, fixture }, plugin };
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
}

impl Pods<'_> {
    fn end(self) {
        self.node.end();
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
    node::kill(&mut here.plugin);
    here.plugin = plugin(&fixture, &here.node, "/run/nonexistent.sock");
    here.until_ready(false);
    let second = here.node.start_pod(&Pod { name: "second", ..shop.clone() });
    assert!(!here.has_library(&second));
    node::kill(&mut here.plugin);

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

    here.pods.node.kill_containerd();
    here.until_ready(false);
    here.pods.node.start_containerd();
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

/// What `usmc` says to a cluster; with whether it succeeded.
fn usmc(api: &ApiServer<'_>, args: &[&str]) -> (bool, String) {
    let out = api.command(build::usmc()).args(args).output().expect("nsenter");
    let said = [out.stdout, out.stderr].concat();
    (out.status.success(), String::from_utf8_lossy(&said).into_owned())
}

fn object(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The list as a kubelet mounts it.
fn mount_list(node: &Node<'_>, api: &ApiServer<'_>) {
    let map =
        object(&api.kubectl(&["-n", "usmc-system", "get", "configmap", "usmc", "-o", "json"]));
    let file = node.root().join("run/configmap/namespaces");
    node.run("mkdir", &["-p", "/run/configmap"]);
    fs::write(file, map["data"]["namespaces"].as_str().unwrap_or_default())
        .expect("the node's own");
}

#[test]
fn the_manifests_are_taken_and_do_what_they_say() {
    if !node::is_wanted() {
        return;
    }
    let fixture = Fixture::with_limit("manifests", Duration::from_secs(180));
    let node = Node::start(&fixture);
    let api = ApiServer::start(&fixture, &node);
    let dir = build::tests_dir().join("../packages/kubernetes");
    let part = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let usmc = |args: &[&str]| usmc(&api, args);

    let (done, said) = usmc(&["enable", "--kubernetes", "shop"]);
    assert!(!done && said.contains("kubectl apply -k packages/kubernetes/base"), "{said}");
    let apply = |path: &str| api.kubectl(&["apply", "--validate=strict", "-k", path]);
    api.kubectl(&["create", "namespace", "shop"]);
    apply(&part("example"));
    let said = apply(&part("base"));
    assert!(said.contains("daemonset.apps/usmc configured"), "without-nri is taken back: {said}");
    let overlay = fixture.scratch().join("overlay");
    fs::create_dir(&overlay).expect("our own directory");
    // kustomize wants them relative.
    std::os::unix::fs::symlink(&dir, fixture.scratch().join("kubernetes")).expect("our own link");
    let up = |name: &str| {
        let real = fs::canonicalize(dir.join(name)).expect("a directory");
        format!(
            "{}{}",
            "../".repeat(overlay.components().count() - 1),
            &real.to_string_lossy()[1..]
        )
    };
    let text = format!("resources: [{}]\ncomponents: [{}]\n", up("base"), up("tcp-option"));
    fs::write(overlay.join("kustomization.yaml"), text).expect("our own file");
    api.kubectl(&[
        "apply",
        "--validate=strict",
        "--dry-run=server",
        "-k",
        &overlay.to_string_lossy(),
    ]);

    // The command does what it says, only that, and undoes it.
    let map = || {
        api.kubectl(&["-n", "usmc-system", "get", "configmap", "usmc", "-o", "jsonpath={.data}"])
    };
    let cache =
        || object(&api.kubectl(&["-n", "shop", "get", "deployment", "cache", "-o", "json"]));
    let (map_before, cache_before) = (map(), cache()["spec"].clone());
    let both = ["--kubernetes", "web", "--kubernetes", "shop/deploy/cache"];
    let (done, said) = usmc(&[&["enable"], &both[..]].concat());
    assert!(!done && said.contains("there is no namespace web"), "{said}");
    api.kubectl(&["create", "namespace", "web"]);
    let (done, said) = usmc(&[&["enable", "--dry-run"], &both[..]].concat());
    assert!(
        done && said.contains("would run `kubectl --namespace shop patch deployment"),
        "{said}"
    );
    assert_eq!((map(), cache()["spec"].clone()), (map_before, cache_before.clone()));
    assert!(usmc(&[&["enable"], &both[..]].concat()).0);
    let label = &cache()["spec"]["template"]["metadata"]["labels"]["usmc.io/enabled"].clone();
    assert_eq!(label, "true");
    assert_eq!(map(), "{\"namespaces\":\"web\\n\"}");
    let status = object(&usmc(&["status", "--kubernetes", "--json"]).1);
    let rows: Vec<&str> = status["enabled"]
        .as_array()
        .expect("rows")
        .iter()
        .filter_map(|row| row["name"].as_str())
        .collect();
    assert_eq!(rows, ["web", "cache"], "{status}");
    apply(&part("base"));
    assert!(map().contains("web"), "applying it again leaves the list alone");
    assert!(usmc(&[&["disable"], &both[..]].concat()).0);
    assert_eq!(
        (map(), cache()["spec"].clone()),
        ("{\"namespaces\":\"\"}".to_owned(), cache_before)
    );
    usmc(&["enable", "--kubernetes", "shop"]);
    let (done, said) = usmc(&["disable", "--kubernetes", "web"]);
    assert!(!done && said.contains("web is not enabled"), "{said}");
    let (done, said) = usmc(&["enable", "--kubernetes", "kube-system"]);
    assert!(!done && said.contains("left alone"), "{said}");

    // What the DaemonSet says is run as it says, with its rights and no more.
    node.import_usmc("0.1.0");
    mount_list(&node, &api);
    let set =
        object(&api.kubectl(&["-n", "usmc-system", "get", "daemonset", "usmc", "-o", "json"]));
    let template = &set["spec"]["template"];
    let (address, ids) = node.start_template("usmc", template);
    let nri = template["spec"]["containers"].as_array().expect("containers");
    let nri = nri.iter().find(|one| one["name"] == "nri").expect("a plugin");
    let probe = nri["readinessProbe"]["exec"]["command"].as_array().expect("a command");
    let probe: Vec<&str> = probe.iter().filter_map(Value::as_str).collect();
    fixture.wait_until("readiness", || {
        let config = fixture.scratch().join("crictl.yaml");
        let mut exec = node.command("crictl");
        exec.arg("--config").arg(config).args(["exec", "--sync", &ids["nri"]]).args(&probe);
        exec.output().is_ok_and(|out| out.status.success())
    });
    // Nothing on a node needs it.
    api.end();
    let shop = Pod { namespace: "shop", ..Pod::default() };
    let here = Pods { node, fixture: &fixture };
    let server = here.server(&Pod { name: "cache", ..shop.clone() });
    let app = here.client(&Pod { name: "app", user: Some(1000), ..shop.clone() }, &server);
    here.until_smcd(&server, &app);
    fixture.wait_until("metrics", || {
        let url = format!("http://{address}:9477/metrics");
        let text = here.node.run("curl", &["--silent", "--show-error", &url]);
        let is_it = |line: &str| {
            line.starts_with("usmc_connections{")
                && line.contains("mode=\"SMCD\"")
                && line.contains("redis-server")
        };
        text.lines().any(|line| is_it(line) && line.ends_with(" 3"))
    });
    here.end();
    fixture.finish();
}

/// Workloads of redis in the namespace `shop`, as their authors write them: nothing in them is about uSMC but the way out of one.
fn workload(name: &str, labels: &str, security: &str, command: &[&str]) -> String {
    let command = serde_json::to_string(command).expect("JSON");
    format!(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: {name}, namespace: shop}}\nspec:\n\
        \x20 selector: {{matchLabels: {{app: {name}}}}}\n  template:\n    metadata: {{labels: {{app: {name}{labels}}}}}\n\
        \x20   spec:\n      securityContext: {{{security}}}\n      containers:\n\
        \x20     - {{name: main, image: 'usmc.test/redis:1', imagePullPolicy: Never, command: {command}}}\n"
    )
}

#[test]
fn a_whole_cluster_brings_a_namespace_under_it() {
    if !node::is_wanted() {
        return;
    }
    let fixture = Fixture::with_limit("cluster", Duration::from_secs(240));
    let node = Node::start(&fixture);
    node.import_usmc("0.1.0");
    let mut api = ApiServer::start(&fixture, &node);
    api.start_cluster();
    let dir = build::tests_dir().join("../packages/kubernetes/base");
    api.kubectl(&["apply", "-k", &dir.to_string_lossy()]);
    api.kubectl(&["create", "namespace", "shop"]);
    assert!(usmc(&api, &["enable", "--kubernetes", "shop"]).0);
    let status = || object(&usmc(&api, &["status", "--kubernetes", "--json"]).1);
    fixture.wait_until("the DaemonSet", || status()["ready"] == 1);
    assert_eq!(status()["nodes"], 1);

    let apply = |name: &str, text: String| {
        let path = fixture.scratch().join(format!("{name}.yaml"));
        fs::write(&path, text).expect("our own file");
        api.kubectl(&["apply", "-f", &path.to_string_lossy()]);
        let deployment = format!("deployment/{name}");
        api.kubectl(&["-n", "shop", "rollout", "status", &deployment, "--timeout=60s"]);
        let label = format!("app={name}");
        let address = "jsonpath={.items[*].status.podIP}";
        api.kubectl(&["-n", "shop", "get", "pods", "-l", &label, "-o", address])
    };
    // The list comes to a node when its kubelet looks again: a pod before that is TCP, and is replaced.
    let server = || apply("cache", workload("cache", "", "", &[&AS_REDIS[..], &SERVER].concat()));
    fixture.wait_until("the list on the node", || {
        server();
        let container = ["-n", "shop", "exec", "deployment/cache", "--", "/usmc/usmc", "--version"];
        let has_it = api.command("kubectl").args(container).output();
        let has_it = has_it.is_ok_and(|out| out.status.success());
        if !has_it {
            api.kubectl(&[
                "-n",
                "shop",
                "delete",
                "deployment",
                "cache",
                "--grace-period=0",
                "--wait",
            ]);
        }
        has_it
    });
    let address = server();
    let load = ["redis-benchmark", "-h", &address, "-p", PORT, "-c", "3", "-t", "get", "-l", "-q"];
    let app = apply("app", workload("app", "", "runAsUser: 1000, runAsNonRoot: true", &load));
    let out = apply("out", workload("out", ", usmc.io/enabled: 'false'", "", &load));
    let of = |peer: &str| {
        let all = fixture.connections(LISTENS).into_iter();
        all.filter(|s| s.peer.starts_with(&format!("{peer}:"))).collect::<Vec<Socket>>()
    };
    fixture.wait_until("SMC-D, and TCP to the pod that is out", || {
        let (smcd, tcp) = (of(&app), of(&out));
        assert!(!tcp.iter().any(Socket::is_smcd), "{tcp:#?}");
        smcd.len() == 3 && tcp.len() == 3 && smcd.iter().all(Socket::is_smcd)
    });
    fixture.wait_until("SMC-D at the other end", || {
        let seen = of(&address);
        seen.len() == 3 && seen.iter().all(Socket::is_smcd)
    });
    api.end();
    node.end();
    fixture.finish();
}

impl Plugged<'_> {
    /// Ends the plugin as a kubelet does, and the node.
    fn plugin_ends(mut self) {
        node::signal(&self.plugin, libc::SIGTERM);
        assert!(self.plugin.wait().success(), "{}", self.plugin.errors());
        self.pods.end();
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
    let mut proxy = fixture.spawn(proxy);
    let socket = node.root().join("run/recorded.sock");
    fixture.wait_until("socat", || socket.exists());
    let mut plugin = plugin(&fixture, &node, "/run/recorded.sock");
    fixture.wait_until("registration", || plugin.errors().contains("registered"));
    let shop = Pod { namespace: "shop", command: &["sleep", "600"], ..Pod::default() };
    let jemalloc = [("LD_PRELOAD", "/lib/libjemalloc.so.2")];
    node.start_pod(&Pod { name: "root", env: &jemalloc, ..shop.clone() });
    node.start_pod(&Pod { name: "user", user: Some(1000), ..shop.clone() });
    let labels = [("usmc.io/enabled", "false")];
    node.start_pod(&Pod { name: "out", labels: &labels, ..shop.clone() });
    node.start_pod(&Pod { name: "other", namespace: "web", ..shop.clone() });
    node::kill(&mut plugin);
    node::kill(&mut proxy);
    for name in ["runtime", "plugin"] {
        let to = build::tests_dir().join(format!("kubernetes/frames.{name}"));
        fs::copy(at(name), to).expect("a file of the repository");
    }
    node.end();
    fixture.finish();
}
