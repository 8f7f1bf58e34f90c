//! Two virtual machines under QEMU, joined by a cable, with a region as a PCI device (ivshmem) that both have.
//!
//! QEMU translates their code (TCG), so that they need no /dev/kvm, and no time that is measured in them means anything. They boot
//! Debian's stock kernel, which `tests/vm/image` fetches, and have this machine's root file system as theirs: read-only, with changes
//! in memory. What a guest is to do the test sends as a script ([`Guest::run`]).

use std::cell::Cell;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::fixture::{Fixture, tool};
use crate::lan::Lan;
use crate::qmp::Monitor;
use crate::ss::{self, Socket};
use crate::{Process, build, flag};

/// Whether tests with virtual machines are to run, and can. Says why not.
pub fn is_wanted() -> bool {
    is_wanted_for(build::vm_image())
}

/// The same for machines whose kernel's SMC is a peer.
pub fn is_wanted_with_rdma() -> bool {
    is_wanted_for(build::rdma_vm_image())
}

fn is_wanted_for(image: Option<PathBuf>) -> bool {
    let why_not = if !flag("USMC_TESTS_VM") {
        "`make test-vm` runs it"
    } else if !cfg!(target_arch = "x86_64") {
        "it is for x86-64"
    } else if Command::new(QEMU).arg("--version").output().is_err() {
        "there is no QEMU (make vm-deps installs it)"
    } else if image.is_none() {
        "there is no kernel for it (make vm-deps fetches it)"
    } else {
        return true;
    };
    eprintln!("skipped: {why_not}");
    false
}

const QEMU: &str = "qemu-system-x86_64";

/// A test fails with it whose machine's kernel panicked.
struct KernelPanic;

/// What a kernel's console says then.
const PANIC: &str = "Kernel panic";

