//! A network of virtual machines and of this one: a bridge in a network namespace of its own.

use std::path::Path;
use std::process::Command;

use crate::fixture::{Fixture, tool};

/// The namespace, with a bridge that has an address. Gone when dropped.
pub struct Lan {
    name: String,
}

impl Lan {
    /// Makes it; `host` is its own last number, 10.0.0.`host`.
    ///
    /// # Panics
    /// When that is not permitted.
    pub fn new(host: usize) -> Lan {
        let lan = Lan { name: format!("usmc-{}-lan", std::process::id()) };
        ip(&["netns", "add", &lan.name]);
        lan.ip(&["link", "set", "lo", "up"]);
        lan.ip(&["link", "add", "bridge", "type", "bridge"]);
        lan.ip(&["addr", "add", &format!("10.0.0.{host}/24"), "dev", "bridge"]);
        lan.ip(&["link", "set", "bridge", "up"]);
        lan
    }

    fn ip(&self, args: &[&str]) {
        ip(&[&["-n", &self.name], args].concat());
    }

    /// The device of one more machine, for QEMU to open.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn plug(&self, number: usize) -> String {
        let name = format!("tap{number}");
        self.ip(&["tuntap", "add", "dev", &name, "mode", "tap"]);
        self.ip(&["link", "set", &name, "master", "bridge", "up"]);
        name
    }

    /// The beginning of a command that runs in it, and never under uSMC.
    pub fn plain(&self, fixture: &Fixture) -> Command {
        let mut command = fixture.plain(Path::new("ip"));
        command.args(["netns", "exec", &self.name]);
        command
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}

fn ip(args: &[&str]) {
    let out = tool("ip", args);
    assert!(out.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&out.stderr));
}
