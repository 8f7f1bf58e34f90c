//! Which containers are given the library.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use super::api::{Container, Namespace, Pod};
use crate::library;

/// The label by which a pod is brought under uSMC (`true`), or kept from it (`false`).
pub const LABEL: &str = "usmc.io/enabled";
/// Where a container has the library's directory. At the top, as a directory can always be made there: a root file system that
/// the container may not write to is writable for the runtime, which a volume of the pod's is not.
pub const LIBRARY_DIR: &str = "/usmc";
/// Where it has the ISM directory.
pub const ISM_DIR: &str = "/usmc-ism";
/// Namespaces of the cluster's own, and that of the plugin.
const SYSTEM: [&str; 4] = ["kube-system", "kube-public", "kube-node-lease", "usmc-system"];
/// Words in the names of handlers whose containers have a kernel of their own, or something else in its place.
const SANDBOXES: [&str; 7] = ["runsc", "gvisor", "kata", "firecracker", "sysbox", "wasm", "hyperv"];
/// Longest list of namespaces, in bytes.
pub const LONGEST_LIST: u64 = 1 << 20;

/// Why a container stays as it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Left {
    /// Nobody wants it.
    NotChosen,
    /// Its pod's label says so.
    OptedOut,
    /// It is the cluster's own.
    System,
    /// Its namespace has a name that no namespace of Kubernetes has.
    Unnamed,
    /// Its containers are sandboxed by this handler.
    Sandboxed(String),
    /// It has users of its own, whom others do not know.
    UserNamespace,
    /// It names an ISM directory, or the library, itself.
    Own(&'static str),
    /// It has something else there.
    Taken(String),
}

impl Left {
    /// Whether somebody may wonder.
    pub fn is_worth_a_word(&self) -> bool {
        !matches!(self, Left::NotChosen | Left::OptedOut | Left::System)
    }
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Left::NotChosen => f.write_str("neither its namespace nor its pod is enabled"),
            Left::OptedOut => write!(f, "its pod says {LABEL}: \"false\""),
            Left::System => f.write_str("it is the cluster's own"),
            Left::Unnamed => f.write_str("its namespace has no name of Kubernetes'"),
            Left::Sandboxed(handler) => write!(f, "the runtime handler {handler:?} is a sandbox"),
            Left::UserNamespace => f.write_str("it has a user namespace (hostUsers: false)"),
            Left::Own(variable) => write!(f, "it sets {variable} itself"),
            Left::Taken(path) => write!(f, "it has a mount at {path}"),
        }
    }
}

/// The pods that are chosen.
#[derive(Default, Debug)]
pub struct Rules {
    /// Namespaces all of whose pods are.
    pub namespaces: BTreeSet<String>,
    /// More handlers that are sandboxes.
    pub sandboxes: Vec<String>,
}

/// Namespaces in a list: one a line, `#` begins a comment.
pub fn listed(text: &str) -> BTreeSet<String> {
    let words = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    words.filter(|word| is_namespace(word)).map(str::to_owned).collect()
}

/// Whether it can be a namespace of Kubernetes: a DNS label. Such a name is safe in a path, too.
pub fn is_namespace(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&name.len())
        && name.chars().all(plain)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Whether a namespace is the cluster's own, or that of the plugin.
pub fn is_system(namespace: &str) -> bool {
    SYSTEM.contains(&namespace)
}

impl Rules {
    /// Whether a container is given the library.
    ///
    /// # Errors
    /// Why not.
    pub fn choose(&self, pod: &Pod, container: &Container) -> Result<(), Left> {
        let label = pod.labels.get(LABEL).map(String::as_str);
        // The way out, which nothing else shall stand before.
        if label == Some("false") {
            return Err(Left::OptedOut);
        }
        if is_system(&pod.namespace) {
            return Err(Left::System);
        }
        if label != Some("true") && !self.namespaces.contains(&pod.namespace) {
            return Err(Left::NotChosen);
        }
        if !is_namespace(&pod.namespace) {
            return Err(Left::Unnamed);
        }
        if self.is_sandbox(&pod.runtime_handler) {
            return Err(Left::Sandboxed(pod.runtime_handler.clone()));
        }
        let of_pod = pod.linux.iter().flat_map(|linux| &linux.namespaces);
        let of_container = container.linux.iter().flat_map(|linux| &linux.namespaces);
        if of_pod.chain(of_container).any(is_user) {
            return Err(Left::UserNamespace);
        }
        own(container)
    }

    fn is_sandbox(&self, handler: &str) -> bool {
        let handler = handler.to_ascii_lowercase();
        self.sandboxes.contains(&handler) || SANDBOXES.iter().any(|word| handler.contains(word))
    }
}

fn is_user(namespace: &Namespace) -> bool {
    namespace.kind == "user"
}

/// The value of a variable in a list of them; the last one counts.
pub fn variable<'a>(env: &'a [String], name: &str) -> Option<&'a str> {
    let value = |line: &'a String| line.strip_prefix(name)?.strip_prefix('=');
    env.iter().rev().find_map(value)
}