thread_local! {
    /// Whether a kernel has panicked, whatever the test has failed by: the other machine may miss its peer first.
    static HAS_PANICKED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test with machines of its own, and with further ones where the kernel of one of them panics.
///
/// Soft-RoCE of Linux 6.12 under QEMU's translator is known for it: about one of ten runs in which links are cut under load ends so. A pointer of the
/// slab allocator or saved flags are damaged while rdma_rxe allocates a frame, mostly behind an interrupt. A program's system calls must never lead
/// there, so that the kernel or the translator is to blame.
///
/// # Panics
/// When the test fails otherwise, or a kernel panics each time.
pub fn again_if_a_kernel_panics(test: impl Fn()) {
    const TIMES: u32 = 4;
    for left in (0..TIMES).rev() {
        HAS_PANICKED.set(false);
        let Err(why) = catch_unwind(AssertUnwindSafe(&test)) else { return };
        let is_kernels = why.is::<KernelPanic>() || HAS_PANICKED.get();
        if !is_kernels || left == 0 {
            resume_unwind(why);
        }
        // Not by a macro, whose output is shown of failed tests only.
        let _ = writeln!(io::stderr(), "a machine's kernel panicked: others go on");
    }
}

/// Both machines.
pub struct Guests {
    guests: [Guest; 2],
    /// What went over the cable.
    capture: PathBuf,
}

/// One of both.
pub struct Guest {
    process: Process,
    number: usize,
    /// What it has booted.
    image: PathBuf,
    console: PathBuf,
    is_killed: bool,
    /// How often its device was put back.
    plugs: usize,
}

impl Guests {
    /// Boots both, with one file as an ivshmem device, whose size is a power of two, another as persistent memory, and one more ivshmem
    /// device of the server at that socket.
    ///
    /// # Panics
    /// When that fails, or takes too long.
    pub fn boot(fixture: &Fixture, region: &Path, persistent: &Path, server: &Path) -> Guests {
        Guests::start(fixture, image(), 1, |command| {
            option(command, "-object", &[&memory("region", region)]);
            option(command, "-device", &["ivshmem-plain,memdev=region"]);
            served(command, server);
            option(command, "-object", &[&memory("persistent", persistent)]);
            option(command, "-device", &["nvdimm,memdev=persistent"]);
        })
    }

    /// Boots both with nothing but the cable, and a kernel whose SMC can be a peer. A second network device of each is on the same cable, and is
    /// not in use.
    ///
    /// # Panics
    /// As above.
    pub fn boot_for_rdma(fixture: &Fixture) -> Guests {
        let image = build::rdma_vm_image().expect("is_wanted_with_rdma() was asked");
        Guests::start(fixture, image, 2, |_| {})
    }

    fn start(
        fixture: &Fixture,
        image: PathBuf,
        cards: usize,
        devices: impl Fn(&mut Command),
    ) -> Guests {
        let capture = fixture.scratch().join("cable.pcap");
        let socket = fixture.scratch().join("cable");
        let start = |number: usize| {
            let console = fixture.scratch().join(format!("console{number}"));
            let mut command = fixture.plain(QEMU);
            basics(&mut command, number, &console, &image);
            devices(&mut command);
            // A UNIX socket: over TCP each packet would wait for Nagle's algorithm.
            let server = if number == 1 { "on" } else { "off" };
            let path = format!("addr.path={}", socket.display());
            let cable = format!("stream,id=cable,server={server},addr.type=unix");
            option(&mut command, "-netdev", &[&cable, &path]);
            if number == 1 {
                let file = format!("file={}", capture.display());
                // All of SMC's own messages, but not of the bytes of connections.
                let dump = "filter-dump,id=dump,netdev=cable,maxlen=600";
                option(&mut command, "-object", &[dump, &file]);
            }
            match cards {
                1 => card(&mut command, number, 0, "cable"),
                _ => share_cable(&mut command, number, cards),
            }
            let (process, image) = (fixture.spawn(command), image.clone());
            Guest { process, number, image, console, is_killed: false, plugs: 0 }
        };
        let first = start(1);
        fixture.wait_until("the cable", || socket.exists());
        let mut guests = [first, start(2)];
        guests.iter_mut().for_each(Guest::wait_until_ready);
        Guests { guests, capture }
    }

    /// The machine with address 10.0.0.1, and the one with 10.0.0.2.
    pub fn both(&mut self) -> [&mut Guest; 2] {
        self.guests.each_mut()
    }

    /// What went over the cable, for Wireshark. Whole once both have ended.
    pub fn cable(&self) -> &Path {
        &self.capture
    }

    /// Ends both.
    ///
    /// # Panics
    /// When one of them does not end by itself.
    pub fn shut_down(&mut self) {
        shut_down(&mut self.guests);
    }
}

impl Drop for Guests {
    /// Where a test fails, the other machine may have ended by itself: its kernel's last words are shown.
    fn drop(&mut self) {
        if std::thread::panicking() {
            for guest in &self.guests {
                if guest.show_console().contains(PANIC) {
                    HAS_PANICKED.set(true);
                }
            }
        }
    }
}

/// Ends all of them that live.
///
/// # Panics
/// When one of them does not end by itself.
pub fn shut_down(guests: &mut [Guest]) {
    let mut living: Vec<_> = guests.iter_mut().filter(|guest| !guest.is_killed).collect();
    for guest in &mut living {
        guest.process.say("-- bye");
    }
    for guest in living {
        let status = guest.process.wait();
        assert!(status.success(), "guest {}: {status}", guest.number);
    }
}

/// The device that a machine on a network can lose.
const PLUGGED: &str = "plugged";

impl Guest {
    /// Starts one on a network, with one file as an ivshmem device that can be unplugged, whose size is a power of two, and one more
    /// of the server at that socket. It boots meanwhile ([`Guest::wait_until_ready`]).
    ///
    /// # Panics
    /// When that fails.
    pub fn start(
        fixture: &Fixture,
        lan: &Lan,
        number: usize,
        tap: &str,
        region: &Path,
        server: &Path,
    ) -> Guest {
        let console = fixture.scratch().join(format!("console{number}"));
        let monitor = monitor_of(fixture, number);
        let _ = std::fs::remove_file(&monitor);
        let mut command = lan.plain(fixture);
        command.arg(QEMU);
        let image = image();
        basics(&mut command, number, &console, &image);
        option(&mut command, "-object", &[&memory("region", region)]);
        option(&mut command, "-device", &["pcie-root-port,id=slot1,chassis=1,slot=1"]);
        option(
            &mut command,
            "-device",
            &[&format!("ivshmem-plain,id={PLUGGED}"), "memdev=region,bus=slot1"],
        );
        served(&mut command, server);
        let tap = format!("ifname={tap}");
        option(&mut command, "-netdev", &["tap,id=lan", &tap, "script=no,downscript=no"]);
        option(&mut command, "-device", &["virtio-net-pci,netdev=lan", &mac(number)]);
        option(
            &mut command,
            "-qmp",
            &[&format!("unix:{}", monitor.display()), "server=on,wait=off"],
        );
        let process = fixture.spawn(command);
        Guest { process, number, image, console, is_killed: false, plugs: 0 }
    }

    /// Takes the region's device out of one that was started on a network.
    ///
    /// # Panics
    /// When it stays.
    pub fn unplug(&self, fixture: &Fixture) {
        Monitor::connect(&monitor_of(fixture, self.number)).unplug(PLUGGED);
    }

    /// Puts a device of this file in its place. It has a memory backend of its own: QEMU 7.2 ends where it gets the one of a device that
    /// has gone.
    ///
    /// # Panics
    /// When that fails.
    pub fn plug(&mut self, fixture: &Fixture, region: &Path) {
        self.plugs += 1;
        let (id, size) =
            (format!("region{}", self.plugs), region.metadata().expect("memory").len());
        let mut monitor = Monitor::connect(&monitor_of(fixture, self.number));
        monitor.ask(
            "object-add",
            json!({ "qom-type": "memory-backend-file", "id": id, "share": true, "mem-path": region, "size": size }),
        );
        monitor.ask(
            "device_add",
            json!({ "driver": "ivshmem-plain", "id": PLUGGED, "memdev": id, "bus": "slot1" }),
        );
    }

    /// Stands still, all of it, until [`Guest::go_on`].
    pub fn pause(&self) {
        self.process.signal(libc::SIGSTOP);
    }

    /// After [`Guest::pause`].
    pub fn go_on(&self) {
        self.process.signal(libc::SIGCONT);
    }

    /// The machine is gone from one instant to the next.
    pub fn kill(&mut self) {
        self.process.kill();
        self.is_killed = true;
    }

    /// Waits until it has booted.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_until_ready(&mut self) {
        while let Some(line) = self.process.try_line() {
            if line.starts_with("-- ready") {
                return;
            }
        }
        self.fail_with_console()
    }

    /// It has ended by itself. The kernel's last words are on its console.
    fn fail_with_console(&mut self) -> ! {
        let status = self.process.wait();
        if self.show_console().contains(PANIC) {
            panic_any(KernelPanic);
        }
        panic!("guest {} ended with {status}; its console is above", self.number);
    }

    /// Prints what its kernel has said, and gives it.
    fn show_console(&self) -> String {
        let console = std::fs::read(&self.console).unwrap_or_default();
        let console = String::from_utf8_lossy(&console).into_owned();
        eprintln!("--- the console of guest {}:\n{console}", self.number);
        console
    }

    /// Runs a script of bash's, as root, and returns its exit status and what it printed. What it starts in the background goes on.
    /// `usmc` is the command under test, `$region` the plain ivshmem device's memory, `$served` that of the server's, and in `$modules` are the kernel's.
    pub fn try_run(&mut self, script: &str) -> (i32, String) {
        self.process.say(&format!(
            "set -e; usmc={}; usmc() {{ $usmc \"$@\"; }}; modules={}",
            build::usmc().display(),
            self.image.join("package").display()
        ));
        self.process.say(script);
        self.process.say("-- end");
        let mut lines = Vec::new();
        loop {
            let Some(line) = self.process.try_line() else { self.fail_with_console() };
            if let Some(status) = line.strip_prefix("-- end ") {
                let status = status.trim().parse().expect("an exit status");
                return (status, lines.join("\n").trim_end().to_owned());
            }
            lines.push(line);
        }
    }

    /// A database cluster for it ([`crate::cluster`]).
    pub fn cluster(&self) -> PathBuf {
        crate::cluster::file(&self.image)
    }

    /// Its address on the cable.
    pub fn address(&self) -> String {
        format!("10.0.0.{}", self.number)
    }

    /// What `usmc ss` shows in it of a server's connections, the server's ends or the clients'.
    pub fn connections(&mut self, port: u16) -> Vec<Socket> {
        let mut all = ss::parse(&self.run("usmc ss --json"));
        all.retain(|end| {
            end.peer_port() == port || (end.local_port() == port && !end.peer.is_empty())
        });
        all
    }

    /// Runs a script that has to succeed: its exit status is 0.
    ///
    /// # Panics
    /// When it is not.
    pub fn run(&mut self, script: &str) -> String {
        let (status, text) = self.try_run(script);
        assert_eq!(status, 0, "guest {}: {script}\n{text}", self.number);
        text
    }
}

