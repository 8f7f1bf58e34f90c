//! `usmc nri` against frames that a real containerd has sent (`kubernetes/frames.md`), played by this test over a UNIX socket: it
//! answers as it did then, and comes back whenever the runtime goes. In namespaces of its own, where /run and /opt are empty.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use usmc_tests::{Fixture, Process, build, is_plain, node};

struct Played<'a> {
    fixture: &'a Fixture,
    listener: UnixListener,
    plugin: Process,
}

fn recorded(name: &str) -> Vec<u8> {
    let path: PathBuf = build::tests_dir().join(format!("kubernetes/frames.{name}"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// How long the plugin's first frame is, its registration: eight bytes, of which the last four say how many come behind.
fn registration() -> usize {
    let length = recorded("plugin")[4..8].try_into().expect("four bytes");
    8 + u32::from_be_bytes(length) as usize
}

impl<'a> Played<'a> {
    fn start(fixture: &'a Fixture) -> Played<'a> {
        let socket = fixture.scratch().join("nri.sock");
        let listener = UnixListener::bind(&socket).expect("our own socket");
        let script = "mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /opt && mkdir /opt/usmc && \
             : >/opt/usmc/libusmc_preload.so && echo shop >/run/namespaces && exec \"$0\" nri --namespaces /run/namespaces --socket \"$1\"";
        let mut plugin = fixture.plain("unshare");
        plugin.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]);
        plugin.arg(script).arg(build::usmc()).arg(&socket);
        let plugin = fixture.spawn(plugin);
        Played { fixture, listener, plugin }
    }

    /// The plugin's next connection, with its registration taken.
    fn accept(&self) -> UnixStream {
        let (mut trunk, _) = self.listener.accept().expect("a plugin");
        trunk.set_read_timeout(Some(self.fixture.time_left())).expect("a limit");
        let mut said = vec![0; registration()];
        trunk.read_exact(&mut said).expect("a registration");
        assert_eq!(said, recorded("plugin")[..registration()]);
        trunk
    }

    /// Asks what containerd has asked, and compares what comes back.
    fn play(&self, trunk: &mut UnixStream, piece: usize) {
        for part in recorded("runtime").chunks(piece) {
            trunk.write_all(part).expect("a plugin that reads");
        }
        let expected = recorded("plugin");
        let mut said = vec![0; expected.len() - registration()];
        trunk.read_exact(&mut said).expect("answers");
        assert_eq!(said, expected[registration()..]);
    }

    fn is_ready(&self) -> bool {
        let mut probe = self.fixture.plain("nsenter");
        let first = node::child(self.plugin.pid()).expect("a plugin").to_string();
        probe.args(["--target", &first, "--mount", "--pid"]).arg(build::usmc());
        probe.args(["nri", "--ready"]).status().expect("nsenter").success()
    }

    fn end(self) {
        let Played { mut plugin, .. } = self;
        node::signal(&plugin, libc::SIGTERM);
        assert!(plugin.wait().success(), "{}", plugin.errors());
    }
}

#[test]
fn it_answers_as_it_did_to_a_real_containerd() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::new("nri");
    let played = Played::start(&fixture);
    // The whole of it at once, and in pieces that no frame has.
    for piece in [usize::MAX, 7] {
        let mut trunk = played.accept();
        played.play(&mut trunk, piece);
        assert!(played.is_ready());
        drop(trunk);
        fixture.wait_until("the plugin's notice", || !played.is_ready());
    }
    let said = played.plugin.errors();
    assert_eq!(said.matches("is given the library").count(), 4, "{said}");
    assert_eq!(said.matches("registered with containerd").count(), 2, "{said}");
    played.end();
    fixture.finish();
}

#[test]
fn it_comes_back_after_whatever_a_runtime_sends() {
    if is_plain() {
        return;
    }
    let fixture = Fixture::with_limit("nri hostile", Duration::from_secs(90));
    let played = Played::start(&fixture);
    let runtime = recorded("runtime");
    let oversized = [0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff].to_vec();
    let mut long_body = vec![0, 0, 0, 1, 0, 0, 0, 10, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0];
    long_body.extend([0; 64]);
    for sent in [vec![], oversized, long_body] {
        let is_ended_by_us = sent.is_empty();
        let mut trunk = played.accept();
        trunk.write_all(&sent).expect("a plugin that reads");
        if !is_ended_by_us {
            assert_eq!(trunk.read(&mut [0]).expect("its end"), 0, "it closes what it cannot read");
        }
    }
    // A frame that is cut short is waited for; then the runtime is gone.
    for cut in [3, runtime.len() / 2, runtime.len() - 1] {
        let mut trunk = played.accept();
        trunk.write_all(&runtime[..cut]).expect("a plugin that reads");
    }
    let mut trunk = played.accept();
    played.play(&mut trunk, usize::MAX);
    drop(trunk);
    played.end();
    fixture.finish();
}
