//! The plugin: gives containers the library and the ISM directory of their namespace. What does not work out leaves a container as
//! it is, on TCP, and is said.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::api::{Adjustment, Container, Mount, Pod, Variable};
use super::choice::{self, ISM_DIR, LIBRARY_DIR, Left, Rules, variable};
use super::devices::Devices;
use super::rootfs::Root;
use super::session::Plugin;
use crate::fit::Fit;
use crate::ivshmem::log;
use crate::library;

/// What of a runtime's `runc init` a process is by whose user it is told; see [`Injector::start`].
const INIT: &str = "runc:[2:INIT]";

/// The plugin.
pub struct Injector {
    libraries: PathBuf,
    devices: Devices,
    list: Option<PathBuf>,
    rules: Rules,
    /// What was said of the list last.
    complaint: Option<String>,
}

impl Injector {
    /// With the libraries in a directory of the node, and namespaces in a list that may change.
    pub fn new(
        libraries: PathBuf,
        devices: Devices,
        list: Option<PathBuf>,
        sandboxes: Vec<String>,
    ) -> Injector {
        let rules = Rules { sandboxes, ..Rules::default() };
        Injector { libraries, devices, list, rules, complaint: None }
    }

    /// Reads the list of namespaces anew. One that cannot be read is as it was.
    pub fn reread(&mut self) {
        let Some(path) = &self.list else { return };
        let complaint = match read(path) {
            Ok(text) => {
                self.rules.namespaces = choice::listed(&text);
                None
            }
            // One that nobody has written yet.
            Err(error)
                if error.kind() == ErrorKind::NotFound && self.rules.namespaces.is_empty() =>
            {
                None
            }
            Err(error) => Some(format!("cannot read {}: {error}", path.display())),
        };
        if complaint != self.complaint {
            complaint.iter().for_each(log);
            self.complaint = complaint;
        }
    }

    /// Makes the directories of all namespaces in the list.
    pub fn make_directories(&mut self) {
        self.reread();
        for namespace in &self.rules.namespaces {
            if let Err(error) = self.devices.of(namespace) {
                log(format_args!("{error:#}"));
            }
        }
    }

    fn choose(&mut self, pod: &Pod, container: &Container) -> Result<(), Left> {
        self.reread();
        self.rules.choose(pod, container)
    }

    fn adjustment(&self, pod: &Pod, container: &Container) -> Result<Adjustment> {
        let library = self.libraries.join(library::NAME);
        ensure!(
            library.is_file(),
            "there is no {}; `usmc export {}` puts it there",
            library.display(),
            self.libraries.display()
        );
        let device = self.devices.of(&pod.namespace)?;
        if let Some(user) = &container.user
            && let Err(error) = self.devices.admit(&pod.namespace, &[user.uid].into())
        {
            // Its group may let it in.
            log(format_args!("{}: {error:#}", name(pod, container)));
        }
        // The library for 32-bit programs is there if there is a tree.
        let tree = Path::new("$LIB").join(library::NAME);
        let has_tree = self.libraries.join(&tree).is_file();
        let preload = if has_tree { tree } else { PathBuf::from(library::NAME) };
        let own = variable(&container.env, "LD_PRELOAD").map(OsStr::new);
        let preload = library::prepend(&Path::new(LIBRARY_DIR).join(preload), own);
        let preload = preload.into_string().ok().context("LD_PRELOAD is no text")?;
        let set = |name: &str, value: String| Variable { name: name.to_owned(), value };
        Ok(Adjustment {
            mounts: vec![
                mount(&self.libraries, LIBRARY_DIR, &["ro"]),
                mount(&device, ISM_DIR, &["rw", "noexec"]),
            ],
            env: vec![
                // A plugin that was asked before this one may have set it, which would be a conflict, and no container. What it
                // has set is in what stays behind ours.
                set("-LD_PRELOAD", String::new()),
                set("LD_PRELOAD", preload),
                set("USMC_ISM_DIR", ISM_DIR.to_owned()),
            ],
        })
    }

    /// The users that a container's programs will be.
    fn users(container: &Container, root: Option<&Root>) -> BTreeSet<u32> {
        let told = container.user.as_ref().map(|user| user.uid);
        // The runtime's process is the container's user by now, and waits for the start.
        let seen = || crate::place::user(container.pid).filter(|_| is_init(container.pid));
        match told.or_else(seen) {
            Some(user) if user != 0 => [user].into(),
            // root's entry points change to another user themselves.
            _ => root.map(Root::users).unwrap_or_default(),
        }
    }
}

impl Plugin for Injector {
    fn create(&mut self, pod: &Pod, container: &Container) -> Option<Adjustment> {
        let name = name(pod, container);
        match self.choose(pod, container) {
            Ok(()) => {}
            Err(left) if left.is_worth_a_word() => {
                log(format_args!("{name} stays TCP: {left}"));
                return None;
            }
            Err(_) => return None,
        }
        match self.adjustment(pod, container) {
            Ok(adjustment) => {
                log(format_args!("{name} is given the library"));
                Some(adjustment)
            }
            Err(error) => {
                log(format_args!("{name} stays TCP: {error:#}"));
                None
            }
        }
    }

