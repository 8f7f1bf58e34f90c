//! bpf(2) on the programs of a cgroup: attach, detach, list. The crate that loads programs attaches them by links, which
//! end with this process unless a bpffs is mounted to keep them; what is attached this way stays until it is detached
//! or the cgroup is removed.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Where a program is attached (enum bpf_attach_type, linux/bpf.h).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum AttachType {
    /// BPF_CGROUP_SOCK_OPS
    SockOps = 3,
    /// BPF_CGROUP_GETSOCKOPT
    Getsockopt = 21,
    /// BPF_CGROUP_SETSOCKOPT
    Setsockopt = 22,
}

const BPF_PROG_ATTACH: libc::c_int = 8;
const BPF_PROG_DETACH: libc::c_int = 9;
const BPF_PROG_QUERY: libc::c_int = 16;
/// Other programs may be attached to the same cgroup and to those below.
const BPF_F_ALLOW_MULTI: u32 = 1 << 1;
/// Those that are inherited, too.
const BPF_F_QUERY_EFFECTIVE: u32 = 1 << 0;
/// Most programs of one kind in one cgroup (BPF_CGROUP_MAX_PROGS).
const MAX_PROGRAMS: usize = 64;

/// The attributes of attach and detach.
#[repr(C)]
struct Attachment {
    target_fd: u32,
    program_fd: u32,
    attach_type: u32,
    flags: u32,
    replaced_fd: u32,
}

/// The attributes of query.
#[repr(C, align(8))]
struct Query {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<Attachment>() == 20 && size_of::<Query>() == 32);

fn bpf<T>(command: libc::c_int, attributes: &mut T) -> io::Result<()> {
    #[expect(unsafe_code, reason = "no crate has these three commands")]
    // SAFETY: each caller passes the structure of its command, at its full size; what it points to outlives the call.
    let done =
        unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size_of::<T>()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn attachment(cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>, at: AttachType) -> Attachment {
    Attachment {
        target_fd: cgroup.as_raw_fd().cast_unsigned(),
        program_fd: program.as_raw_fd().cast_unsigned(),
        attach_type: at as u32,
        flags: 0,
        replaced_fd: 0,
    }
}

/// Attaches a program beside those that are there.
///
/// # Errors
/// bpf(2)'s: EPERM also where a cgroup above has a program that admits no others.
pub fn attach(cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>, at: AttachType) -> io::Result<()> {
    let mut attributes = attachment(cgroup, program, at);
    attributes.flags = BPF_F_ALLOW_MULTI;
    bpf(BPF_PROG_ATTACH, &mut attributes)
}

/// Takes it away.
///
/// # Errors
/// bpf(2)'s.
pub fn detach(cgroup: BorrowedFd<'_>, program: BorrowedFd<'_>, at: AttachType) -> io::Result<()> {
    bpf(BPF_PROG_DETACH, &mut attachment(cgroup, program, at))
}

/// The ids of the programs attached to this very cgroup, or with `inherited` of all that see its sockets.
///
/// # Errors
/// bpf(2)'s.
pub fn attached(cgroup: BorrowedFd<'_>, at: AttachType, inherited: bool) -> io::Result<Vec<u32>> {
    // Effective ones come from every cgroup above.
    let mut ids = vec![0u32; if inherited { 16 * MAX_PROGRAMS } else { MAX_PROGRAMS }];
    let mut query = Query {
        target_fd: cgroup.as_raw_fd().cast_unsigned(),
        attach_type: at as u32,
        query_flags: if inherited { BPF_F_QUERY_EFFECTIVE } else { 0 },
        attach_flags: 0,
        ids: ids.as_mut_ptr() as u64,
        count: u32::try_from(ids.len()).unwrap_or(0),
        reserved: 0,
    };
    bpf(BPF_PROG_QUERY, &mut query)?;
    ids.truncate(query.count as usize);
    Ok(ids)
}
