//! The programs of `bpf/` in the kernel: loaded, attached to a cgroup, found there again.

mod syscall;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use aya::programs::{CgroupSockopt, ProgramInfo, SockOps, loaded_programs};
use aya::{Ebpf, include_bytes_aligned};
use procfs::process::Process;

use syscall::AttachType;

/// The compiled programs; empty where the build had no clang.
static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/tcp_option.bpf.o"));

/// The names of the programs, and where each belongs. The one that answers setsockopt(2) is attached last and detached
/// first: a socket can be armed only while the others are there.
const PROGRAMS: [(&str, AttachType); 3] = [
    ("usmc_tcp_option", AttachType::SockOps),
    ("usmc_getsockopt", AttachType::Getsockopt),
    ("usmc_setsockopt", AttachType::Setsockopt),
];

/// Programs of ours attached to one cgroup.
#[derive(Debug)]
pub struct Attached {
    /// Ids in the order of [`PROGRAMS`]; more than one of a name where a load was interrupted.
    programs: [Vec<ProgramInfo>; PROGRAMS.len()],
}

impl Attached {
    /// Whether all are there.
    pub fn is_complete(&self) -> bool {
        self.programs.iter().all(|found| !found.is_empty())
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.programs.iter().all(Vec::is_empty)
    }

    /// The ids of all.
    pub fn ids(&self) -> Vec<u32> {
        self.programs.iter().flatten().map(ProgramInfo::id).collect()
    }

    /// The kernel's fingerprints of the programs' instructions, to tell one version of them from another.
    fn tags(&self) -> Vec<u64> {
        self.programs.iter().flatten().map(ProgramInfo::tag).collect()
    }
}

/// What [`load`] did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loaded {
    /// They were not there before.
    New,
    /// Others of the same names were, of another version or only some of them.
    Replaced,
    /// These very ones were there.
    Already,
}

/// The root of the cgroup2 hierarchy.
///
/// # Errors
/// None is mounted.
pub fn default_cgroup() -> Result<PathBuf> {
    let mounts = Process::myself().and_then(|own| own.mountinfo());
    let mut mounts = mounts.context("cannot read the list of mounts")?.into_iter();
    let mount = mounts.find(|mount| mount.fs_type == "cgroup2");
    mount.map(|mount| mount.mount_point).ok_or_else(|| {
        anyhow!("no cgroup2 is mounted; mount one: mount -t cgroup2 none /sys/fs/cgroup/unified")
    })
}

/// Opens a cgroup's directory.
///
/// # Errors
/// It is none.
pub fn open(cgroup: &Path) -> Result<File> {
    let name = cgroup.display();
    let dir = File::open(cgroup)
        .with_context(|| format!("cannot open the cgroup {name}; name one that exists"))?;
    if !cgroup.join("cgroup.procs").exists() {
        bail!("{name} is no cgroup; name a directory of the cgroup2 hierarchy");
    }
    Ok(dir)
}

/// Loads the programs and attaches them.
///
/// # Errors
/// Which step the kernel refused, and why that may be.
pub fn load(cgroup: &File) -> Result<Loaded> {
    if OBJECT.is_empty() {
        bail!(
            "this usmc was built without clang and has no programs inside; install clang and build it again"
        );
    }
    let before = attached(cgroup)?;
    let mut object = Ebpf::load(OBJECT).map_err(|e| refused("BPF_MAP_CREATE", anyhow!(e)))?;
    let new = loaded(&mut object)?;
    let new_tags: Vec<u64> = new.iter().map(ProgramInfo::tag).collect();
    if before.is_complete() && before.tags() == new_tags {
        return Ok(Loaded::Already);
    }
    // The old ones go first: two programs that write the same option would be one too many.
    detach_all(cgroup, &before)?;
    let attach = |(info, (_, at)): (&ProgramInfo, _)| {
        let fd = info.fd().map_err(anyhow::Error::new)?;
        syscall::attach(cgroup.as_fd(), fd.as_fd(), at).map_err(anyhow::Error::new)
    };
    if let Some(problem) = new.iter().zip(PROGRAMS).map(attach).find_map(Result::err) {
        // Some of them are no use.
        let _ = unload(cgroup);
        return Err(refused("BPF_PROG_ATTACH", problem));
    }
    Ok(if before.is_empty() { Loaded::New } else { Loaded::Replaced })
}