/// What the container has itself of what it would be given.
fn own(container: &Container) -> Result<(), Left> {
    if variable(&container.env, "USMC_ISM_DIR").is_some() {
        return Err(Left::Own("USMC_ISM_DIR"));
    }
    let preloads = variable(&container.env, "LD_PRELOAD").unwrap_or_default();
    if preloads.contains(library::NAME) {
        return Err(Left::Own("LD_PRELOAD"));
    }
    let is_ours = |path: &Path| path.starts_with(LIBRARY_DIR) || path.starts_with(ISM_DIR);
    match container.mounts.iter().find(|mount| is_ours(Path::new(&mount.destination))) {
        Some(mount) => Err(Left::Taken(mount.destination.clone())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::api::{LinuxContainer, LinuxPod, Mount};
    use super::*;

    fn rules() -> Rules {
        Rules {
            namespaces: listed("shop\n\n# the next one\n  web # and why\nkube-system\n../x\nA\n"),
            sandboxes: vec!["vm".to_owned()],
        }
    }

    fn pod(namespace: &str, label: Option<&str>) -> Pod {
        let labels = label.map(|value| (LABEL.to_owned(), value.to_owned()));
        Pod {
            namespace: namespace.to_owned(),
            labels: labels.into_iter().collect(),
            ..Pod::default()
        }
    }

    fn choose(pod: &Pod) -> Result<(), Left> {
        rules().choose(pod, &Container::default())
    }

    #[test]
    fn a_list_has_a_namespace_a_line() {
        let names: Vec<String> = rules().namespaces.into_iter().collect();
        assert_eq!(names, ["kube-system", "shop", "web"]);
        for bad in ["", "-a", "a-", "a.b", "..", "a/b", "A", &"a".repeat(64)] {
            assert!(!is_namespace(bad), "{bad}");
        }
    }

    #[test]
    fn namespaces_and_labels_choose_and_the_way_out_always_wins() {
        assert_eq!(choose(&pod("shop", None)), Ok(()));
        assert_eq!(choose(&pod("other", Some("true"))), Ok(()));
        assert_eq!(choose(&pod("other", None)), Err(Left::NotChosen));
        assert_eq!(choose(&pod("other", Some("yes"))), Err(Left::NotChosen));
        assert_eq!(choose(&pod("shop", Some("false"))), Err(Left::OptedOut));
        for label in [None, Some("true")] {
            assert_eq!(choose(&pod("kube-system", label)), Err(Left::System));
        }
        assert_eq!(choose(&pod("../../etc", Some("true"))), Err(Left::Unnamed));
    }

    #[test]
    fn what_shares_no_memory_with_others_is_left_alone() {
        for handler in ["runsc", "gvisor", "kata", "kata-qemu", "Kata-fc", "vm"] {
            let pod = Pod { runtime_handler: handler.to_owned(), ..pod("shop", None) };
            assert_eq!(choose(&pod), Err(Left::Sandboxed(handler.to_owned())));
        }
        for handler in ["", "runc", "crun", "nvidia"] {
            let pod = Pod { runtime_handler: handler.to_owned(), ..pod("shop", None) };
            assert_eq!(choose(&pod), Ok(()), "{handler}");
        }
        let namespaces =
            |kind: &str| vec![Namespace { kind: "mount".into() }, Namespace { kind: kind.into() }];
        let linux = Some(LinuxPod { namespaces: namespaces("user") });
        assert_eq!(choose(&Pod { linux, ..pod("shop", None) }), Err(Left::UserNamespace));
        for (kind, chosen) in [("user", Err(Left::UserNamespace)), ("network", Ok(()))] {
            let linux = Some(LinuxContainer { namespaces: namespaces(kind) });
            let container = Container { linux, ..Container::default() };
            assert_eq!(rules().choose(&pod("shop", None), &container), chosen);
        }
    }

    #[test]
    fn what_a_container_has_itself_is_left_alone() {
        let choose = |container: Container| rules().choose(&pod("shop", None), &container);
        let env = |line: &str| Container { env: vec![line.to_owned()], ..Container::default() };
        assert_eq!(choose(env("USMC_ISM_DIR=/x")), Err(Left::Own("USMC_ISM_DIR")));
        assert_eq!(choose(env("LD_PRELOAD=/a/libusmc_preload.so")), Err(Left::Own("LD_PRELOAD")));
        assert_eq!(choose(env("LD_PRELOAD=/lib/libjemalloc.so.2")), Ok(()));
        for (path, chosen) in [
            ("/usmc", Err(Left::Taken("/usmc".to_owned()))),
            ("/usmc-ism/x", Err(Left::Taken("/usmc-ism/x".to_owned()))),
            ("/usmcd", Ok(())),
            ("/data", Ok(())),
        ] {
            let mount = Mount { destination: path.to_owned(), ..Mount::default() };
            assert_eq!(choose(Container { mounts: vec![mount], ..Container::default() }), chosen);
        }
    }
}
