//! Linker flags of the shared object.
//!
//! `now`: everything is bound at load time, so no call ever resolves lazily. `defs`: a symbol that libc
//! lacks stops the build, not somebody's program. `exclude-libs`: nothing of a static library is exported;
//! the rest of the export list is rustc's own (the `no_mangle` items of this crate, as a version script;
//! a second script would be an error), and `tests/exports.rs` compares it with the table.
//!
//! `lc`: the crate `libc` names the C library to the linker only where nobody wants its feature `std`, and a build of the
//! whole workspace gives all members one set of features, the one that the CLI's dependencies want.
//!
//! Not `initfirst`: glibc then runs our constructor before its own, with `environ` still null, and the
//! configuration would silently be empty. A constructor of another library that is faster than ours is
//! served by `usmc::real`, which resolves on demand.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,now,-z,defs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
    println!("cargo::rustc-cdylib-link-arg=-lc");
    println!("cargo::rerun-if-changed=build.rs");
}
