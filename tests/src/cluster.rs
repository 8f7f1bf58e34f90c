//! A database cluster of PostgreSQL for virtual machines. This host makes it, which is faster.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::vm::Guest;
use crate::{Fixture, build};

/// Where its server listens.
pub const PORT: u16 = 5432;
/// pgbench's connections.
pub const CLIENTS: usize = 4;
/// The user of servers and clients, who has no rights of root's.
pub const USER: u32 = 65534;

/// A file that is removed when dropped.
pub struct Cluster(PathBuf);

/// Where the cluster is, beside what the machines boot: they see files of the host's root, and not of its /tmp.
pub fn file(image: &Path) -> PathBuf {
    image.join("postgres.tar")
}

impl Cluster {
    /// A cluster that other machines may log in to. `None`: PostgreSQL is not installed.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn new(fixture: &Fixture, image: &Path) -> Option<Cluster> {
        let bin = build::postgres_dir()?;
        // SAFETY: geteuid(2) always succeeds.
        let root = unsafe { libc::geteuid() } == 0;
        let place = fixture.scratch().join("cluster");
        fs::create_dir(&place).expect("a directory");
        let data = place.join("data");
        let mut init = if root {
            chown(&place, Some(USER), Some(USER)).expect("chown");
            let mut command = Command::new("setpriv");
            let user = USER.to_string();
            command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
            command.arg(bin.join("initdb"));
            command
        } else {
            Command::new(bin.join("initdb"))
        };
        init.args(["-A", "trust", "-U", "postgres", "--no-sync", "-D"]).arg(&data);
        let done = init.current_dir(&place).output().expect("initdb");
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let rules = data.join("pg_hba.conf");
        let text = fs::read_to_string(&rules).expect("its rules");
        fs::write(&rules, text + "host all all 10.0.0.0/24 trust\n").expect("its rules");
        let out = file(image);
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(&place).arg("-cf").arg(&out).arg("data");
        assert!(tar.status().expect("tar").success());
        Some(Cluster(out))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn bin() -> PathBuf {
    build::postgres_dir().expect("PostgreSQL")
}

/// Starts its server in a machine, by a command that begins with `how` and has to be [`USER`]'s.
///
/// # Panics
/// When it does not start.
pub fn serve(guest: &mut Guest, how: &str) {
    let (bin, tar, address) = (bin(), guest.cluster(), guest.address());
    guest.run(&format!(
        "mkdir /tmp/postgres && tar -C /tmp/postgres -xf {} && chown -R {USER}:{USER} /tmp/postgres
        cd /tmp/postgres && {how} {}/postgres -D data -h {address} -F -k /tmp/postgres >log 2>&1 &
        for n in $(seq 300); do pg_isready -q -h /tmp/postgres && exit; sleep 0.1; done; cat /tmp/postgres/log; exit 1",
        tar.display(),
        bin.display()
    ));
}

/// Ends the server.
///
/// # Panics
/// When it was not there.
pub fn end(guest: &mut Guest) {
    guest.run(
        "kill -INT $(head -n 1 /tmp/postgres/data/postmaster.pid); while pgrep -x postgres >/dev/null; do sleep 0.1; done
        rm -r /tmp/postgres",
    );
}

/// A command of pgbench's.
pub fn pgbench(how: &str, address: &str, words: &str) -> String {
    format!("{how} {}/pgbench -h {address} -U postgres {words} postgres", bin().display())
}

/// Fills its tables from another machine.
///
/// # Panics
/// When that fails.
pub fn fill(guest: &mut Guest, how: &str, address: &str) {
    let filled = guest.run(&format!("{} 2>&1", pgbench(how, address, "-i -q")));
    assert!(filled.contains("done in"), "{filled}");
}

/// A load of [`CLIENTS`] connections: no transaction fails. The most that `count` has found meanwhile.
///
/// # Panics
/// When one does.
pub fn load(
    guest: &mut Guest,
    how: &str,
    address: &str,
    words: &str,
    mut count: impl FnMut(&mut Guest) -> usize,
) -> usize {
    let load = pgbench(how, address, &format!("-n -c {CLIENTS} {words}"));
    guest.run(&format!(
        "rm -f /tmp/done; {{ {load} >/tmp/pgbench 2>&1; touch /tmp/done; }} >/dev/null 2>&1 &"
    ));
    let mut most = 0;
    while guest.try_run("[ -e /tmp/done ]").0 != 0 {
        most = most.max(count(guest));
    }
    let told = guest.run("cat /tmp/pgbench");
    assert!(told.contains("number of failed transactions: 0"), "{told}");
    let rate = told.lines().find(|line| line.starts_with("tps")).unwrap_or_default();
    println!("pgbench {words}: {rate}");
    most
}
