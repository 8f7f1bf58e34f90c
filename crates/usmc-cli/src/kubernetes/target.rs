//! What a user names: `NAMESPACE`, or `NAMESPACE/KIND/NAME`.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};

use crate::nri::choice::is_namespace;

/// Kinds whose pods have a template with labels, and what kubectl calls them in short.
const KINDS: [(&str, &str); 4] =
    [("deployment", "deploy"), ("statefulset", "sts"), ("daemonset", "ds"), ("replicaset", "rs")];

/// What is enabled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Target {
    /// All pods of a namespace.
    Namespace(String),
    /// Those of a workload.
    Workload(Workload),
}

/// What makes pods by a template.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Workload {
    /// Its namespace.
    pub namespace: String,
    /// In small letters: `deployment`.
    pub kind: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.namespace, self.kind, self.name)
    }
}

impl FromStr for Target {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Target> {
        let parts: Vec<&str> = text.split('/').collect();
        let (namespace, rest) = parts.split_first().context("a namespace")?;
        ensure!(
            is_namespace(namespace),
            "{namespace:?} is no name of a namespace: small letters, digits and `-`"
        );
        match rest {
            [] => Ok(Target::Namespace((*namespace).to_owned())),
            [kind, name] => {
                ensure!(is_name(name), "{name:?} is no name of a workload");
                let (namespace, name) = ((*namespace).to_owned(), (*name).to_owned());
                Ok(Target::Workload(Workload { namespace, kind: full(kind)?.to_owned(), name }))
            }
            _ => {
                bail!("{text}: write NAMESPACE, or NAMESPACE/KIND/NAME as in shop/deployment/cache")
            }
        }
    }
}

/// A kind's full name in the singular.
fn full(kind: &str) -> Result<&'static str> {
    let kind = kind.to_ascii_lowercase();
    let is_it = |(full, short): &&(&'static str, &str)| {
        kind == *full || kind == *short || kind.strip_suffix('s') == Some(*full)
    };
    let found = KINDS.iter().find(is_it).map(|(full, _)| *full);
    found.with_context(|| {
        format!("{kind:?} is no kind that can be labelled: deployment, statefulset, daemonset or replicaset")
    })
}

/// A name of Kubernetes' objects (a DNS subdomain).
fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    (1..=253).contains(&name.len())
        && name.chars().all(plain)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_and_workloads_are_told_apart() {
        let read = |text: &str| text.parse::<Target>();
        assert_eq!(read("shop").unwrap(), Target::Namespace("shop".to_owned()));
        for kind in ["deployment", "Deployment", "deployments", "deploy"] {
            let workload = Workload {
                namespace: "shop".to_owned(),
                kind: "deployment".to_owned(),
                name: "cache.1".to_owned(),
            };
            assert_eq!(workload.to_string(), "shop/deployment/cache.1");
            let target = read(&format!("shop/{kind}/cache.1")).unwrap();
            assert_eq!(target, Target::Workload(workload));
        }
        for bad in
            ["", "Shop", "shop/", "shop/deploy", "shop/pod/a", "a/ds/-x", "a/ds/x/y", "--all"]
        {
            assert!(read(bad).is_err(), "{bad}");
        }
    }
}
