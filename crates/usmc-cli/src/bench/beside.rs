//! Programs that compute beside those that are measured.

use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use super::part::NAME;
use super::part::spec::{Address, Role, Spec, Wait};
use crate::library;

/// The programs end when this value is dropped.
pub struct Beside(Vec<Child>);

impl Beside {
    /// Starts so many. They never sleep.
    ///
    /// # Errors
    /// When this program cannot be started again.
    pub fn start(count: usize) -> Result<Beside> {
        let spec = Spec {
            at: Address::LOCAL,
            request: 0,
            answer: 0,
            chunk: 0,
            wait: Wait::Busy,
            cpus: Vec::new(),
            role: Role::Compute,
        };
        let spec = serde_json::to_string(&spec).context("JSON")?;
        let file = library::dynamic_self()?;
        let mut all = Beside(Vec::new());
        for _ in 0..count {
            let mut command = Command::new(&file);
            command.args([NAME, &spec]).stdin(Stdio::null()).stdout(Stdio::null());
            all.0.push(command.spawn().context("cannot start a program that computes")?);
        }
        Ok(all)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
