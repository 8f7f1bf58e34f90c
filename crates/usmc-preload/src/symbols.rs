//! One line per libc symbol. Twins (`64`, `__`) lead to the same function.
//!
//! Variadic functions are defined with fixed integer arguments (those behind the `;`), which x86-64 and
//! arm64 Linux pass in the same registers, and i386 in the same places of the stack; a function that reads an
//! argument the caller did not pass sees a stale one and hands it on unread, as libc's own definition does. It
//! must not write there: on i386 the place is the caller's (`tests/abi.c` looks).
//!
//! What 32-bit machines have besides is in `symbols_narrow.rs`.
//!
//! What is deliberately absent, and why, is the allow-list of `tests/exports.rs`.

use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use libc::{
    FILE, aiocb, epoll_event, fd_set, iovec, loff_t, mmsghdr, msghdr, nfds_t, off_t, off64_t,
    pid_t, pollfd, posix_spawn_file_actions_t, posix_spawnattr_t,
};
use libc::{
    sigaction as Sigaction, sigevent, sighandler_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t,
};
use libc::{timespec, timeval};
use usmc::api::UringOfLiburing as Ring;

use crate::by_number::export as syscall;
use crate::interpose::{fortified, interpose};
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
use crate::variadic::variadic;

interpose! {
    socket(family: c_int, kind: c_int, protocol: c_int) -> c_int = socket: socket;
    __socket(family: c_int, kind: c_int, protocol: c_int) -> c_int = socket;
    socketpair(family: c_int, kind: c_int, protocol: c_int, out: *mut c_int) -> c_int = socketpair;
    connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int = connect: connect;
    __connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int = connect;
    bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int = bind: bind;
    listen(fd: c_int, backlog: c_int) -> c_int = listen: listen;
    accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int = accept: accept;
    accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int
        = accept4: accept4;
    getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int = getsockname: getsockname;
    getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int = getpeername: getpeername;
    sockatmark(fd: c_int) -> c_int = sockatmark;
    shutdown(fd: c_int, how: c_int) -> c_int = shutdown: shutdown;
    close(fd: c_int) -> c_int = close: close;
    __close(fd: c_int) -> c_int = close;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int = close_range: close_range;
    closefrom(first: c_int) = closefrom;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int
        = getsockopt: getsockopt;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int
        = setsockopt: setsockopt;

    read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t = read: read;
    __read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t = read;
    readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t = readv: readv;
    recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t = recv: recv;
    __recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t = recv;
    recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, addr: *mut sockaddr,
        addr_len: *mut socklen_t) -> ssize_t = recvfrom: recvfrom;
    recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t = recvmsg: recvmsg;
    recvmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec)
        -> c_int = recvmmsg: recvmmsg;
    preadv(fd: c_int, iov: *const iovec, count: c_int, at: off_t) -> ssize_t = preadv: preadv;
    preadv64(fd: c_int, iov: *const iovec, count: c_int, at: off64_t) -> ssize_t = preadv: preadv64;
    preadv2(fd: c_int, iov: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t
        = preadv2: preadv2;
    preadv64v2(fd: c_int, iov: *const iovec, count: c_int, at: off64_t, flags: c_int) -> ssize_t
        = preadv2: preadv64v2;

    write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t = write: write;
    __write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t = write;
    writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t = writev: writev;
    send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t = send: send;
    __send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t = send;
    sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, addr: *const sockaddr,
        addr_len: socklen_t) -> ssize_t = sendto: sendto;
    sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t = sendmsg: sendmsg;
    sendmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int = sendmmsg: sendmmsg;
    __sendmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int = sendmmsg;
    pwritev(fd: c_int, iov: *const iovec, count: c_int, at: off_t) -> ssize_t = pwritev: pwritev;
    pwritev64(fd: c_int, iov: *const iovec, count: c_int, at: off64_t) -> ssize_t = pwritev: pwritev64;
    pwritev2(fd: c_int, iov: *const iovec, count: c_int, at: off_t, flags: c_int) -> ssize_t
        = pwritev2: pwritev2;
    pwritev64v2(fd: c_int, iov: *const iovec, count: c_int, at: off64_t, flags: c_int) -> ssize_t
        = pwritev2: pwritev64v2;
    sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t
        = sendfile: sendfile;
    sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t
        = sendfile64: sendfile64;
    splice(from: c_int, from_off: *mut loff_t, to: c_int, to_off: *mut loff_t, len: size_t,
        flags: c_uint) -> ssize_t = splice: splice;
    tee(from: c_int, to: c_int, len: size_t, flags: c_uint) -> ssize_t = tee: tee;
    vmsplice(fd: c_int, iov: *const iovec, count: size_t, flags: c_uint) -> ssize_t = vmsplice: vmsplice;
    copy_file_range(from: c_int, from_off: *mut loff_t, to: c_int, to_off: *mut loff_t, len: size_t,
        flags: c_uint) -> ssize_t = copy_file_range: copy_file_range;
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE = fdopen: fdopen;
    _IO_fdopen(fd: c_int, mode: *const c_char) -> *mut FILE = fdopen;
    fclose(stream: *mut FILE) -> c_int = fclose: fclose;
    _IO_fclose(stream: *mut FILE) -> c_int = fclose;
    freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE
        = freopen: freopen;
    freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE
        = freopen64: freopen64;
    perror(what: *const c_char) = perror;
    vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int = vdprintf;
    __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int
        = vdprintf_chk;

    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int = poll: poll;
    __poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int = poll;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int
        = ppoll: ppoll;
    select(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval)
        -> c_int = select: select;
    __select(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval)
        -> c_int = select;
    pselect(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t) -> c_int = pselect: pselect;
    epoll_create(size: c_int) -> c_int = epoll_create: epoll_create;
    epoll_create1(flags: c_int) -> c_int = epoll_create1: epoll_create1;
    epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int
        = epoll_ctl: epoll_ctl;
    epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int
        = epoll_wait: epoll_wait;
    epoll_pwait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int,
        mask: *const sigset_t) -> c_int = epoll_pwait: epoll_pwait;
    epoll_pwait2(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec,
        mask: *const sigset_t) -> c_int = epoll_pwait2: epoll_pwait2;

    fcntl(fd: c_int, cmd: c_int; arg: c_ulong) -> c_int = fcntl: fcntl;
    fcntl64(fd: c_int, cmd: c_int; arg: c_ulong) -> c_int = fcntl64;
    __fcntl(fd: c_int, cmd: c_int; arg: c_ulong) -> c_int = fcntl;
    ioctl(fd: c_int, request: c_ulong; arg: c_ulong) -> c_int = ioctl: ioctl;
    prctl(option: c_int; a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int = prctl: prctl;
    dup(fd: c_int) -> c_int = dup: dup;
    dup2(old: c_int, new: c_int) -> c_int = dup2: dup2;
    __dup2(old: c_int, new: c_int) -> c_int = dup2;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int = dup3: dup3;
    pthread_atfork(prepare: *mut c_void, parent: *mut c_void, child: *mut c_void) -> c_int = atfork;
    __register_atfork(prepare: *mut c_void, parent: *mut c_void, child: *mut c_void,
        library: *mut c_void) -> c_int = register_atfork;
    _Fork() -> pid_t = fork_without_handlers;
    vfork() -> pid_t = vfork;
    __vfork() -> pid_t = vfork;
    clone(start: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void; parent_tid: c_ulong,
        tls: c_ulong, child_tid: c_ulong) -> c_int = clone;
    __clone(start: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void; parent_tid: c_ulong,
        tls: c_ulong, child_tid: c_ulong) -> c_int = clone;
    unshare(flags: c_int) -> c_int = unshare: unshare;
    setns(fd: c_int, kind: c_int) -> c_int = setns: setns;
    daemon(nochdir: c_int, noclose: c_int) -> c_int = daemon: daemon;
    _exit(status: c_int) = exit_now;
    _Exit(status: c_int) = exit_now;
    execve(path: *const c_char, argv: *const *const c_char, env: *const *const c_char) -> c_int
        = execve: execve;
    execv(path: *const c_char, argv: *const *const c_char) -> c_int = execv: execv;
    execvp(file: *const c_char, argv: *const *const c_char) -> c_int = execvp: execvp;
    execvpe(file: *const c_char, argv: *const *const c_char, env: *const *const c_char) -> c_int
        = execvpe: execvpe;
    fexecve(fd: c_int, argv: *const *const c_char, env: *const *const c_char) -> c_int
        = fexecve: fexecve;
    execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, env: *const *const c_char,
        flags: c_int) -> c_int = execveat;

    sigaction(signal: c_int, new: *const Sigaction, old: *mut Sigaction) -> c_int = sigaction: sigaction;
    __sigaction(signal: c_int, new: *const Sigaction, old: *mut Sigaction) -> c_int = sigaction;
    signal(number: c_int, handler: sighandler_t) -> sighandler_t = signal: signal;
    bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t = signal;
    ssignal(number: c_int, handler: sighandler_t) -> sighandler_t = signal;
    sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t = sysv_signal;
    __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t = sysv_signal;
    siginterrupt(number: c_int, flag: c_int) -> c_int = siginterrupt;

    open(path: *const c_char, flags: c_int; mode: c_uint) -> c_int = open: open;
    open64(path: *const c_char, flags: c_int; mode: c_uint) -> c_int = open64: open64;
    __open(path: *const c_char, flags: c_int; mode: c_uint) -> c_int = open;
    __open64(path: *const c_char, flags: c_int; mode: c_uint) -> c_int = open64;
    openat(dir: c_int, path: *const c_char, flags: c_int; mode: c_uint) -> c_int = openat: openat;
    openat64(dir: c_int, path: *const c_char, flags: c_int; mode: c_uint) -> c_int = openat64: openat64;
    creat(path: *const c_char, mode: c_uint) -> c_int = creat: creat;
    creat64(path: *const c_char, mode: c_uint) -> c_int = creat64: creat64;
    open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int = open_by_handle_at;
    mkstemp(template: *mut c_char) -> c_int = mkstemp: mkstemp;
    mkstemp64(template: *mut c_char) -> c_int = mkstemp64;
    mkostemp(template: *mut c_char, flags: c_int) -> c_int = mkostemp: mkostemp;
    mkostemp64(template: *mut c_char, flags: c_int) -> c_int = mkostemp64;
    mkstemps(template: *mut c_char, suffix: c_int) -> c_int = mkstemps: mkstemps;
    mkstemps64(template: *mut c_char, suffix: c_int) -> c_int = mkstemps64;
    mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int = mkostemps: mkostemps;
    mkostemps64(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int = mkostemps64;
    pipe(out: *mut c_int) -> c_int = pipe: pipe;
    __pipe(out: *mut c_int) -> c_int = pipe;
    pipe2(out: *mut c_int, flags: c_int) -> c_int = pipe2: pipe2;
    eventfd(value: c_uint, flags: c_int) -> c_int = eventfd: eventfd;
    timerfd_create(clock: c_int, flags: c_int) -> c_int = timerfd_create: timerfd_create;
    signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int = signalfd: signalfd;
    inotify_init() -> c_int = inotify_init: inotify_init;
    inotify_init1(flags: c_int) -> c_int = inotify_init1: inotify_init1;
    memfd_create(name: *const c_char, flags: c_uint) -> c_int = memfd_create: memfd_create;
    fanotify_init(flags: c_uint, event_flags: c_uint) -> c_int = fanotify_init: fanotify_init;
    pidfd_open(pid: pid_t, flags: c_uint) -> c_int = pidfd_open;
    pidfd_getfd(pidfd: c_int, fd: c_int, flags: c_uint) -> c_int = pidfd_getfd;
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char) -> c_int
        = posix_spawn: posix_spawn;
    posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char) -> c_int
        = posix_spawnp: posix_spawnp;
    pidfd_spawn(pidfd: *mut c_int, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char) -> c_int
        = pidfd_spawn;
    pidfd_spawnp(pidfd: *mut c_int, file: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char) -> c_int
        = pidfd_spawnp;
    popen(command: *const c_char, mode: *const c_char) -> *mut FILE = popen: popen;
    _IO_popen(command: *const c_char, mode: *const c_char) -> *mut FILE = popen;
    system(command: *const c_char) -> c_int = system: system;

    aio_read(control: *mut aiocb) -> c_int = aio_read: aio_read;
    aio_read64(control: *mut aiocb) -> c_int = aio_read64;
    aio_write(control: *mut aiocb) -> c_int = aio_write: aio_write;
    aio_write64(control: *mut aiocb) -> c_int = aio_write64;
    lio_listio(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int
        = lio_listio: lio_listio;
    lio_listio64(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int
        = lio_listio64;
    backtrace_symbols_fd(addresses: *const *mut c_void, count: c_int, fd: c_int) = backtrace_symbols_fd;
    __backtrace_symbols_fd(addresses: *const *mut c_void, count: c_int, fd: c_int) = backtrace_symbols_fd;

    // liburing's and libaio's, not libc's.
    io_submit(context: *mut c_void, count: c_long, list: *const c_void) -> c_int = io_submit;
    io_uring_setup(entries: c_uint, params: *mut c_void) -> c_int = io_uring_setup;
    io_uring_queue_init(entries: c_uint, ring: *mut Ring, flags: c_uint) -> c_int = io_uring_queue_init;
    io_uring_queue_init_params(entries: c_uint, ring: *mut Ring, params: *mut c_void) -> c_int
        = io_uring_queue_init_params;
    io_uring_queue_init_mem(entries: c_uint, ring: *mut Ring, params: *mut c_void, buf: *mut c_void,
        size: size_t) -> c_int = io_uring_queue_init_mem;
    io_uring_queue_exit(ring: *mut Ring) = io_uring_queue_exit;
    io_uring_submit(ring: *mut Ring) -> c_int = io_uring_submit;
    io_uring_submit_and_wait(ring: *mut Ring, count: c_uint) -> c_int = io_uring_submit_and_wait;
    io_uring_submit_and_wait_timeout(ring: *mut Ring, cqe: *mut c_void, count: c_uint, time: *mut c_void,
        mask: *mut c_void) -> c_int = io_uring_submit_and_wait_timeout;
    io_uring_submit_and_wait_min_timeout(ring: *mut Ring, cqe: *mut c_void, count: c_uint, time: *mut c_void,
        least: c_uint, mask: *mut c_void) -> c_int = io_uring_submit_and_wait_min_timeout;
    io_uring_submit_and_wait_reg(ring: *mut Ring, cqe: *mut c_void, count: c_uint, place: c_int) -> c_int
        = io_uring_submit_and_wait_reg;
    io_uring_submit_and_get_events(ring: *mut Ring) -> c_int = io_uring_submit_and_get_events;
    io_uring_wait_cqes(ring: *mut Ring, cqe: *mut c_void, count: c_uint, time: *mut c_void, mask: *mut c_void)
        -> c_int = io_uring_wait_cqes;
    io_uring_wait_cqe_timeout(ring: *mut Ring, cqe: *mut c_void, time: *mut c_void) -> c_int
        = io_uring_wait_cqe_timeout;
    io_uring_enter(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, mask: *mut c_void) -> c_int
        = io_uring_enter;
    io_uring_enter2(fd: c_uint, submit: c_uint, wait: c_uint, flags: c_uint, arg: *mut c_void, size: size_t)
        -> c_int = io_uring_enter2;
    io_uring_register(fd: c_uint, opcode: c_uint, arg: *const c_void, count: c_uint) -> c_int
        = io_uring_register;
    io_uring_register_files(ring: *mut Ring, fds: *const c_int, count: c_uint) -> c_int
        = io_uring_register_files;
    io_uring_register_files_tags(ring: *mut Ring, fds: *const c_int, tags: *const c_void, count: c_uint)
        -> c_int = io_uring_register_files_tags;
    io_uring_register_files_update(ring: *mut Ring, from: c_uint, fds: *const c_int, count: c_uint) -> c_int
        = io_uring_register_files_update;
    io_uring_register_files_update_tag(ring: *mut Ring, from: c_uint, fds: *const c_int,
        tags: *const c_void, count: c_uint) -> c_int = io_uring_register_files_update_tag;
}

fortified! {
    __read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t
        = read(fd, buf, len) if len <= size;
    __recv_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int) -> ssize_t
        = recv(fd, buf, len, flags) if len <= size;
    __recvfrom_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int,
        addr: *mut sockaddr, addr_len: *mut socklen_t) -> ssize_t
        = recvfrom(fd, buf, len, flags, addr, addr_len) if len <= size;
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int
        = poll(fds, count, timeout) if count as usize <= size / size_of::<pollfd>();
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        size: size_t) -> c_int
        = ppoll(fds, count, timeout, mask) if count as usize <= size / size_of::<pollfd>();
    __open_2(path: *const c_char, flags: c_int) -> c_int
        = open(path, flags, 0) if needs_no_mode(flags);
    __open64_2(path: *const c_char, flags: c_int) -> c_int
        = open64(path, flags, 0) if needs_no_mode(flags);
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int
        = openat(dir, path, flags, 0) if needs_no_mode(flags);
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int
        = openat64(dir, path, flags, 0) if needs_no_mode(flags);
}

/// open(2) takes a mode only where it may create a file.
fn needs_no_mode(flags: c_int) -> bool {
    flags & libc::O_CREAT == 0 && flags & libc::O_TMPFILE != libc::O_TMPFILE
}

#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
variadic! {
    execl(path: *const c_char; ...) -> c_int = execl;
    execlp(file: *const c_char; ...) -> c_int = execlp;
    execle(path: *const c_char; ...) -> c_int = execle;
    dprintf(fd: c_int, format: *const c_char; ...) -> c_int = vdprintf;
    __dprintf_chk(fd: c_int, flag: c_int, format: *const c_char; ...) -> c_int = vdprintf_chk;
}

syscall! { syscall; }
