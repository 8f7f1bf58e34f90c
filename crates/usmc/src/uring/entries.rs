//! An entry of a submission queue, and what it is about.

/// `struct io_uring_sqe` (include/uapi/linux/io_uring.h), by the names of the members that are used here.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sqe {
    /// `IORING_OP_*`
    pub opcode: u8,
    /// `IOSQE_*`
    pub flags: u8,
    /// Request's priority.
    pub ioprio: u16,
    /// The descriptor, or the index of a registered file.
    pub fd: i32,
    /// An offset; epoll_ctl's descriptor.
    pub off: u64,
    /// A buffer, a message, epoll_ctl's event.
    pub addr: u64,
    /// A length; epoll_ctl's operation.
    pub len: u32,
    /// Flags of the operation.
    pub op_flags: u32,
    /// Comes back with the result.
    pub user_data: u64,
    /// A buffer's index or group.
    pub buf_index: u16,
    /// Credentials.
    pub personality: u16,
    /// splice's other descriptor; a place among registered files, from 1 on.
    pub other: i32,
    /// Another address, and what is reserved.
    pub rest: [u64; 2],
}

const _: () = assert!(size_of::<Sqe>() == 64 && core::mem::offset_of!(Sqe, other) == 44);

/// Bytes from one entry to the next in a ring with these flags.
pub fn size(setup_flags: u32) -> usize {
    size_of::<Sqe>() << u32::from(setup_flags & super::SETUP_SQE128 != 0)
}

/// `fd` is the index of a registered file.
pub const FIXED_FILE: u8 = 1 << 0;
/// IOSQE_IO_LINK: the next entry is cancelled if this one fails. (IOSQE_IO_HARDLINK is another flag.)
pub const LINK: u8 = 1 << 2;
/// splice's other descriptor is the index of a registered file.
const SPLICE_FD_IN_FIXED: u32 = 1 << 31;

/// IORING_OP_NOP
pub const NOP: u8 = 0;
const SENDMSG: u8 = 9;
const CLOSE: u8 = 19;
const FILES_UPDATE: u8 = 20;
const EPOLL_CTL: u8 = 29;
const SPLICE: u8 = 30;
const TEE: u8 = 33;
const SENDMSG_ZC: u8 = 48;

/// Operations that take no socket: `fd` means nothing, a directory, a ring, a count.
const WITHOUT_SOCKET: &[u8] = &[
    NOP, 7,  // POLL_REMOVE
    11, // TIMEOUT
    12, // TIMEOUT_REMOVE
    14, // ASYNC_CANCEL
    15, // LINK_TIMEOUT
    18, // OPENAT
    21, // STATX
    25, // MADVISE
    28, // OPENAT2
    31, // PROVIDE_BUFFERS
    32, // REMOVE_BUFFERS
    35, // RENAMEAT
    36, // UNLINKAT
    37, // MKDIRAT
    38, // SYMLINKAT
    39, // LINKAT
    40, // MSG_RING
    42, // SETXATTR
    44, // GETXATTR
    45, // SOCKET
    50, // WAITID
    51, // FUTEX_WAIT
    52, // FUTEX_WAKE
    53, // FUTEX_WAITV
    54, // FIXED_FD_INSTALL
    62, // PIPE
    63, // NOP128
];

/// What an entry is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum About {
    /// No descriptor that the library could know.
    Nothing,
    /// The kernel uses these descriptors; -1 is none.
    Files([i32; 2]),
    /// A message, which may pass descriptors on.
    Message {
        /// By which; -1 is a registered file.
        via: i32,
        /// Its address.
        at: u64,
    },
    /// An array of descriptors becomes registered files.
    Registers {
        /// Its address.
        at: u64,
        /// How many.
        count: u32,
    },
    /// The number is closed.
    Close(i32),
    /// epoll_ctl(2)
    EpollCtl,
}

/// What `sqe` is about. What is not known is taken for something that uses its descriptor.
pub fn about(sqe: &Sqe) -> About {
    let fd = if sqe.flags & FIXED_FILE == 0 { sqe.fd } else { -1 };
    match sqe.opcode {
        EPOLL_CTL => About::EpollCtl,
        CLOSE if sqe.other == 0 => About::Close(sqe.fd),
        CLOSE => About::Nothing,
        SENDMSG | SENDMSG_ZC => About::Message { via: fd, at: sqe.addr },
        FILES_UPDATE => About::Registers { at: sqe.addr, count: sqe.len },
        SPLICE | TEE if sqe.op_flags & SPLICE_FD_IN_FIXED == 0 => About::Files([fd, sqe.other]),
        other if WITHOUT_SOCKET.contains(&other) => About::Nothing,
        _ if fd == -1 => About::Nothing,
        _ => About::Files([fd, -1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_found_where_operations_have_them() {
        let sqe = |opcode, fd| Sqe { opcode, fd, other: 8, addr: 64, len: 3, ..Sqe::default() };
        assert_eq!(about(&sqe(NOP, 5)), About::Nothing);
        // READV, RECV, ACCEPT, POLL_ADD, URING_CMD, and one that does not exist yet.
        for opcode in [1, 27, 13, 6, 46, 200] {
            assert_eq!(about(&sqe(opcode, 5)), About::Files([5, -1]), "{opcode}");
            let fixed = Sqe { flags: FIXED_FILE, ..sqe(opcode, 5) };
            assert_eq!(about(&fixed), About::Nothing, "{opcode}");
        }
        assert_eq!(about(&sqe(SPLICE, 5)), About::Files([5, 8]));
        let fixed = Sqe { op_flags: SPLICE_FD_IN_FIXED, ..sqe(SPLICE, 5) };
        assert_eq!(about(&fixed), About::Files([5, -1]));
        assert_eq!(about(&sqe(CLOSE, 5)), About::Nothing, "a registered file");
        assert_eq!(about(&Sqe { other: 0, ..sqe(CLOSE, 5) }), About::Close(5));
        assert_eq!(about(&sqe(SENDMSG, 5)), About::Message { via: 5, at: 64 });
        assert_eq!(about(&sqe(FILES_UPDATE, 5)), About::Registers { at: 64, count: 3 });
    }
}
