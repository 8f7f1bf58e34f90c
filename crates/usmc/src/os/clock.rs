//! Cheap time and place: the cycle counter, the CPU we run on, and milliseconds for timeouts.

#[cfg(target_arch = "x86")]
use core::arch::x86 as arch;
#[cfg(target_arch = "x86_64")]
use core::arch::x86_64 as arch;

/// The cycle counter. Only differences mean anything.
#[inline(always)]
pub fn tsc() -> u64 {
    #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
    // SAFETY: rdtsc is available on every x86 CPU Linux lets user space run on (unless PR_SET_TSC).
    unsafe {
        arch::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let v: u64;
        // SAFETY: the virtual counter is readable from user space on Linux.
        unsafe { core::arch::asm!("mrs {}, cntvct_el0", out(reg) v, options(nomem, nostack)) };
        v
    }
}

/// The CPU this thread runs on, plus one.
#[inline(always)]
pub fn cpu() -> u32 {
    #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
    {
        let mut aux = 0;
        // SAFETY: rdtscp exists on every CPU since 2008; Linux keeps the CPU in bits 0-11 of its aux.
        let _ = unsafe { arch::__rdtscp(&mut aux) };
        (aux & 0xfff) + 1
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "x86")))]
    {
        // SAFETY: no pointers.
        (unsafe { libc::sched_getcpu() }) as u32 + 1
    }
}

fn read(clock: libc::clockid_t) -> u64 {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: ts is writable.
    unsafe { libc::clock_gettime(clock, &mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

/// CLOCK_MONOTONIC in nanoseconds (vDSO, no system call).
#[cfg(not(fuzzing))]
pub fn now_ns() -> u64 {
    read(libc::CLOCK_MONOTONIC)
}

/// CLOCK_MONOTONIC in milliseconds, from 0 again after seven weeks.
pub fn now_ms() -> u32 {
    (now_ns() / 1_000_000) as u32
}

/// CLOCK_REALTIME in nanoseconds (vDSO, no system call).
pub fn wall_ns() -> u64 {
    read(libc::CLOCK_REALTIME)
}

/// Each look at the clock takes 10 ms, so that a wait for a peer with a limit is soon over.
#[cfg(fuzzing)]
pub fn now_ns() -> u64 {
    use usmc_shm::sync::{AtomicUsize, Ordering::Relaxed};
    static LOOKS: AtomicUsize = AtomicUsize::new(1);
    LOOKS.fetch_add(1, Relaxed) as u64 * 10_000_000
}
