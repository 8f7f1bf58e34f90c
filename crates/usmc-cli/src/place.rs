//! Where a process belongs, as its cgroup tells: to a service of systemd, to a container, or to neither.

use std::collections::HashMap;
use std::fs;
use std::io::Read;

/// A process' place.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Place {
    /// A service of the system's systemd.
    Service(String),
    /// A container, by the 64 hexadecimal digits of its id.
    Container(String),
    /// Neither, as far as can be seen.
    Elsewhere,
}

/// Longest file of /proc that is read here: memory maps have a line of some 100 bytes each.
const MOST: u64 = 32 << 20;

/// The place of a process.
pub fn of(pid: u32) -> Place {
    read(pid, "cgroup").map_or(Place::Elsewhere, |text| in_cgroups(&text))
}

fn read(pid: u32, name: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let file = fs::File::open(format!("/proc/{pid}/{name}")).ok()?;
    file.take(MOST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// What cgroups(7) has in `/proc/PID/cgroup`: the unified hierarchy, or systemd's own, tells more than the controllers'.
fn in_cgroups(text: &str) -> Place {
    let paths = text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let controllers = fields.nth(1)?;
        Some((!controllers.is_empty() && controllers != "name=systemd", fields.next()?))
    });
    let mut paths: Vec<(bool, &str)> = paths.collect();
    paths.sort_by_key(|(is_controller, _)| *is_controller);
    let places = paths.into_iter().map(|(_, path)| in_path(path));
    places.into_iter().find(|place| *place != Place::Elsewhere).unwrap_or(Place::Elsewhere)
}

fn in_path(path: &str) -> Place {
    let parts: Vec<&str> = path.split('/').collect();
    if let Some(id) = parts.iter().rev().find_map(|part| container_id(part)) {
        return Place::Container(id.to_owned());
    }
    // Below a user's own manager are that user's units.
    let is_users = parts.iter().any(|part| part.starts_with("user@"));
    // A unit's processes may make control groups below its own, of any names.
    match parts.iter().find(|part| part.ends_with(".service")) {
        Some(unit) if !is_users => Place::Service(unescaped(unit)),
        _ => Place::Elsewhere,
    }
}

/// `docker-ID.scope`, `cri-containerd-ID.scope`, or the id alone.
fn container_id(part: &str) -> Option<&str> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit(['-', ':']).next()?;
    (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then_some(id)
}

/// A name that means something else to cgroups has a `_` before it.
fn unescaped(name: &str) -> String {
    name.strip_prefix('_').unwrap_or(name).chars().filter(|c| !c.is_control()).collect()
}

/// All processes by their place.
pub fn all() -> HashMap<Place, Vec<u32>> {
    let mut places: HashMap<Place, Vec<u32>> = HashMap::new();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        places.entry(of(pid)).or_default().push(pid);
    }
    places
}

/// Whether a process has the library mapped; `None`: nobody lets us look.
pub fn has_library(pid: u32) -> Option<bool> {
    let maps = read(pid, "maps")?;
    Some(maps.lines().any(|line| {
        let path = line.strip_suffix(" (deleted)").unwrap_or(line);
        path.rsplit('/').next() == Some(crate::library::NAME)
    }))
}

/// The user that a process is; `None`: it has ended.
pub fn user(pid: u32) -> Option<u32> {
    let status = read(pid, "status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // Real, effective, …
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_names_the_unit_or_the_container() {
        let service = |name: &str| Place::Service(name.to_owned());
        let id = "0123456789abcdef".repeat(4);
        let docker = format!("0::/system.slice/docker-{id}.scope\n");
        let old = format!("4:memory:/docker/{id}\n0::/\n");
        let kube = format!("0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope\n");
        for (text, place) in [
            ("0::/system.slice/redis-server.service\n", service("redis-server.service")),
            ("0::/a.slice/postgresql@15-main.service/sub\n", service("postgresql@15-main.service")),
            ("0::/system.slice/a.service/redis-server.service\n", service("a.service")),
            (
                "9:name=systemd:/system.slice/a.service\n4:memory:/b.service\n0::/\n",
                service("a.service"),
            ),
            ("0::/user.slice/user-0.slice/user@0.service/app.slice/x.service\n", Place::Elsewhere),
            ("0::/user.slice/user-0.slice/session-1.scope\n", Place::Elsewhere),
            (&*docker, Place::Container(id.clone())),
            (&*old, Place::Container(id.clone())),
            (&*kube, Place::Container(id.clone())),
            ("nonsense", Place::Elsewhere),
            ("", Place::Elsewhere),
        ] {
            assert_eq!(in_cgroups(text), place, "{text}");
        }
    }

    #[test]
    fn this_process_has_no_library() {
        let own = std::process::id();
        assert_eq!(has_library(own), Some(false));
        assert_eq!(user(own), Some(rustix::process::geteuid().as_raw()));
        assert_eq!(has_library(u32::MAX), None);
    }
}
