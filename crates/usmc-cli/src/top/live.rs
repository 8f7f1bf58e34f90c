//! The terminal: it is taken, drawn on, listened to, and given back, however the command ends.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use usmc::observe::Mode;

use super::app::{App, Effect, Screen};
use super::arrange::Row;
use super::draw::{Theme, draw};
use crate::proc::harmless;
use crate::regions::Regions;
use crate::sockets::Look;

/// When rates are shown first; later it is the interval.
const FIRST: Duration = Duration::from_millis(500);

/// A terminal that is given back when this goes.
struct Screened(DefaultTerminal);

impl Screened {
    fn take() -> Result<Screened> {
        let taken = ratatui::try_init().context("cannot draw on this terminal; use --batch")?;
        Ok(Screened(taken))
    }

    /// All is drawn anew, in the size that the terminal has now. `Terminal::clear` would ask the terminal for its cursor, and a distant
    /// one may not answer in time.
    fn clear(&mut self) -> io::Result<()> {
        let size = self.0.size()?;
        self.0.resize(size.into())
    }
}

impl Drop for Screened {
    fn drop(&mut self) {
        // A terminal that is gone has nothing to be given back.
        let _ = ratatui::try_restore();
    }
}

/// What signals say, by sockets that can be waited for beside the terminal.
struct Signals {
    end: UnixStream,
    redraw: UnixStream,
}

impl Signals {
    fn hear() -> Result<Signals> {
        Ok(Signals {
            end: heard(&[SIGTERM, SIGINT, SIGHUP]).context("cannot hear signals")?,
            redraw: heard(&[SIGWINCH, SIGCONT]).context("cannot hear signals")?,
        })
    }
}

fn heard(signals: &[i32]) -> io::Result<UnixStream> {
    let (ours, told) = UnixStream::pair()?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, told.try_clone()?)?;
    }
    ours.set_nonblocking(true)?;
    Ok(ours)
}

/// What a wait ended with.
#[derive(Default)]
struct Woken {
    by_key: bool,
    to_redraw: bool,
    to_end: bool,
}

impl Signals {
    /// Sleeps until a key, a signal, or the moment.
    fn wait(&mut self, until: Option<Instant>) -> Result<Woken> {
        let stdin = io::stdin();
        let fds = [stdin.as_fd(), self.redraw.as_fd(), self.end.as_fd()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        });
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for keys"),
        }
        let [keys, redraw, end] = fds.map(|fd| fd.revents());
        let to_redraw = !redraw.is_empty();
        if to_redraw {
            let _ = self.redraw.read(&mut [0; 64]);
        }
        // The terminal is gone where it has no end of keys.
        let to_end = !end.is_empty() || keys.intersects(PollFlags::HUP | PollFlags::ERR);
        Ok(Woken { by_key: keys.contains(PollFlags::IN), to_redraw, to_end })
    }
}

/// Shows looks until the user has seen enough, or so many.
///
/// # Errors
/// A terminal that cannot be drawn on, or /proc not read.
pub fn run(app: &mut App, theme: Theme, count: Option<u64>) -> Result<()> {
    let mut signals = Signals::hear()?;
    let mut screen = Screened::take()?;
    let begin = Instant::now();
    let mut next = begin;
    loop {
        let now = Instant::now();
        if now >= next && !app.is_paused {
            app.model.take(Look::take()?, begin.elapsed());
            app.arrange();
            app.host = host(app);
            next = now + if app.model.looks == 1 { app.interval.min(FIRST) } else { app.interval };
        }
        screen.0.draw(|frame| draw(frame, app, theme)).context("cannot draw")?;
        if count.is_some_and(|count| app.model.looks > count) {
            return Ok(());
        }
        let woken = signals.wait((!app.is_paused).then_some(next))?;
        if woken.to_end {
            return Ok(());
        }
        if woken.to_redraw {
            screen.clear().context("cannot draw")?;
        }
        if woken.by_key || woken.to_redraw {
            match keys(app)? {
                Effect::Quit => return Ok(()),
                Effect::Look => next = Instant::now(),
                Effect::Suspend => {
                    drop(screen);
                    let _ = kill_process(getpid(), Signal::STOP);
                    screen = Screened::take()?;
                }
                Effect::Draw => {}
            }
        }
    }
}

/// Takes the keys that were pressed.
fn keys(app: &mut App) -> Result<Effect> {
    let mut effect = Effect::Draw;
    while event::poll(Duration::ZERO).context("cannot read keys")? {
        if let Event::Key(key) = event::read().context("cannot read keys")?
            && key.kind != KeyEventKind::Release
        {
            match app.key(key) {
                Effect::Draw => {}
                Effect::Look => effect = Effect::Look,
                last => return Ok(last),
            }
        }
    }
    if app.screen == Screen::Details {
        app.host = host(app);
    }
    Ok(effect)
}

/// Of the connection whose details are shown, the kernel at the other end of a region.
fn host(app: &App) -> Option<String> {
    match app.row() {
        Some(Row::Conn(conn, program))
            if app.screen == Screen::Details
                && conn.seen.socket.mode == Mode::Smcd
                && conn.seen.socket.region.is_some() =>
        {
            let host = Regions::default().other_end(program.who.0, &conn.seen.socket)?;
            Some(harmless(&host.to_string()))
        }
        _ => None,
    }
}
