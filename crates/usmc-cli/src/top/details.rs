//! One row's details.

use ratatui::style::Style;
use usmc::observe::Mode;

use super::app::App;
use super::arrange::{Row, percent};
use super::counts::{Counts, Rates, short};
use super::draw::Page;
use super::model::{Conn, Program};
use crate::sockets::address;

/// Draws the selected row's.
pub fn draw(page: &mut Page, app: &mut App) {
    let lines = match app.row() {
        Some(Row::Conn(conn, program)) => of_conn(conn, program, app.host.as_deref()),
        Some(Row::Program(program)) => of_program(program),
        None => vec![("It has ended", "Esc leads back".to_owned())],
    };
    let strong = page.theme.strong();
    let room = page.width().saturating_sub(TITLE).max(10);
    let wrapped: Vec<(&str, String)> = lines
        .iter()
        .flat_map(|(title, text)| {
            let parts = wrap(text, room).into_iter().enumerate();
            parts.map(move |(i, part)| (if i == 0 { *title } else { "" }, part))
        })
        .collect();
    app.scrolled = app.scrolled.min(wrapped.len().saturating_sub(1));
    for (title, text) in &wrapped[app.scrolled..] {
        let title = format!("{title:<TITLE$}");
        page.line(&[(&title, strong), (text, Style::new())]);
    }
}

/// Characters of a line's title.
const TITLE: usize = 17;

type Lines = Vec<(&'static str, String)>;

fn of_conn(conn: &Conn, program: &Program, host: Option<&str>) -> Lines {
    let s = &conn.seen.socket;
    let counts = Counts::of(&conn.seen);
    let [tx_queued, rx_queued] = conn.seen.queued();
    let number = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
    let mut lines = vec![
        ("Program", format!("{}, process {}, descriptor {}", program.comm, program.who.0, s.fd)),
        ("Local address", address(s.local)),
        ("Peer address", address(s.peer)),
        ("State", format!("{}, {}", conn.seen.life.name(), role(s.is_client))),
        ("Mode", conn.seen.mode_name().to_owned()),
    ];
    if let Some(device) = &conn.seen.device {
        let host = host.map(|host| format!(", at the other end {host}")).unwrap_or_default();
        lines.push(("Device", format!("{device}{host}")));
    }
    if let Some(reason) = conn.seen.fallback_reason() {
        lines.push(("Why TCP", reason));
        let none = "nothing: it goes on by itself, or is what the program does";
        lines.push(("What helps", conn.seen.remedy().unwrap_or(none).to_owned()));
    }
    if s.mode != Mode::Tcp {
        let ring = s.ring_size.map_or("-".to_owned(), |size| size.to_string());
        lines.push(("Rings", format!("{ring} bytes each, {} taken for sending", s.window)));
        lines.push(("Fill", percent(conn.fill())));
    }
    lines.push(("Sent", format!("{} bytes, {} wait", number(counts.bytes[0]), number(tx_queued))));
    lines.push((
        "Received",
        format!("{} bytes, {} wait", number(counts.bytes[1]), number(rx_queued)),
    ));
    let kind = if counts.is_in_ring { "Calls" } else { "Segments" };
    lines.push((
        kind,
        format!("{} out, {} in", number(counts.messages[0]), number(counts.messages[1])),
    ));
    if counts.is_in_ring {
        let [_, _, _, _, full, sleeps, spins, sent, drained] = s.counters;
        lines.push(("Ring was full", format!("{full} times")));
        lines.push(("Sleeps", format!("{sleeps}, and {spins} spins that paid")));
        lines.push(("Doorbells", format!("{sent} sent, {drained} taken")));
        lines.push(("Segment", format!("{:016x}, slot {}", s.segment, s.slot)));
    }
    lines.extend(of_rates(&conn.rates));
    lines
}

fn role(is_client: bool) -> &'static str {
    if is_client { "the connecting end" } else { "the accepting end" }
}

fn of_rates(rates: &Rates) -> Lines {
    let [tx, rx] = rates.bytes.map(short);
    let [out, into] = rates.messages.map(short);
    vec![
        ("Each second", format!("{tx} bytes out, {rx} in; {out} messages out, {into} in")),
        ("", format!("{} sleeps, {} spins that paid", short(rates.sleeps), short(rates.spins))),
    ]
}

fn of_program(program: &Program) -> Lines {
    let [smcd, smcr, tcp] = program.conns;
    let mut lines = vec![
        ("Program", format!("{}, process {}", program.comm, program.who.0)),
        (
            "Connections",
            format!("{smcd} SMCD, {smcr} SMCR, {tcp} TCP, {} listeners", program.listeners),
        ),
        ("Share", format!("{} of the bytes not over TCP", percent(program.share()))),
    ];
    lines.extend(of_rates(&program.rates));
    for (i, (reason, n)) in program.reasons.iter().enumerate() {
        lines.push((if i == 0 { "Why TCP" } else { "" }, format!("{n} {reason}")));
    }
    let tcp: u64 = program.tcp_since_start.iter().fold(0, |sum, (_, n)| sum.saturating_add(*n));
    let smc = program.smc_since_start;
    lines.push(("Since it began", format!("{smc} connections in a ring, {tcp} on TCP only")));
    for (reason, n) in &program.tcp_since_start {
        lines.push(("", format!("{n} {reason}")));
    }
    lines
}

/// The text in lines of so many characters, broken at blanks where there are some.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().map_or(0, |line| line.chars().count());
        if last > 0 && last + 1 + word.chars().count() > width {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}