/// Has the kernel check the programs; in the order of [`PROGRAMS`].
fn loaded(object: &mut Ebpf) -> Result<Vec<ProgramInfo>> {
    let mut infos = Vec::new();
    for (name, at) in PROGRAMS {
        let program =
            object.program_mut(name).with_context(|| format!("no program {name} is inside"))?;
        let info = match at {
            AttachType::SockOps => {
                let program: &mut SockOps = program.try_into()?;
                program.load().and_then(|()| program.info())
            }
            AttachType::Getsockopt | AttachType::Setsockopt => {
                let program: &mut CgroupSockopt = program.try_into()?;
                program.load().and_then(|()| program.info())
            }
        };
        infos.push(info.map_err(|e| refused("BPF_PROG_LOAD", anyhow!(e)))?);
    }
    Ok(infos)
}

/// Takes the programs away. Says whether any were there.
///
/// # Errors
/// The kernel refused.
pub fn unload(cgroup: &File) -> Result<bool> {
    let found = attached(cgroup)?;
    detach_all(cgroup, &found)?;
    Ok(!found.is_empty())
}

fn detach_all(cgroup: &File, found: &Attached) -> Result<()> {
    for (programs, (_, at)) in found.programs.iter().zip(PROGRAMS).rev() {
        for program in programs {
            let fd = program.fd().map_err(|e| refused("BPF_PROG_GET_FD_BY_ID", anyhow!(e)))?;
            let done = syscall::detach(cgroup.as_fd(), fd.as_fd(), at);
            done.map_err(|e| refused("BPF_PROG_DETACH", anyhow!(e)))?;
        }
    }
    Ok(())
}

/// The programs of ours that are attached to this very cgroup.
///
/// # Errors
/// The kernel does not tell.
pub fn attached(cgroup: &File) -> Result<Attached> {
    let mut found = Attached { programs: [const { Vec::new() }; PROGRAMS.len()] };
    for (place, (name, at)) in found.programs.iter_mut().zip(PROGRAMS) {
        *place = programs_at(cgroup.as_fd(), at, false)?
            .into_iter()
            .filter(|program| program.name_as_str() == Some(name))
            .collect();
    }
    Ok(found)
}

/// Other programs that see the headers of this cgroup's sockets, by name.
///
/// # Errors
/// The kernel does not tell.
pub fn others(cgroup: &File) -> Result<Vec<String>> {
    let all = programs_at(cgroup.as_fd(), AttachType::SockOps, true)?;
    let names = all.iter().map(|program| String::from_utf8_lossy(program.name()).into_owned());
    Ok(names.filter(|name| name != PROGRAMS[0].0).collect())
}

fn programs_at(
    cgroup: BorrowedFd<'_>,
    at: AttachType,
    inherited: bool,
) -> Result<Vec<ProgramInfo>> {
    let ids = syscall::attached(cgroup, at, inherited)
        .map_err(|e| refused("BPF_PROG_QUERY", anyhow!(e)))?;
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    // Programs come and go meanwhile; what is attached stays.
    Ok(loaded_programs().flatten().filter(|program| ids.contains(&program.id())).collect())
}

/// Says what the kernel refused, and what to do about it.
fn refused(step: &str, problem: anyhow::Error) -> anyhow::Error {
    let code = problem.chain().find_map(|cause| cause.downcast_ref::<io::Error>()?.raw_os_error());
    let remedy = match code {
        Some(libc::EPERM | libc::EACCES) if !rustix::process::geteuid().is_root() => {
            "run it as root (CAP_BPF and CAP_NET_ADMIN)"
        }
        Some(libc::EPERM | libc::EACCES) => {
            "this root may not (container, kernel lockdown), or a program in a cgroup above admits no others: \
             bpftool cgroup tree"
        }
        Some(libc::ENOSYS) => {
            "this kernel has no BPF; one with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF has"
        }
        Some(libc::EINVAL) => {
            "the kernel may be too old: Linux 5.15 or later, with CONFIG_CGROUP_BPF"
        }
        _ => "see usmc-ebpf(8)",
    };
    problem.context(format!("the kernel refused {step}; {remedy}"))
}
