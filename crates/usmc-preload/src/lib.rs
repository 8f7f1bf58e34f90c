//! `libusmc_preload.so`: exports libc's symbols and hands each call to `usmc::api`.
//!
//! Everything that thinks lives in the `usmc` crate; here are names only ([`symbols`]), the ways a name is
//! exported ([`interpose`], [`variadic`], [`jump`]), calls made by number ([`by_number`]) and the order of start-up
//! ([`init`]).
//!
//! The shared object links neither std nor libgcc_s: it needs no malloc and no thread-local storage, and
//! loading it costs a third. (`cargo test` compiles it with unwinding, which needs std; nobody loads that.)
#![cfg_attr(panic = "abort", no_std)]

mod by_number;
#[cfg(target_arch = "x86")]
mod by_number_i386;
mod init;
mod interpose;
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
mod jump;
#[cfg(panic = "abort")]
mod panic;
mod symbols;
#[cfg(target_arch = "x86")]
mod symbols_narrow;
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
mod variadic;

// The libc crate leaves this to std where another crate of the same build asks for its feature `std`.
#[link(name = "c")]
unsafe extern "C" {}
