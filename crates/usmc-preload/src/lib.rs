//! `libusmc_preload.so`: exports libc's symbols and hands each call to `usmc::api`.
//!
//! Everything that thinks lives in the `usmc` crate; here are names only ([`symbols`]), the order of
//! start-up ([`init`]) and the checks of fortified calls ([`fortified`]). std is linked for its panic
//! handler, and a panic aborts: none unwinds into a C frame.

mod fortified;
mod init;
mod interpose;
mod symbols;
