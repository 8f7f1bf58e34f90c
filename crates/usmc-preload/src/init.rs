//! Start and end. `.init_array` runs before main and after libc is ready; nothing else is done at start
//! than resolving symbols and reading the environment, so a program that opens no socket pays for nothing.

extern "C" fn start() {
    // SAFETY: the dynamic linker calls constructors once, before other threads exist.
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
