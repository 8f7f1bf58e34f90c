//! Namespaces and workloads of Kubernetes: brought under uSMC by what kubectl changes in the cluster, for `usmc nri` on its nodes
//! to see. A namespace is a line of a ConfigMap, a workload has a label on its pods.

mod cluster;
mod target;

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use serde::Serialize;
use serde_json::json;

use crate::nri::choice::LABEL;
use crate::steps::Steps;
use cluster::{List, Nodes};
pub use target::{Target, Workload};

/// Where the DaemonSet and the ConfigMap are, and their name.
const SYSTEM: &str = "usmc-system";
const NAME: &str = "usmc";
/// What puts them there.
const INSTALL: &str = "kubectl apply -k packages/kubernetes/base";

/// Brings namespaces and workloads under uSMC.
///
/// # Errors
/// There is no kubectl, no cluster, or nothing of that name; says what to do.
pub fn enable(targets: &[Target], steps: &Steps) -> Result<()> {
    println!("{}", Nodes::read()?);
    let list = List::read()?;
    let mut names = list.names.clone();
    let mut labels = Vec::new();
    // All are looked at before any is changed.
    for target in targets {
        match target {
            Target::Namespace(name) => {
                cluster::namespace(name)?;
                names.insert(name.clone());
            }
            Target::Workload(workload) => labels.push((workload, cluster::label(workload)?)),
        }
    }
    for (workload, label) in labels {
        set_label(workload, label.as_deref(), Some("true"), steps)?;
    }
    change(&list, &names, steps)
}

/// Takes them back.
///
/// # Errors
/// As [`enable`]; also where one is not enabled.
pub fn disable(targets: &[Target], steps: &Steps) -> Result<()> {
    let list = List::read()?;
    let mut names = list.names.clone();
    let mut labels = Vec::new();
    for target in targets {
        match target {
            Target::Namespace(name) => ensure!(
                names.remove(name),
                "{name} is not enabled; `usmc status --kubernetes` shows what is"
            ),
            Target::Workload(workload) => {
                let label = cluster::label(workload)?;
                ensure!(
                    label.as_deref() == Some("true"),
                    "{workload} is not enabled by itself; to keep it out of a namespace that is, give its pods the label \
                     {LABEL}: \"false\""
                );
                labels.push((workload, label));
            }
        }
    }
    for (workload, label) in labels {
        set_label(workload, label.as_deref(), None, steps)?;
    }
    change(&list, &names, steps)
}

fn set_label(
    workload: &Workload,
    is: Option<&str>,
    wanted: Option<&str>,
    steps: &Steps,
) -> Result<()> {
    if is == wanted {
        println!("{workload} is as it should be");
        return Ok(());
    }
    // null takes it away.
    let patch = json!({"spec": {"template": {"metadata": {"labels": {LABEL: wanted}}}}});
    let Workload { namespace, kind, name } = workload;
    let patch = patch.to_string();
    let args = ["--namespace", namespace, "patch", kind, name, "--type=merge", "--patch", &patch];
    steps.run("kubectl", &args)?;
    println!("    its pods are replaced, as its update strategy says");
    Ok(())
}

fn change(list: &List, names: &BTreeSet<String>, steps: &Steps) -> Result<()> {
    let changed: Vec<&String> = names.symmetric_difference(&list.names).collect();
    if changed.is_empty() {
        return Ok(());
    }
    list.change(names, steps)?;
    println!(
        "nodes see that within some minutes, and pods that are there stay as they are until they are replaced:"
    );
    for name in changed {
        println!("    kubectl --namespace {name} rollout restart deployment,statefulset,daemonset");
    }
    Ok(())
}

/// One namespace or workload that is enabled, or kept out.
#[derive(Serialize, PartialEq, Eq, Debug)]
pub struct Row {
    /// The namespace.
    pub namespace: String,
    /// `namespace`, `deployment`, …
    pub kind: String,
    /// The workload's name, or the namespace's.
    pub name: String,
    /// Whether it is enabled; a workload may be kept out of a namespace that is.
    pub enabled: bool,
}

/// How the cluster is.
#[derive(Serialize, Debug)]
pub struct Status {
    /// Nodes that are to have the plugin.
    pub nodes: u64,
    /// Those where it is registered.
    pub ready: u64,
    /// What is enabled or kept out.
    pub enabled: Vec<Row>,
}

/// Asks the cluster.
///
/// # Errors
/// As [`enable`].
pub fn status() -> Result<Status> {
    let Nodes { wanted, ready } = Nodes::read()?;
    let names = List::read()?.names.into_iter();
    let of_namespace = |name: String| Row {
        namespace: name.clone(),
        kind: "namespace".to_owned(),
        name,
        enabled: true,
    };
    let mut enabled: Vec<Row> = names.map(of_namespace).collect();
    enabled.extend(cluster::labelled()?);
    Ok(Status { nodes: wanted, ready, enabled })
}