    fn start(&mut self, pod: &Pod, container: &Container) {
        let ours = |mount: &Mount| mount.destination == ISM_DIR;
        let device = container.mounts.iter().find(|mount| ours(mount));
        if device.is_none_or(|mount| !Path::new(&mount.source).starts_with(self.devices.around())) {
            return;
        }
        let name = name(pod, container);
        let root = (container.pid != 0).then(|| Root::of(container.pid)).flatten();
        let users = Injector::users(container, root.as_ref());
        if let Err(error) = self.devices.admit(&pod.namespace, &users) {
            log(format_args!("{name}: {error:#}"));
        }
        if let Some(Fit::Unserved(why)) = root.map(|root| root.fit(container)) {
            log(format_args!("{name} stays TCP: {why}"));
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(choice::LONGEST_LIST).read_to_string(&mut text)?;
    Ok(text)
}

fn is_init(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    name.is_ok_and(|name| name.trim_end() == INIT)
}

fn mount(source: &Path, destination: &str, options: &[&str]) -> Mount {
    let all = ["bind", "nosuid", "nodev"].iter().chain(options);
    Mount {
        destination: destination.to_owned(),
        kind: "bind".to_owned(),
        source: source.to_string_lossy().into_owned(),
        options: all.map(|option| (*option).to_owned()).collect(),
    }
}

/// A container's name in the log.
fn name(pod: &Pod, container: &Container) -> String {
    let name = format!("{}/{}/{}", pod.namespace, pod.name, container.name);
    name.chars().filter(|c| !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::api::User;
    use super::*;

    /// A plugin with a directory of its own.
    struct Here {
        dir: PathBuf,
        plugin: Injector,
    }

    impl Here {
        fn new(name: &str) -> Here {
            let dir = std::env::temp_dir().join(format!("usmc-{name}-{}", std::process::id()));
            std::fs::create_dir_all(dir.join("libraries")).unwrap();
            std::fs::write(dir.join("namespaces"), "shop\n").unwrap();
            let devices = Devices::new(&dir.join("devices")).unwrap();
            let list = Some(dir.join("namespaces"));
            let plugin = Injector::new(dir.join("libraries"), devices, list, vec![]);
            Here { dir, plugin }
        }

        fn install(&self, name: &str) {
            let path = self.dir.join("libraries").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "").unwrap();
        }

        fn create(&mut self, namespace: &str, env: &[&str]) -> Option<Adjustment> {
            let pod = Pod { namespace: namespace.to_owned(), ..Pod::default() };
            let env = env.iter().map(|line| (*line).to_owned()).collect();
            let user = Some(User { uid: 1234 });
            self.plugin.create(&pod, &Container { env, user, ..Container::default() })
        }
    }

    impl Drop for Here {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.dir).unwrap();
        }
    }

    fn is_root() -> bool {
        rustix::process::geteuid().is_root()
    }

    #[test]
    fn a_container_gets_two_mounts_and_two_variables() {
        if !is_root() {
            return;
        }
        let mut here = Here::new("injector");
        assert_eq!(here.create("shop", &[]), None, "there is no library");
        here.install(library::NAME);
        let all = here.create("shop", &["LD_PRELOAD=/lib/libjemalloc.so.2"]).unwrap();
        let env: Vec<(&str, &str)> = all.env.iter().map(|v| (&*v.name, &*v.value)).collect();
        let preload = "/usmc/libusmc_preload.so:/lib/libjemalloc.so.2";
        let expected =
            [("-LD_PRELOAD", ""), ("LD_PRELOAD", preload), ("USMC_ISM_DIR", "/usmc-ism")];
        assert_eq!(env, expected);
        let [library, device] = &all.mounts[..] else { panic!("{all:?}") };
        assert_eq!(library.source, here.dir.join("libraries").to_string_lossy());
        assert_eq!(library.options, ["bind", "nosuid", "nodev", "ro"]);
        assert_eq!(device.source, here.dir.join("devices/shop").to_string_lossy());
        assert_eq!(device.options, ["bind", "nosuid", "nodev", "rw", "noexec"]);
        here.install(&format!("$LIB/{}", library::NAME));
        let wide = here.create("shop", &[]).unwrap();
        assert_eq!(wide.env[1].value, "/usmc/$LIB/libusmc_preload.so");
    }

    #[test]
    fn the_list_is_read_anew_and_kept_where_it_cannot_be() {
        if !is_root() {
            return;
        }
        let mut here = Here::new("list");
        here.install(library::NAME);
        assert_eq!(here.create("web", &[]), None);
        std::fs::write(here.dir.join("namespaces"), "web\n").unwrap();
        assert!(here.create("web", &[]).is_some());
        assert_eq!(here.create("shop", &[]), None);
        std::fs::remove_file(here.dir.join("namespaces")).unwrap();
        assert!(here.create("web", &[]).is_some());
        here.plugin.make_directories();
        assert!(here.dir.join("devices/web").is_dir());
    }

    #[test]
    fn names_in_the_log_are_one_line() {
        let pod = Pod { namespace: "a".into(), name: "b\nc".into(), ..Pod::default() };
        assert_eq!(name(&pod, &Container { name: "d".into(), ..Container::default() }), "a/bc/d");
    }
}
