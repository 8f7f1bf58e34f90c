//! `usmc enable --kubernetes` without a cluster: what it says where kubectl is missing or fails, and which arguments kubectl is given. What
//! it does to a real API server is in tests/tests/kubernetes.rs.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;

use support::*;

/// A kubectl that writes its arguments down and prints what a file of the first object's kind says.
fn kubectl(dir: &TempDir) {
    let script = "#!/bin/sh\ncd \"$(dirname \"$0\")\"\nprintf '%s\\n' \"$*\" >>log\nfor word; do case $word in \
         daemonset|configmap|deployment|namespace) cat $word 2>/dev/null; exit 0 ;; esac; done\n";
    let path = dir.file("kubectl", script.as_bytes());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a mode");
}

fn run(dir: &TempDir, args: &[&str]) -> (bool, String) {
    let path = format!("{}:/usr/bin:/bin", dir.path().display());
    let done = output(usmc(args).env("PATH", path));
    (done.status.success(), stdout(&done) + &stderr(&done))
}

#[test]
fn what_is_missing_is_said() {
    let done = output(usmc(&["status", "--kubernetes"]).env("PATH", "/nonexistent"));
    assert!(!done.status.success() && stderr(&done).contains("there is no kubectl"), "{done:?}");
    let dir = TempDir::new();
    kubectl(&dir);
    let (done, said) = run(&dir, &["enable", "--kubernetes", "shop"]);
    assert!(!done && said.contains("there is no DaemonSet usmc-system/usmc"), "{said}");
    fs::write(dir.path().join("daemonset"), "{}").expect("a file");
    let (done, said) = run(&dir, &["enable", "--kubernetes", "shop"]);
    assert!(!done && said.contains("there is no ConfigMap usmc-system/usmc"), "{said}");
    fs::write(dir.path().join("configmap"), "not JSON").expect("a file");
    let (done, said) = run(&dir, &["disable", "--kubernetes", "shop"]);
    assert!(!done && said.contains("cannot read what kubectl"), "{said}");
    for bad in ["Shop", "shop/cache", "shop/pod/x", "../x"] {
        let (done, said) = run(&dir, &["enable", "--kubernetes", bad]);
        assert!(!done && said.contains("--kubernetes"), "{said}");
    }
}

#[test]
fn kubectl_is_told_one_change_each() {
    let dir = TempDir::new();
    kubectl(&dir);
    let object = |kind: &str, text: &str| fs::write(dir.path().join(kind), text).expect("a file");
    object("daemonset", r#"{"status": {"desiredNumberScheduled": 3, "numberReady": 2}}"#);
    object("configmap", r##"{"data": {"namespaces": "# ours\nweb\n"}}"##);
    object("namespace", "{}");
    object("deployment", r#"{"kind": "Deployment", "metadata": {}, "spec": {"template": {}}}"#);
    let both = ["--kubernetes", "shop", "--kubernetes", "shop/deploy/cache"];
    let (done, said) = run(&dir, &[&["enable", "--dry-run"], &both[..]].concat());
    assert!(done && said.contains("ready on 2 of 3 nodes"), "{said}");
    let log = || fs::read_to_string(dir.path().join("log")).expect("kubectl's arguments");
    assert!(!log().contains("patch"), "{}", log());
    let (done, said) = run(&dir, &[&["enable"], &both[..]].concat());
    assert!(done, "{said}");
    let log = log();
    let patches: Vec<&str> = log.lines().filter(|line| line.contains("patch")).collect();
    assert_eq!(
        patches,
        [
            "--namespace shop patch deployment cache --type=merge --patch \
             {\"spec\":{\"template\":{\"metadata\":{\"labels\":{\"usmc.io/enabled\":\"true\"}}}}}",
            "--namespace usmc-system patch configmap usmc --type=json --patch \
             [{\"op\":\"test\",\"path\":\"/data/namespaces\",\"value\":\"# ours\\nweb\\n\"},\
             {\"op\":\"replace\",\"path\":\"/data/namespaces\",\"value\":\"# ours\\nweb\\nshop\\n\"}]",
        ]
    );
    assert!(said.contains("kubectl --namespace shop rollout restart"), "{said}");
}