fn monitor_of(fixture: &Fixture, number: usize) -> PathBuf {
    fixture.scratch().join(format!("monitor{number}"))
}

/// What is booted.
fn image() -> PathBuf {
    build::vm_image().expect("is_wanted() was asked")
}

/// A file as memory of the machine.
fn memory(name: &str, path: &Path) -> String {
    let size = path.metadata().expect("memory").len();
    format!("memory-backend-file,id={name},share=on,mem-path={},size={size}", path.display())
}

/// The ivshmem device of a server.
fn served(command: &mut Command, server: &Path) {
    option(command, "-chardev", &["socket,id=server", &format!("path={}", server.display())]);
    option(command, "-device", &["ivshmem-doorbell,chardev=server"]);
}

fn mac(number: usize) -> String {
    mac_of(number, 0)
}

fn mac_of(number: usize, at: usize) -> String {
    format!("mac=52:54:00:00:{at:02}:{number:02}")
}

/// A network device of the machine, whose cable that is.
fn card(command: &mut Command, number: usize, at: usize, cable: &str) {
    let card = format!("virtio-net-pci,netdev={cable}");
    option(command, "-device", &[&card, &mac_of(number, at)]);
}

/// Several network devices, all on the one cable.
fn share_cable(command: &mut Command, number: usize, cards: usize) {
    option(command, "-netdev", &["hubport,id=hub,hubid=0,netdev=cable"]);
    for at in 0..cards {
        let port = format!("port{at}");
        option(command, "-netdev", &[&format!("hubport,id={port}"), "hubid=0"]);
        card(command, number, at, &port);
    }
}

