//! QEMU's monitor (its docs/interop/qmp-spec.rst): commands to a virtual machine, and what it says of them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// No answer takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to one machine's monitor.
pub struct Monitor {
    lines: BufReader<UnixStream>,
}

impl Monitor {
    /// Connects to the monitor at this socket.
    ///
    /// # Panics
    /// Without one.
    pub fn connect(path: &Path) -> Monitor {
        let stream = UnixStream::connect(path).expect("a monitor");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time");
        let mut monitor = Monitor { lines: BufReader::new(stream) };
        monitor.next(|said| said.get("QMP").is_some());
        monitor.ask("qmp_capabilities", json!({}));
        monitor
    }

    /// The next that is meant; all others are forgotten.
    fn next(&mut self, is_meant: impl Fn(&Value) -> bool) -> Value {
        loop {
            let mut line = String::new();
            self.lines.read_line(&mut line).expect("the monitor's answer");
            let said: Value = serde_json::from_str(&line).expect("JSON");
            assert!(said.get("error").is_none(), "{said}");
            if is_meant(&said) {
                return said;
            }
        }
    }

    /// A command, which has to succeed.
    ///
    /// # Panics
    /// When it does not.
    pub fn ask(&mut self, command: &str, arguments: Value) {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        self.lines.get_mut().write_all(line.as_bytes()).expect("the monitor");
        self.next(|said| said.get("return").is_some());
    }

    /// Takes a device out of the machine, and waits until its kernel has let go of it.
    ///
    /// # Panics
    /// When that does not happen.
    pub fn unplug(&mut self, id: &str) {
        self.ask("device_del", json!({ "id": id }));
        self.next(|said| said["event"] == "DEVICE_DELETED" && said["data"]["device"] == id);
    }
}
