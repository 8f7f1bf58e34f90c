//! Calls into a higher layer: what a value of a lower one does at its end. The higher layer's function is set when the library starts.

use core::marker::PhantomData;
use core::{mem, ptr};
use usmc_shm::sync::AtomicPtr;
use usmc_shm::sync::Ordering::Relaxed;

/// A function that a higher layer gives.
pub struct Hook<A>(AtomicPtr<()>, PhantomData<fn(A)>);

impl<A> Hook<A> {
    /// None yet.
    pub const fn new() -> Hook<A> {
        Hook(AtomicPtr::new(ptr::null_mut()), PhantomData)
    }

    /// It is this one from now on.
    pub fn set(&self, function: fn(A)) {
        self.0.store(function as *mut (), Relaxed);
    }

    /// Calls it, if there is one.
    #[cold]
    pub fn call(&self, with: A) {
        let function = self.0.load(Relaxed);
        if !function.is_null() {
            // SAFETY: `set` has stored a function of this type, and nothing else writes the pointer.
            let function: fn(A) = unsafe { mem::transmute(function) };
            function(with);
        }
    }
}

#[cfg(test)]
mod tests {
    use usmc_shm::sync::AtomicU32;

    use super::*;

    #[test]
    fn a_hook_calls_what_was_set() {
        static SEEN: AtomicU32 = AtomicU32::new(0);
        let hook = Hook::<(u32, u32)>::new();
        hook.call((1, 2));
        assert_eq!(SEEN.load(Relaxed), 0);
        hook.set(|(a, b)| SEEN.store(10 * a + b, Relaxed));
        hook.call((3, 4));
        assert_eq!(SEEN.load(Relaxed), 34);
    }
}
