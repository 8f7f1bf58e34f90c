//! `usmc nri`: the plugin by which containerd and CRI-O give pods the library.

use std::ffi::c_int;
use std::path::PathBuf;

use anyhow::{Result, ensure};

use crate::ivshmem::server::fill_standard_descriptors;
use crate::nri::devices::Devices;
use crate::nri::injector::Injector;
use crate::nri::{self, Runtime};
use crate::stop;

/// Bring pods of Kubernetes under uSMC, as a plugin of the node's container runtime
///
/// Gives containers of chosen pods the library and the ISM directory of their namespace when they are created. The pods are those
/// of namespaces in a list, and those with the label usmc.io/enabled: "true"; "false" keeps a pod as it is.
#[derive(clap::Args, Debug)]
#[command(after_help = "It runs in a DaemonSet: packages/kubernetes. See usmc-nri(8).")]
pub struct Args {
    /// Where the runtime's NRI is
    #[arg(long, value_name = "PATH", default_value = "/var/run/nri/nri.sock", value_hint = clap::ValueHint::FilePath)]
    socket: PathBuf,
    /// The directory on the node that `usmc export` has filled
    #[arg(long, value_name = "DIR", default_value = "/opt/usmc", value_hint = clap::ValueHint::DirPath)]
    libraries: PathBuf,
    /// Where the ISM directories of namespaces are on the node; they are made
    #[arg(long, value_name = "DIR", default_value = "/run/usmc/k8s", value_hint = clap::ValueHint::DirPath)]
    devices: PathBuf,
    /// A list of namespaces all of whose pods are chosen, one a line; read anew for each container
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    namespaces: Option<PathBuf>,
    /// A runtime handler whose pods are left alone, beside gVisor's, Kata's and the like; may be repeated
    #[arg(long, value_name = "NAME")]
    sandbox: Vec<String>,
    /// When it is asked, among other plugins: two digits
    #[arg(long, value_name = "NN", default_value = "90", value_parser = index)]
    index: String,
    /// Make the directories of the namespaces in the list only, and talk to no runtime
    #[arg(long, conflicts_with = "ready", requires = "namespaces")]
    no_runtime: bool,
    /// Say by the exit status whether a plugin is registered: 0 if so, else 1
    #[arg(long)]
    ready: bool,
}

fn index(text: &str) -> Result<String> {
    let is_index = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
    ensure!(is_index, "two digits, as 90");
    Ok(text.to_owned())
}

/// Serves until a signal comes.
///
/// # Errors
/// What is in the way, and what to do.
pub fn run(args: &Args) -> Result<c_int> {
    if args.ready {
        return Ok(c_int::from(!nri::is_registered(&args.devices)));
    }
    fill_standard_descriptors();
    for (name, dir) in [("libraries", &args.libraries), ("devices", &args.devices)] {
        ensure!(dir.is_absolute(), "--{name}: {} is no absolute path", dir.display());
    }
    let stop = stop::on_signal()?;
    let devices = Devices::new(&args.devices)?;
    let sandboxes = args.sandbox.iter().map(|name| name.to_ascii_lowercase()).collect();
    let mut injector =
        Injector::new(args.libraries.clone(), devices, args.namespaces.clone(), sandboxes);
    if args.no_runtime {
        nri::only_directories(&mut injector, &stop);
        return Ok(0);
    }
    let runtime = Runtime {
        socket: args.socket.clone(),
        index: args.index.clone(),
        devices: args.devices.clone(),
    };
    runtime.serve(&mut injector, &stop)?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_has_two_digits() {
        assert_eq!(index("07").unwrap(), "07");
        for bad in ["", "7", "100", "a1", "٣٣"] {
            assert!(index(bad).is_err(), "{bad}");
        }
    }
}