/// A machine without network and devices, whose agent has standard input and output.
fn basics(command: &mut Command, number: usize, console: &Path, dir: &Path) {
    command.args(["-machine", "q35,accel=tcg,nvdimm=on", "-cpu", "max", "-smp", "1"]);
    command.args(["-m", "1G,slots=1,maxmem=2G"]);
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.arg("-kernel").arg(dir.join("kernel")).arg("-initrd").arg(dir.join("initrd"));
    command.arg("-append");
    // What goes on behind an oops proves nothing.
    command.arg(format!("console=ttyS0 quiet panic=-1 oops=panic net.ifnames=0 guest={number}"));
    option(command, "-serial", &[&format!("file:{}", console.display())]);
    option(command, "-chardev", &["stdio,id=agent,signal=off"]);
    option(command, "-device", &["virtio-serial-pci"]);
    option(command, "-device", &["virtserialport,chardev=agent"]);
    let share = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap";
    option(command, "-virtfs", &[share]);
}

fn option(command: &mut Command, name: &str, parts: &[&str]) {
    command.arg(name).arg(parts.join(","));
}

/// Frames in a capture, by what tcpdump's filter says.
///
/// # Panics
/// When it cannot be read.
pub fn frames(capture: &Path, filter: &str) -> usize {
    let out = tool("tcpdump", &["-n", "-r", &capture.to_string_lossy(), filter]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).lines().count()
}
