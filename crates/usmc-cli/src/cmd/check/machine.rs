//! The kernel, the limits and the confinement of this process: whatever does not depend on the configuration.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Resource, getrlimit};

use super::report::Finding;

/// What the library uses, since when it exists, and what happens without it; no line is a failure by
/// itself except the first.
const FEATURES: [((u32, u32), &str, &str); 3] = [
    (
        (4, 1),
        "TCP_INFO's byte counters",
        "no connection can leave TCP: the boundary between TCP and ring cannot be found",
    ),
    (
        (5, 3),
        "pidfd_open(2)",
        "a lock that a killed process held in shared memory is never taken over",
    ),
    (
        (5, 14),
        "SO_NETNS_COOKIE",
        "programs in different network namespaces must not share an ISM directory",
    ),
];

/// Soft limit of open files below which servers run into it before the library does.
const FEW_FILES: u64 = 1024;

/// All findings.
pub fn findings() -> Vec<Finding> {
    let mut findings = vec![kernel()];
    findings.extend(missing_features());
    findings.push(memory());
    findings.extend(limits());
    findings.extend(confinement());
    findings
}

fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn kernel() -> Finding {
    let release = release();
    let names: Vec<_> = FEATURES.iter().map(|(_, name, _)| *name).collect();
    if FEATURES.iter().all(|(since, ..)| version(&release) >= *since) {
        Finding::good(format!("Linux {release} has {}", names.join(", ")))
    } else {
        Finding::note(
            format!("Linux {release} is older than 5.14 and lacks some of what uSMC uses"),
            "see below; upgrade the kernel where that matters",
        )
    }
}

fn missing_features() -> Vec<Finding> {
    let release = release();
    let missing = FEATURES.iter().filter(|(since, ..)| version(&release) < *since);
    missing
        .map(|((major, minor), name, consequence)| {
            let fact = format!("{name} is missing: {consequence}");
            let remedy = format!("upgrade to Linux {major}.{minor} or later");
            if (*major, *minor) == FEATURES[0].0 {
                Finding::failure(fact, remedy)
            } else {
                Finding::note(fact, remedy)
            }
        })
        .collect()
}

/// Shared memory as the library makes it and hands it over.
fn memory() -> Finding {
    match sealed().and_then(|memory| hand_over(&memory).map_err(|e| ("SCM_RIGHTS", e))) {
        Ok(()) => {
            Finding::good("memfd_create(2) with seals, and SCM_RIGHTS over UNIX sockets, work")
        }
        Err((step, e)) => Finding::failure(
            format!("{step} failed: {e}"),
            match e {
                Errno::MFILE | Errno::NFILE => "raise the limit of open files (ulimit -n)",
                Errno::ACCESS => {
                    "a security module or sysctl vm.memfd_noexec=2 refuses it; allow it"
                }
                _ => "allow it in the container's seccomp profile",
            },
        ),
    }
}

fn sealed() -> Result<OwnedFd, (&'static str, Errno)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("usmc-check", flags).map_err(|e| ("memfd_create(2)", e))?;
    ftruncate(&memory, 1 << 16).map_err(|e| ("sizing a memfd", e))?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&memory, seals).map_err(|e| ("sealing a memfd", e))?;
    Ok(memory)
}

fn hand_over(memory: &OwnedFd) -> Result<(), Errno> {
    let (left, right) =
        socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let fds = [memory.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut sent = SendAncillaryBuffer::new(&mut space);
    sent.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&left, &[IoSlice::new(b"m")], &mut sent, SendFlags::empty())?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut received = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&right, &mut [IoSliceMut::new(&mut byte)], &mut received, RecvFlags::CMSG_CLOEXEC)?;
    let arrived = received.drain().any(|m| matches!(m, RecvAncillaryMessage::ScmRights(_)));
    if arrived { Ok(()) } else { Err(Errno::PERM) }
}

fn limits() -> Vec<Finding> {
    let files = getrlimit(Resource::Nofile);
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
    let (soft, hard) = (shown(files.current), shown(files.maximum));
    let open = if files.current.is_some_and(|n| n < FEW_FILES) {
        Finding::note(
            format!("only {soft} open files are allowed (hard limit {hard})"),
            "raise it for servers: ulimit -n; the library needs a few of its own at the upper end",
        )
    } else {
        Finding::good(format!("{soft} open files are allowed (hard limit {hard})"))
    };
    let locked = shown(getrlimit(Resource::Memlock).current);
    vec![
        open,
        Finding::good(format!("{locked} bytes of locked memory; SMC-D needs none, RDMA would")),
    ]
}

fn confinement() -> Vec<Finding> {
    let mut findings = Vec::new();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| {
        status.lines().find_map(|l| l.strip_prefix(name)).map(|value| value.trim().to_owned())
    };
    if field("Seccomp:").is_some_and(|mode| mode != "0") {
        findings.push(Finding::note(
            "a seccomp filter is active",
            "should a check below fail, allow memfd_create, pidfd_open, eventfd2 and sendmsg in it",
        ));
    }
    if let Some(sign) = container() {
        findings.push(Finding::note(
            format!("this looks like a container: {sign}"),
            "programs outside it share the device only if its directory is mounted here: \
             a volume, and USMC_ISM_DIR on both sides",
        ));
    }
    if Path::new("/etc/ld.so.preload").exists() {
        findings.push(Finding::note(
            "/etc/ld.so.preload preloads something into every program",
            "should programs misbehave under uSMC, compare without it",
        ));
    }
    findings
}

/// By what this is taken for a container.
fn container() -> Option<String> {
    let marks = ["/.dockerenv", "/run/.containerenv"];
    if let Some(mark) = marks.iter().find(|mark| Path::new(mark).exists()) {
        return Some(format!("there is a file {mark}"));
    }
    let init = fs::read("/proc/1/environ").unwrap_or_default();
    let kind = init.split(|&b| b == 0).find_map(|variable| variable.strip_prefix(b"container="))?;
    Some(format!("process 1 has container={} in its environment", kind.escape_ascii()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_compared_as_numbers() {
        assert_eq!(version("6.18.5"), (6, 18));
        assert_eq!(version("5.9-rc1+"), (5, 9));
        assert!(version("5.9.0") < version("5.14.0-custom"));
        assert_eq!(version("strange"), (0, 0));
    }
}
