//! A real API server of Kubernetes with its store, in a node's network: what kubectl and `usmc enable --kubernetes` talk to; and what makes
//! a cluster of it: controllers, a scheduler, and the node's kubelet. Built by `kubernetes.sh DIR cluster`.

use std::fs;
use std::process::Command;

use crate::node::{self, Node};
use crate::{Fixture, Process};

const CONFIG: &str = "\
apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: 'https://127.0.0.1:6443', insecure-skip-tls-verify: true}}]
users: [{name: a, user: {token: secret}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
";

/// The server, the store behind it, and what is around it.
pub struct ApiServer<'a> {
    fixture: &'a Fixture,
    node: &'a Node<'a>,
    server: Process,
    store: Process,
    rest: Vec<Process>,
}

impl<'a> ApiServer<'a> {
    /// Starts both.
    pub fn start(fixture: &'a Fixture, node: &'a Node<'a>) -> ApiServer<'a> {
        let dir = fixture.scratch();
        let at = |name: &str| dir.join(name).to_string_lossy().into_owned();
        fs::write(at("tokens"), "secret,admin,admin,system:masters\n").expect("our own file");
        fs::write(at("kubeconfig"), CONFIG).expect("our own file");
        let mut key = fixture.plain("openssl");
        key.args(["genrsa", "-out", &at("key"), "2048"]);
        fixture.run(key);
        // The server wants an address to tell others, which is none of loopback's.
        node.run("ip", &["address", "add", "10.218.0.1/32", "dev", "lo"]);
        let mut store = node.command("etcd");
        store.args(["--data-dir", &at("etcd"), "--unsafe-no-fsync"]);
        store.args(["--listen-client-urls", "http://127.0.0.1:2379"]);
        store.args(["--advertise-client-urls", "http://127.0.0.1:2379"]);
        store.args(["--listen-peer-urls", "http://127.0.0.1:2380"]);
        let store = fixture.spawn(store);
        let mut server = node.command("kube-apiserver");
        for (option, value) in [
            ("--etcd-servers", "http://127.0.0.1:2379"),
            ("--cert-dir", &*at("certificates")),
            // Pods reach it by the address that it advertises.
            ("--bind-address", "0.0.0.0"),
            ("--advertise-address", "10.218.0.1"),
            ("--authorization-mode", "RBAC"),
            ("--token-auth-file", &at("tokens")),
            ("--service-account-issuer", "https://localhost"),
            ("--service-account-key-file", &at("key")),
            ("--service-account-signing-key-file", &at("key")),
            ("--service-cluster-ip-range", "10.219.0.0/24"),
            ("--allow-privileged", "true"),
            // The node's name is known to nobody.
            ("--kubelet-preferred-address-types", "InternalIP"),
        ] {
            server.arg(format!("{option}={value}"));
        }
        let server = fixture.spawn(server);
        let api = ApiServer { fixture, node, server, store, rest: Vec::new() };
        fixture.wait_until("the API server", || {
            let ready = api.command("kubectl").args(["get", "--raw", "/readyz"]).output();
            ready.is_ok_and(|out| out.stdout == b"ok")
        });
        api
    }

    /// Starts all that makes pods of workloads, and waits for the node.
    pub fn start_cluster(&mut self) {
        let at = |name: &str| self.fixture.scratch().join(name).to_string_lossy().into_owned();
        let kubeconfig = format!("--kubeconfig={}", at("kubeconfig"));
        let key = format!("--service-account-private-key-file={}", at("key"));
        let group = self.node.make_cgroup();
        fs::write(at("kubelet.yaml"), kubelet_config(&group)).expect("our own file");
        let config = format!("--config={}", at("kubelet.yaml"));
        let kubelet = [&*config, "--root-dir=/var/lib/kubelet", "--node-ip=10.218.0.1"];
        for (program, options) in [
            ("kube-controller-manager", &[&*key][..]),
            ("kube-scheduler", &[]),
            ("kubelet", &kubelet),
        ] {
            let mut command = self.command(program);
            command.arg(&kubeconfig).args(options);
            self.rest.push(self.fixture.spawn(command));
        }
        let ready = "jsonpath={.items[*].status.conditions[?(@.type==\"Ready\")].status}";
        self.fixture.wait_until("the node", || {
            self.kubectl(&["get", "nodes", "--output", ready]).trim() == "True"
        });
    }

    /// A command that finds the server.
    pub fn command(&self, program: impl AsRef<std::path::Path>) -> Command {
        let mut command = self.node.command(program);
        command.env("KUBECONFIG", self.fixture.scratch().join("kubeconfig"));
        command
    }

    /// kubectl, which has to succeed.
    pub fn kubectl(&self, args: &[&str]) -> String {
        let mut command = self.command("kubectl");
        command.args(args);
        self.fixture.run(command)
    }

    /// Ends all of it.
    pub fn end(mut self) {
        self.rest.iter_mut().for_each(node::kill);
        node::kill(&mut self.server);
        node::kill(&mut self.store);
    }
}

fn kubelet_config(cgroup: &str) -> String {
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
         failCgroupV1: false\nfailSwapOn: false\ncgroupDriver: cgroupfs\ncgroupRoot: {cgroup}\nenforceNodeAllocatable: []\n\
         containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n\
         authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}\nauthorization: {{mode: AlwaysAllow}}\n\
         evictionHard: {{nodefs.available: 0%, imagefs.available: 0%, nodefs.inodesFree: 0%, memory.available: 1Mi}}\n\
         syncFrequency: 1s\n"
    )
}
