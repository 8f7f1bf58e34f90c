//! A Docker daemon of a test's own (Debian's docker.io), with an image made from this machine's files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::fixture::tool;
use crate::{Fixture, Process, build};

const PROGRAMS: [&str; 3] =
    ["/usr/bin/redis-server", "/usr/bin/redis-cli", "/usr/bin/redis-benchmark"];

/// A Docker daemon of the test's own. It sets up no firewall and pulls nothing.
pub struct Docker<'a> {
    fixture: &'a Fixture,
    daemon: Process,
    socket: String,
}

impl<'a> Docker<'a> {
    /// Starts it.
    pub fn start(fixture: &'a Fixture) -> Docker<'a> {
        let dir = fixture.scratch().join("docker");
        let at = |name: &str| dir.join(name).to_string_lossy().into_owned();
        fs::create_dir(&dir).expect("our own directory");
        let socket = format!("unix://{}", at("socket"));
        let mut daemon = fixture.plain("dockerd");
        daemon.args(["--iptables=false", "--ip6tables=false", "--bridge=none"]);
        daemon.args(["--storage-driver=vfs", "--host", &socket]);
        for (option, name) in
            [("--data-root", "data"), ("--exec-root", "exec"), ("--pidfile", "pid")]
        {
            daemon.args([option, &at(name)]);
        }
        let daemon = fixture.spawn(daemon);
        fixture.wait_until("dockerd", || daemon.errors().contains("API listen on"));
        Docker { fixture, daemon, socket }
    }

    /// A command of its client.
    pub fn command(&self, args: &[&str]) -> Command {
        // There may be another one in the path.
        let mut command = self.fixture.plain("/usr/bin/docker");
        command.args(["--host", &self.socket]).args(args);
        command
    }

    /// Runs one.
    pub fn run(&self, args: &[&str]) -> String {
        self.fixture.run(self.command(args))
    }

    /// Where it listens, as DOCKER_HOST wants it.
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// Makes an image of redis, uSMC and the libraries they need, from this machine's files. It starts redis.
    pub fn import(&self) {
        let root = self.fixture.scratch().join("root");
        let usmc = build::usmc();
        let library = usmc.with_file_name("libusmc_preload.so");
        let mut files: BTreeSet<PathBuf> = PROGRAMS.iter().map(PathBuf::from).collect();
        for program in PROGRAMS.iter().map(Path::new).chain([usmc, &library]) {
            let out = tool("ldd", &[&program.to_string_lossy()]);
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            let paths = text.split_whitespace().filter(|word| word.starts_with('/'));
            files.extend(paths.map(PathBuf::from));
        }
        let mut copies: Vec<(PathBuf, PathBuf)> = files
            .iter()
            .map(|f| (f.clone(), root.join(f.strip_prefix("/").expect("absolute"))))
            .collect();
        copies.push((usmc.to_owned(), root.join("usmc/usmc")));
        copies.push((library, root.join("usmc/libusmc_preload.so")));
        for (from, to) in copies {
            fs::create_dir_all(to.parent().expect("a directory")).expect("our own directory");
            fs::copy(&from, &to).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
        }
        for dir in ["tmp", "dev", "proc", "sys"] {
            fs::create_dir_all(root.join(dir)).expect("our own directory");
        }
        let tar = self.fixture.scratch().join("root.tar").to_string_lossy().into_owned();
        let out = tool("tar", &["-C", &root.to_string_lossy(), "-cf", &tar, "."]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let path = "ENV PATH=/usr/bin";
        let start = "CMD [\"redis-server\"]";
        self.run(&["import", "--change", path, "--change", start, &tar, "usmc"]);
    }

    /// Ends it.
    ///
    /// # Panics
    /// When it does not end as it should.
    pub fn end(mut self) {
        assert!(self.daemon.terminate().success());
    }
}
