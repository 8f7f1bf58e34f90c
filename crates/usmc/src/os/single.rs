//! Steps on memory that only this process reads. While it has one thread they need no locked instruction: what else comes
//! between are signal handlers, and these not into an instruction.

#[cfg(not(all(target_arch = "x86_64", not(any(fuzzing, miri)))))]
use usmc_shm::sync::Ordering::Release;
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};
use usmc_shm::sync::compiler_fence;
use usmc_shm::sync::{AtomicU32, AtomicU64};

use crate::os::real;

/// Whether no other thread can come between two instructions of this one.
#[inline(always)]
pub fn is_single() -> bool {
    !real::may_have_threads()
}

/// Keeps the compiler from moving what follows before what precedes, which a signal handler would see.
#[inline(always)]
pub fn in_order() {
    compiler_fence(SeqCst);
}

/// One instruction on a word, instead of what follows, where no other thread can come between.
macro_rules! alone {
    ($word:ident, $code:literal, $(let $name:ident = $init:expr,)? ($($operand:tt)*) $(=> $done:expr)?) => {
        #[cfg(all(target_arch = "x86_64", not(any(fuzzing, miri))))]
        if is_single() {
            $(let mut $name = $init;)?
            // SAFETY: an instruction on a word that we may write; no thread reads it at the same time.
            unsafe {
                core::arch::asm!($code, at = in(reg) $word.as_ptr(), $($operand)* options(nostack));
            }
            return $($done)?;
        }
    };
}

/// Adds, and returns what was there. SeqCst where there are threads.
#[inline(always)]
pub fn add(word: &AtomicU32, more: u32) -> u32 {
    alone!(word, "xadd dword ptr [{at}], {value:e}", let value = more, (value = inout(reg) value,) => value);
    word.fetch_add(more, SeqCst)
}

/// The same, less.
#[inline(always)]
pub fn sub(word: &AtomicU32, less: u32) -> u32 {
    add(word, less.wrapping_neg())
}

/// One more.
#[inline(always)]
pub fn count(word: &AtomicU64) {
    alone!(word, "inc qword ptr [{at}]", ());
    word.fetch_add(1, SeqCst);
}

/// Sets bits.
#[inline(always)]
pub fn set(word: &AtomicU32, bits: u32) {
    alone!(word, "or dword ptr [{at}], {bits:e}", (bits = in(reg) bits,));
    word.fetch_or(bits, SeqCst);
}

/// Clears bits.
#[inline(always)]
pub fn clear(word: &AtomicU32, bits: u32) {
    alone!(word, "and dword ptr [{at}], {bits:e}", (bits = in(reg) !bits,));
    word.fetch_and(!bits, SeqCst);
}

/// [`set`] or [`clear`], where the word does not say so already: a locked instruction is worth a branch.
pub fn put(word: &AtomicU32, bits: u32, on: bool) {
    let now = word.load(Relaxed) & bits;
    if on && now != bits {
        set(word, bits);
    } else if !on && now != 0 {
        clear(word, bits);
    }
}

/// Puts `to` in the place of `from`. SeqCst where there are threads.
///
/// # Errors
/// What is there instead.
#[inline(always)]
pub fn replace(word: &AtomicU64, from: u64, to: u64) -> Result<u64, u64> {
    alone!(word, "cmpxchg qword ptr [{at}], {to}", let found = from, (to = in(reg) to, inout("rax") found,)
        => if found == from { Ok(from) } else { Err(found) });
    word.compare_exchange(from, to, SeqCst, SeqCst)
}

/// Gives a lock back that `holder` has: other threads leave its word alone, and a handler comes only before or behind the
/// step, which is no locked one. False where a handler has left something there.
#[inline(always)]
pub fn give_back(word: &AtomicU64, holder: u64) -> bool {
    #[cfg(all(target_arch = "x86_64", not(any(fuzzing, miri))))]
    {
        let mut found = holder;
        // SAFETY: `cmpxchg` on a word that we may write, and nobody else while it has the holder. On x86-64 any store releases.
        unsafe {
            core::arch::asm!("cmpxchg qword ptr [{at}], {to}", at = in(reg) word.as_ptr(),
                to = in(reg) 0u64, inout("rax") found, options(nostack));
        }
        found == holder
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(fuzzing, miri)))))]
    word.compare_exchange(holder, 0, Release, Relaxed).is_ok()
}

/// [`replace`] in a word of 32 bits.
///
/// # Errors
/// As there.
#[inline(always)]
pub fn replace_u32(word: &AtomicU32, from: u32, to: u32) -> Result<u32, u32> {
    alone!(word, "cmpxchg dword ptr [{at}], {to:e}", let found = from, (to = in(reg) to, inout("eax") found,)
        => if found == from { Ok(from) } else { Err(found) });
    word.compare_exchange(from, to, SeqCst, SeqCst)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Test programs have threads, so that both ways have to be the same only where `real` says there is one; what the
    // words hold afterwards is the same either way.
    #[test]
    fn steps_do_what_their_names_say() {
        let (word, wide) = (AtomicU32::new(5), AtomicU64::new(1 << 40));
        assert_eq!((add(&word, 3), sub(&word, 1), word.load(Relaxed)), (5, 8, 7));
        set(&word, 0x18);
        clear(&word, 0x2);
        assert_eq!(word.load(Relaxed), 0x1d);
        assert_eq!(replace_u32(&word, 0x1d, 9), Ok(0x1d));
        assert_eq!(replace_u32(&word, 0x1d, 4), Err(9));
        count(&wide);
        assert_eq!(replace(&wide, 1 << 40, 0), Err((1 << 40) + 1));
        assert_eq!(replace(&wide, (1 << 40) + 1, 2), Ok((1 << 40) + 1));
        assert_eq!(wide.load(Relaxed), 2);
    }
}
