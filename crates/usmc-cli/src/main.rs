//! `usmc`: starts programs over shared memory, shows what became of their sockets, says what is in the way.
//!
//! [`cmd`] has one file per command; [`config`] is the configuration they share. The process is entered
//! without std's start-up code: `usmc run` must hand on signal dispositions and closed descriptors as it
//! got them, and std changes both before a Rust `main`.
#![cfg_attr(not(test), no_main)]
#![deny(unsafe_code)]
#![allow(unreachable_pub, reason = "nothing of a program is reached from outside")]

mod advise;
mod agent;
mod bench;
mod cmd;
mod compose;
mod config;
mod differences;
mod doorbell;
mod dump;
mod ebpf;
mod exec;
mod exporter;
mod fit;
mod groups;
mod imports;
mod ivshmem;
mod kubernetes;
mod library;
mod machine;
mod nri;
mod observed;
mod place;
mod pnet;
mod proc;
mod program;
mod regions;
mod remedies;
mod report;
mod shim;
mod sock_diag;
mod sockets;
mod steps;
mod stop;
mod suggest;
mod table;
mod tested;
mod top;
mod units;

use std::ffi::c_int;

use clap::{CommandFactory, Parser, Subcommand};

/// What every invocation may say.
#[derive(Parser)]
#[command(name = "usmc", version, about = "SMC in user space: TCP programs over shared memory")]
#[command(disable_help_subcommand = true, max_term_width = 100)]
#[command(
    after_help = "Configuration: /etc/usmc.toml, ~/.config/usmc.toml, USMC_* variables, options; \
                        the later one counts. See usmc(1) and usmc.toml(5)."
)]
struct Usmc {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(Box<cmd::run::Args>),
    Ss(cmd::ss::Args),
    Check(Box<cmd::check::Args>),
    Off(cmd::switch::OffArgs),
    On(cmd::switch::OnArgs),
    Enable(cmd::enable::Args),
    Disable(cmd::disable::Args),
    Status(cmd::status::Args),
    Advise(cmd::advise::Args),
    Bench(cmd::bench::Args),
    Ebpf(cmd::ebpf::Args),
    Dump(cmd::dump::Args),
    Stats(cmd::stats::Args),
    Exporter(cmd::exporter::Args),
    Report(cmd::report::Args),
    Top(cmd::top::Args),
    Device(cmd::device::Args),
    Linkgroup(cmd::linkgroup::Args),
    Region(cmd::region::Args),
    IvshmemServer(cmd::ivshmem_server::Args),
    Agent(Box<cmd::agent::Args>),
    Pnet(cmd::pnet::Args),
    Ueid(cmd::ueid::Args),
    Seid(cmd::seid::Args),
    Export(cmd::export::Args),
    Nri(cmd::nri::Args),
    /// Print the completion script of a shell
    Completions {
        /// bash, zsh, fish, elvish or powershell
        shell: clap_complete::Shell,
    },
}

/// Parses, runs and reports; the value is the exit status.
fn usmc() -> c_int {
    if let Some(outcome) = cmd::probe::requested() {
        return reported(outcome, 1);
    }
    if let Some(outcome) = bench::part::requested() {
        return reported(outcome, 1);
    }
    let command = match Usmc::try_parse() {
        Ok(usmc) => usmc.command,
        Err(told) => {
            match suggest::instead(&told, &Usmc::command()) {
                Some(words) => eprintln!("usmc: {words}"),
                None => drop(told.print()),
            }
            let is_run = std::env::args_os().nth(1).is_some_and(|arg| arg == "run");
            return if is_run && told.use_stderr() {
                cmd::run::OWN_FAILURE
            } else {
                told.exit_code()
            };
        }
    };
    let failure = if matches!(command, Command::Run(_)) { cmd::run::OWN_FAILURE } else { 1 };
    let outcome = match command {
        Command::Run(args) => cmd::run::run(&args),
        Command::Ss(args) => cmd::ss::run(&args),
        Command::Check(args) => cmd::check::run(&args),
        Command::Off(args) => cmd::switch::off(&args),
        Command::On(args) => cmd::switch::on(&args),
        Command::Enable(args) => cmd::enable::run(&args),
        Command::Disable(args) => cmd::disable::run(&args),
        Command::Status(args) => cmd::status::run(&args),
        Command::Advise(args) => cmd::advise::run(&args),
        Command::Ebpf(args) => cmd::ebpf::run(&args),
        Command::Dump(args) => cmd::dump::run(&args),
        Command::Stats(args) => cmd::stats::run(&args),
        Command::Exporter(args) => cmd::exporter::run(&args),
        Command::Report(args) => cmd::report::run(&args),
        Command::Top(args) => cmd::top::run(&args),
        Command::Device(args) => cmd::device::run(&args),
        Command::Linkgroup(args) => cmd::linkgroup::run(&args),
        Command::Region(args) => cmd::region::run(&args),
        Command::IvshmemServer(args) => cmd::ivshmem_server::run(&args),
        Command::Agent(args) => cmd::agent::run(&args),
        Command::Pnet(args) => cmd::pnet::run(&args),
        Command::Ueid(args) => cmd::ueid::run(&args),
        Command::Seid(args) => cmd::seid::run(&args),
        Command::Export(args) => cmd::export::run(&args),
        Command::Nri(args) => cmd::nri::run(&args),
        Command::Bench(args) => cmd::bench::run(&args),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Usmc::command(), "usmc", &mut std::io::stdout());
            Ok(0)
        }
    };
    reported(outcome, failure)
}

fn reported(outcome: anyhow::Result<c_int>, failure: c_int) -> c_int {
    outcome.unwrap_or_else(|problem| {
        eprintln!("usmc: {problem:#}");
        failure
    })
}

/// The C library's entry: what std would do first is left out on purpose, see the module.
#[cfg(not(test))]
#[expect(unsafe_code, reason = "the name `main` is the C library's contract")]
// SAFETY: no other `main` exists in this program, and this one has the C library's signature for it.
#[unsafe(no_mangle)]
extern "C" fn main() -> c_int {
    usmc()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Usmc::command().debug_assert();
        let _ = usmc;
    }
}
