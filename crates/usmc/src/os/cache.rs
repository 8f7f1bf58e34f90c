//! Cache lines that are asked for before they are needed.

/// The line at `place` is going to be read. Costs nothing where it is at hand, and is wrong nowhere.
#[inline(always)]
pub fn fetch<T>(place: *const T) {
    #[cfg(target_arch = "x86")]
    use core::arch::x86::{_MM_HINT_T0, _mm_prefetch};
    #[cfg(target_arch = "x86_64")]
    use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: no access, whatever the address is; SSE is there in both architectures' baselines here.
    #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
    unsafe {
        _mm_prefetch(place.cast::<i8>(), _MM_HINT_T0);
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "x86")))]
    let _ = place;
}
