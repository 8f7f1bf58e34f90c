//! Atomics that tell a fuzz target of each access before it is made: there a hostile peer, which runs in the same
//! thread, changes the word. So it is known when it does, and a find can be repeated.

use core::mem;
use core::ptr;
use core::sync::atomic::{self as plain, Ordering};

static WATCHER: plain::AtomicPtr<()> = plain::AtomicPtr::new(ptr::null_mut());

/// `seen` is called with the address of each word before it is accessed. It uses no atomics of this crate.
pub fn watch(seen: fn(usize)) {
    WATCHER.store(seen as *mut (), Ordering::Relaxed);
}

fn tell<T>(word: &T) {
    let seen = WATCHER.load(Ordering::Relaxed);
    if !seen.is_null() {
        // SAFETY: `watch` stored a function of this type.
        let seen: fn(usize) = unsafe { mem::transmute(seen) };
        seen(ptr::from_ref(word).addr());
    }
}

macro_rules! watched {
    ($($name:ident of $value:ty;)*) => {$(
        /// The word of that name in `core`, and a word to the watcher.
        #[repr(transparent)]
        #[derive(Default, Debug)]
        #[allow(missing_docs, reason = "as in core")]
        pub struct $name(plain::$name);

        #[allow(missing_docs, clippy::missing_errors_doc, reason = "as in core")]
        impl $name {
            pub const fn new(value: $value) -> Self {
                Self(plain::$name::new(value))
            }
            watched!(@each $value;
                load(order: Ordering) -> $value;
                store(value: $value, order: Ordering) -> ();
                swap(value: $value, order: Ordering) -> $value;
                compare_exchange(from: $value, to: $value, done: Ordering, not: Ordering)
                    -> Result<$value, $value>;
                fetch_add(value: $value, order: Ordering) -> $value;
                fetch_sub(value: $value, order: Ordering) -> $value;
                fetch_or(value: $value, order: Ordering) -> $value;
                fetch_and(value: $value, order: Ordering) -> $value;
                fetch_max(value: $value, order: Ordering) -> $value;
                fetch_min(value: $value, order: Ordering) -> $value;
            );
            pub fn fetch_update(
                &self,
                done: Ordering,
                not: Ordering,
                mut new: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                let mut was = self.load(not);
                loop {
                    let Some(to) = new(was) else { return Err(was) };
                    match self.compare_exchange(was, to, done, not) {
                        Ok(was) => return Ok(was),
                        Err(now) => was = now,
                    }
                }
            }
        }
    )*};
    (@each $of:ty; $($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        pub fn $name(&self, $($arg: $ty),*) -> $ret {
            tell(self);
            self.0.$name($($arg),*)
        }
    )*};
}

watched! {
    AtomicU32 of u32;
    AtomicU64 of u64;
}
