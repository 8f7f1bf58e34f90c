//! What kubectl reads of a cluster, and the list of namespaces in it.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{INSTALL, NAME, Row, SYSTEM, Workload};
use crate::nri::choice::{self, LABEL};
use crate::steps::Steps;

/// The ConfigMap's key.
const KEY: &str = "namespaces";

/// What kubectl prints.
fn kubectl(args: &[&str]) -> Result<String> {
    let command = || format!("kubectl {}", args.join(" "));
    let output = match Command::new("kubectl").args(args).output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!(
                "there is no kubectl here; install it, with a configuration that reaches the cluster"
            )
        }
        Err(error) => return Err(error).with_context(command),
    };
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", command(), said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// An object, or a list of them; `None`: there is none of that name.
fn get<T: DeserializeOwned>(args: &[&str]) -> Result<Option<T>> {
    let all = [&["get", "--ignore-not-found", "--output=json"], args].concat();
    let text = kubectl(&all)?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    let read = serde_json::from_str(&text);
    read.with_context(|| format!("cannot read what kubectl {} prints", all.join(" "))).map(Some)
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct DaemonSet {
    status: DaemonSetStatus,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct DaemonSetStatus {
    desired_number_scheduled: u64,
    number_ready: u64,
}

/// The nodes that have the DaemonSet.
pub struct Nodes {
    /// How many are to.
    pub wanted: u64,
    /// On how many it is ready.
    pub ready: u64,
}

impl Nodes {
    /// Asks for them.
    ///
    /// # Errors
    /// There is none, or kubectl says no.
    pub fn read() -> Result<Nodes> {
        let found: Option<DaemonSet> = get(&["--namespace", SYSTEM, "daemonset", NAME])?;
        let found = found.with_context(|| {
            format!("uSMC is not in this cluster: there is no DaemonSet {SYSTEM}/{NAME}; `{INSTALL}` puts it there")
        })?;
        let status = found.status;
        Ok(Nodes { wanted: status.desired_number_scheduled, ready: status.number_ready })
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uSMC is ready on {} of {} nodes", self.ready, self.wanted)?;
        if self.ready < self.wanted {
            write!(
                f,
                "; kubectl --namespace {SYSTEM} get pods --output wide shows where it is not"
            )?;
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct ConfigMap {
    data: Option<HashMap<String, String>>,
}

/// The list of namespaces.
pub struct List {
    /// Whether the ConfigMap has anything.
    has_data: bool,
    text: Option<String>,
    /// Those in it.
    pub names: BTreeSet<String>,
}

impl List {
    /// Reads it.
    ///
    /// # Errors
    /// There is no ConfigMap, or kubectl says no.
    pub fn read() -> Result<List> {
        let found: Option<ConfigMap> = get(&["--namespace", SYSTEM, "configmap", NAME])?;
        let found = found.with_context(|| {
            format!("there is no ConfigMap {SYSTEM}/{NAME}; `{INSTALL}` puts it there")
        })?;
        let has_data = found.data.is_some();
        let text = found.data.and_then(|mut data| data.remove(KEY));
        let names = choice::listed(text.as_deref().unwrap_or_default());
        Ok(List { has_data, text, names })
    }

    /// Makes it a list of these. Somebody who was faster is an error.
    ///
    /// # Errors
    /// kubectl says no.
    pub fn change(&self, names: &BTreeSet<String>, steps: &Steps) -> Result<()> {
        let text = edited(self.text.as_deref().unwrap_or_default(), names);
        let patch = self.patch(&text).to_string();
        let of = ["--namespace", SYSTEM, "patch", "configmap", NAME];
        steps.run("kubectl", &[&of[..], &["--type=json", "--patch", &patch]].concat())
    }
}

impl List {
    /// The change of an object that is as it was read.
    fn patch(&self, text: &str) -> serde_json::Value {
        let path = format!("/data/{KEY}");
        match &self.text {
            Some(old) => json!([
                {"op": "test", "path": path, "value": old},
                {"op": "replace", "path": path, "value": text},
            ]),
            None if self.has_data => json!([{"op": "add", "path": path, "value": text}]),
            None => json!([{"op": "add", "path": "/data", "value": {KEY: text}}]),
        }
    }
}

/// A list with these names: lines of others go, comments and order stay.
fn edited(text: &str, names: &BTreeSet<String>) -> String {
    let is_kept = |line: &&str| choice::listed(line).is_subset(names);
    let mut lines: Vec<&str> = text.lines().filter(is_kept).collect();
    let there = choice::listed(text);
    lines.extend(names.iter().filter(|name| !there.contains(*name)).map(String::as_str));
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Whether there is a namespace of that name.
///
/// # Errors
/// There is none, or it is the cluster's own.
pub fn namespace(name: &str) -> Result<()> {
    ensure!(!choice::is_system(name), "{name} is the cluster's own, and is left alone");
    let found: Option<serde_json::Value> = get(&["namespace", name])?;
    ensure!(found.is_some(), "there is no namespace {name}; kubectl get namespaces shows them");
    Ok(())
}

#[derive(Deserialize)]
struct Objects {
    items: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    kind: String,
    metadata: Metadata,
    spec: Spec,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Metadata {
    name: String,
    namespace: String,
    labels: HashMap<String, String>,
}

#[derive(Deserialize)]
struct Spec {
    template: Template,
}

#[derive(Deserialize)]
struct Template {
    #[serde(default)]
    metadata: Metadata,
}

/// What the label says on a workload's pods; `None`: they have none.
///
/// # Errors
/// There is no such workload, or it is the cluster's own.
pub fn label(workload: &Workload) -> Result<Option<String>> {
    let Workload { namespace, kind, name } = workload;
    ensure!(!choice::is_system(namespace), "{namespace} is the cluster's own, and is left alone");
    let found: Option<Object> = get(&["--namespace", namespace, kind, name])?;
    let mut found = found.with_context(|| {
        format!("there is no {workload}; kubectl --namespace {namespace} get {kind} shows them")
    })?;
    Ok(found.spec.template.metadata.labels.remove(LABEL))
}

/// Workloads whose pods have the label.
///
/// # Errors
/// kubectl says no.
pub fn labelled() -> Result<Vec<Row>> {
    let found: Option<Objects> = get(&["deployments,statefulsets,daemonsets", "--all-namespaces"])?;
    let row = |mut object: Object| {
        let label = object.spec.template.metadata.labels.remove(LABEL)?;
        Some(Row {
            namespace: object.metadata.namespace,
            kind: object.kind.to_ascii_lowercase(),
            name: object.metadata.name,
            enabled: label == "true",
        })
    };
    Ok(found.into_iter().flat_map(|all| all.items).filter_map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_of_what_was_read() {
        let list = |has_data, text: Option<&str>| List {
            has_data,
            text: text.map(str::to_owned),
            names: BTreeSet::new(),
        };
        let of = |list: List| list.patch("a\n").to_string();
        assert_eq!(
            of(list(false, None)),
            r#"[{"op":"add","path":"/data","value":{"namespaces":"a\n"}}]"#
        );
        assert_eq!(
            of(list(true, None)),
            r#"[{"op":"add","path":"/data/namespaces","value":"a\n"}]"#
        );
        assert!(
            of(list(true, Some("b\n")))
                .starts_with(r#"[{"op":"test","path":"/data/namespaces","value":"b\n"}"#)
        );
    }

    #[test]
    fn a_list_keeps_what_others_have_written() {
        let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect();
        let text = "# those of the shop\nshop\nweb # until May\n";
        assert_eq!(edited(text, &names(&["shop", "web"])), text);
        assert_eq!(edited(text, &names(&["shop", "a"])), "# those of the shop\nshop\na\n");
        assert_eq!(edited("", &names(&["b", "a"])), "a\nb\n");
        assert_eq!(edited("shop", &names(&["shop", "web"])), "shop\nweb\n");
        assert_eq!(edited("a\n", &names(&[])), "");
    }
}
