//! `SystemCallFilter=`: which of the library's own system calls a unit's filter has no room for. A call that only makes things
//! better is to fail then, by an error and not by a signal, so that the filter stays as narrow as it is; one without which the
//! library cannot work is let through.

use std::collections::BTreeSet;
use std::process::Command;

use super::reader::Settings;

/// What the library calls and does without: it goes on, by another way or with less, when the call fails with this error.
pub const OPTIONAL: [(&str, &str); 18] = [
    ("clock_gettime", "EPERM"),
    ("fchmodat", "EPERM"),
    ("fchownat", "EPERM"),
    ("flock", "EPERM"),
    ("get_robust_list", "ENOSYS"),
    ("getrandom", "ENOSYS"),
    ("madvise", "EPERM"),
    ("munlock", "EPERM"),
    ("pidfd_getfd", "EPERM"),
    ("pidfd_open", "EPERM"),
    ("preadv2", "ENOSYS"),
    ("prlimit64", "EPERM"),
    ("pwritev2", "ENOSYS"),
    ("rt_sigpending", "EPERM"),
    ("sched_yield", "EPERM"),
    ("splice", "EINVAL"),
    ("statx", "ENOSYS"),
    ("uname", "EPERM"),
];

/// What it cannot do without.
pub const NEEDED: [&str; 55] = [
    "accept4",
    "bind",
    "close",
    "connect",
    "dup3",
    "epoll_create1",
    "epoll_ctl",
    "epoll_pwait",
    "eventfd2",
    "faccessat",
    "fallocate",
    "fchmod",
    "fcntl",
    "fstat",
    "fstatfs",
    "ftruncate",
    "futex",
    "getdents64",
    "geteuid",
    "getpeername",
    "getpid",
    "getppid",
    "getsockname",
    "getsockopt",
    "gettid",
    "ioctl",
    "linkat",
    "listen",
    "lseek",
    "memfd_create",
    "mkdirat",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "openat",
    "ppoll",
    "pread64",
    "read",
    "readlinkat",
    "recvfrom",
    "recvmsg",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigtimedwait",
    "sendmsg",
    "sendto",
    "setsockopt",
    "shutdown",
    "socket",
    "tgkill",
    "unlinkat",
    "write",
    "writev",
    "epoll_pwait2",
];

/// What a filter is to be given.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Additions {
    /// Calls that fail with an error instead of ending the unit: `name:ERROR`.
    pub refused: Vec<String>,
    /// Calls that are allowed.
    pub allowed: Vec<String>,
    /// Nobody here knew what a set has in it.
    pub unknown_sets: Vec<String>,
}

/// A filter, as the unit has it.
#[derive(Debug)]
struct Filter {
    /// What is listed is allowed; otherwise it is forbidden.
    is_allow_list: bool,
    listed: BTreeSet<String>,
    /// Calls that fail with an error of their own.
    with_error: BTreeSet<String>,
    unknown_sets: Vec<String>,
}

/// What the unit's filter lacks; nothing where it has none. `sets` tells the members of a set such as `@system-service`.
pub fn additions(
    settings: &Settings,
    sets: impl Fn(&str) -> Option<BTreeSet<String>>,
) -> Additions {
    let Some(filter) = Filter::of(settings, sets) else { return Additions::default() };
    let is_denied = |name: &str| filter.listed.contains(name) != filter.is_allow_list;
    // Then a call that is not allowed fails, and ends nothing.
    let is_mild = settings.last("SystemCallErrorNumber").is_some_and(|error| error != "kill");
    let ends = |name: &str| is_denied(name) && !is_mild && !filter.with_error.contains(name);
    let refused = OPTIONAL.iter().filter(|(name, _)| ends(name));
    let allowed =
        NEEDED.iter().filter(|name| is_denied(name) || filter.with_error.contains(**name));
    Additions {
        refused: refused.map(|(name, error)| format!("{name}:{error}")).collect(),
        allowed: allowed.map(|name| (*name).to_owned()).collect(),
        unknown_sets: filter.unknown_sets,
    }
}

impl Filter {
    fn of(settings: &Settings, sets: impl Fn(&str) -> Option<BTreeSet<String>>) -> Option<Filter> {
        let mut filter: Option<Filter> = None;
        for assignment in settings.assigned("SystemCallFilter") {
            let (inverted, names) = match assignment.value.strip_prefix('~') {
                Some(names) => (true, names),
                None => (false, &*assignment.value),
            };
            let filter = filter.get_or_insert_with(|| Filter::begun(!inverted, &sets));
            for word in names.split_whitespace() {
                let (name, error) = match word.split_once(':') {
                    Some((name, error)) => (name, Some(error).filter(|error| *error != "kill")),
                    None => (word, None),
                };
                filter.add(name, inverted, error.is_some(), &sets);
            }
        }
        filter
    }

    /// The first assignment says which kind it is. A list of what is allowed has systemd's own set besides.
    fn begun(is_allow_list: bool, sets: impl Fn(&str) -> Option<BTreeSet<String>>) -> Filter {
        let listed = BTreeSet::new();
        let mut filter =
            Filter { is_allow_list, listed, with_error: BTreeSet::new(), unknown_sets: Vec::new() };
        if is_allow_list {
            filter.add("@default", false, false, &sets);
        }
        filter
    }

