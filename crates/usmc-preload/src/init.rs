//! Start and end. `.init_array` runs before main, after libc is ready; done at start: resolving
//! symbols, reading the environment, and one look through the open fds for listeners that came by exec.
//!
//! Order, as glibc runs it: libc; the libraries the program is linked with; this one; main. What those
//! libraries' constructors call is served, as plain TCP, by functions that are resolved on demand.

extern "C" fn start() {
    // SAFETY: the dynamic linker calls constructors once, before the program's own threads exist.
    unsafe { usmc::init() };
}

extern "C" fn end() {
    usmc::exit();
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;