    fn add(
        &mut self,
        name: &str,
        inverted: bool,
        has_error: bool,
        sets: impl Fn(&str) -> Option<BTreeSet<String>>,
    ) {
        let names = match name.strip_prefix('@') {
            None => BTreeSet::from([name.to_owned()]),
            Some(_) => sets(name).unwrap_or_else(|| {
                self.unknown_sets.push(name.to_owned());
                BTreeSet::new()
            }),
        };
        let is_listed = inverted != self.is_allow_list;
        for name in names {
            if is_listed {
                self.listed.insert(name.clone())
            } else {
                self.listed.remove(&name)
            };
            if inverted && has_error {
                self.with_error.insert(name)
            } else {
                self.with_error.remove(&name)
            };
        }
    }
}

/// The members of a set, and of the sets in it, as this machine's systemd has them; `None` where it does not tell.
pub fn set(name: &str) -> Option<BTreeSet<String>> {
    // Sets do not name each other in a circle; whatever prints more than this is not systemd.
    const MOST: usize = 64;
    let (mut members, mut open, mut seen) = (BTreeSet::new(), vec![name.to_owned()], 0);
    while let Some(name) = open.pop() {
        seen += 1;
        let told = Command::new("systemd-analyze").args(["syscall-filter", &name]).output().ok()?;
        if !told.status.success() || seen > MOST {
            return None;
        }
        let text = String::from_utf8_lossy(&told.stdout);
        // The set's own name comes first.
        for line in text.lines().skip(1).map(str::trim) {
            match line {
                "" => {}
                line if line.starts_with('#') => {}
                line if line.starts_with('@') => open.push(line.to_owned()),
                line => drop(members.insert(line.to_owned())),
            }
        }
    }
    Some(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The library's own calls; those behind `as` have another name where addresses have 32 bits.
    const OWN: [&str; 3] = [
        include_str!("../../../usmc/src/os/sys.rs"),
        include_str!("../../../usmc/src/os/sys/memory.rs"),
        include_str!("../../../usmc/src/os/sys/sockets.rs"),
    ];

    fn sets(name: &str) -> Option<BTreeSet<String>> {
        let names = match name {
            "@default" => {
                NEEDED[..20].join(" ") + " getrandom prlimit64 get_robust_list sched_yield"
            }
            "@system-service" => {
                let all = NEEDED.iter().chain(OPTIONAL.iter().map(|(name, _)| name));
                let all = all.filter(|name| **name != "pidfd_getfd");
                all.copied().collect::<Vec<_>>().join(" ")
            }
            "@privileged" => "fchownat chown mount".to_owned(),
            _ => return None,
        };
        Some(names.split(' ').map(str::to_owned).collect())
    }

    fn of(unit: &str) -> Additions {
        additions(&Settings::of([&*format!("[Service]\n{unit}\n")]), sets)
    }

    #[test]
    fn the_list_is_that_of_the_library() {
        let named: BTreeSet<&str> = OWN
            .iter()
            .flat_map(|text| text.split("SYS_").skip(1))
            .map(|rest| {
                rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or("")
            })
            .filter(|name| !name.is_empty() && *name != "name")
            // i386's.
            .filter(|name| {
                !name.ends_with("64") || ["getdents64", "pread64", "prlimit64"].contains(name)
            })
            .filter(|name| !["mmap2", "geteuid32", "_llseek"].contains(name))
            .collect();
        let known: BTreeSet<&str> = OPTIONAL.iter().map(|(name, _)| *name).chain(NEEDED).collect();
        let missing: Vec<_> = named.difference(&known).collect();
        assert!(missing.is_empty(), "say whether the library can do without {missing:?}");
        // For the program: glibc's epoll_wait(3) is another call.
        let more: Vec<_> = known.difference(&named).copied().collect();
        assert_eq!(more, ["epoll_pwait2"]);
    }

    #[test]
    fn a_filter_stays_as_narrow_as_it_is() {
        assert_eq!(of("User=a"), Additions::default());
        let redis = of("SystemCallFilter=@system-service\nSystemCallFilter=~ @privileged");
        assert_eq!(redis.refused, ["fchownat:EPERM", "pidfd_getfd:EPERM"]);
        assert_eq!((redis.allowed, redis.unknown_sets), (vec![], vec![]));
        let mild = of("SystemCallFilter=@system-service\nSystemCallErrorNumber=EPERM");
        assert_eq!(mild, Additions::default());
        let said = of("SystemCallFilter=@system-service\nSystemCallFilter=~pidfd_getfd:EACCES");
        assert_eq!(said, Additions::default());
    }

    #[test]
    fn what_is_needed_is_allowed() {
        let denied = of("SystemCallFilter=~memfd_create pidfd_getfd");
        assert_eq!(denied.allowed, ["memfd_create"]);
        assert_eq!(denied.refused, ["pidfd_getfd:EPERM"]);
        let by_error = of("SystemCallFilter=~memfd_create:EPERM");
        assert_eq!(by_error.allowed, ["memfd_create"]);
        let reset =
            of("SystemCallFilter=~memfd_create\nSystemCallFilter=\nSystemCallFilter=~mount");
        assert_eq!(reset, Additions::default());
        let own = of("SystemCallFilter=@mine");
        assert_eq!(own.unknown_sets, ["@mine"]);
        assert!(own.allowed.contains(&"memfd_create".to_owned()));
    }
}
