//! `usmc top` for pipes: plain tables, or a JSON object in a line for each look.

use std::io::{self, Write};

use serde::Serialize;

use super::arrange::{CONNECTIONS, Column, Kind, PROGRAMS, Row, Wish, arrange, percent};
use super::counts::{Rates, short};
use super::draw::more;
use super::model::{ByMode, Model, Summary, share};
use crate::sockets::address;
use crate::table;

/// Prints the totals and a table.
///
/// # Errors
/// When `out` cannot be written.
pub fn print(out: &mut impl Write, model: &Model, wish: &Wish) -> io::Result<()> {
    print_summary(out, &model.summary)?;
    let order = arrange(model, wish);
    let rows = || order.iter().filter_map(|at| Row::of(model, wish.kind, *at));
    match wish.kind {
        Kind::Connections => {
            table::print(out, &titles(&CONNECTIONS), rows().map(|row| cells(&row, &CONNECTIONS)))
        }
        Kind::Programs => {
            table::print(out, &titles(&PROGRAMS), rows().map(|row| cells(&row, &PROGRAMS)))
        }
    }?;
    writeln!(out)?;
    out.flush()
}

fn titles<const N: usize>(columns: &[Column; N]) -> [table::Column; N] {
    columns.map(|column| (column.title, column.is_number))
}

fn cells<const N: usize>(row: &Row, columns: &[Column; N]) -> [String; N] {
    columns.map(|column| row.cell(column.field))
}

fn print_summary(out: &mut impl Write, summary: &Summary) -> io::Result<()> {
    let by_mode = |[smcd, smcr, tcp]: ByMode<String>, shared| {
        format!("{smcd} SMCD, {smcr} SMCR, {tcp} TCP ({} not TCP)", percent(shared))
    };
    let Summary { programs, listeners, connections, bytes, rates, .. } = summary;
    let shared = share(connections.map(|n| n as f64));
    let connections = by_mode(connections.map(|n| n.to_string()), shared);
    writeln!(out, "Programs {programs}, listeners {listeners}, connections {connections}")?;
    let shared = share(bytes.map(|bytes| bytes.unwrap_or(0.0)));
    writeln!(out, "Bytes/s {}", by_mode(bytes.map(short), shared))?;
    let [tx, rx] = rates.messages.map(short);
    let (sleeps, spins) = (short(rates.sleeps), short(rates.spins));
    writeln!(out, "Messages/s {tx} out, {rx} in; sleeps/s {sleeps}, spins that paid/s {spins}")?;
    for (reason, n) in &summary.reasons {
        writeln!(out, "Why TCP: {n} {reason}")?;
    }
    let more = more(summary);
    if !more.is_empty() {
        writeln!(out, "Not shown: {more}")?;
    }
    writeln!(out)
}

/// One look.
#[derive(Serialize)]
struct Shown<'a> {
    summary: &'a Summary,
    programs: Vec<OfProgram<'a>>,
    connections: Vec<OfConn<'a>>,
}

#[derive(Serialize)]
struct OfProgram<'a> {
    pid: u32,
    comm: &'a str,
    connections: ByMode<usize>,
    listeners: usize,
    share: Option<f64>,
    rates: &'a Rates,
    reasons: &'a [(String, usize)],
}

#[derive(Serialize)]
struct OfConn<'a> {
    pid: u32,
    comm: &'a str,
    fd: u32,
    local: String,
    peer: String,
    mode: &'static str,
    device: Option<String>,
    rates: &'a Rates,
    fill: Option<f64>,
    fallback_reason: Option<String>,
}

/// Prints all of a look in a line; of the connections those that the wish is about.
///
/// # Errors
/// When `out` cannot be written.
pub fn print_json(out: &mut impl Write, model: &Model, wish: &Wish) -> io::Result<()> {
    let of = |kind: Kind| {
        let order = arrange(model, &Wish { kind, ..wish.clone() });
        order.into_iter().filter_map(move |at| Row::of(model, kind, at))
    };
    let programs = of(Kind::Programs).filter_map(|row| match row {
        Row::Program(program) => Some(OfProgram {
            pid: program.who.0,
            comm: &program.comm,
            connections: program.conns,
            listeners: program.listeners,
            share: program.share(),
            rates: &program.rates,
            reasons: &program.reasons,
        }),
        Row::Conn(..) => None,
    });
    let connections = of(Kind::Connections).filter_map(|row| match row {
        Row::Conn(conn, program) => Some(OfConn {
            pid: program.who.0,
            comm: &program.comm,
            fd: conn.seen.socket.fd,
            local: address(conn.seen.socket.local),
            peer: address(conn.seen.socket.peer),
            mode: conn.seen.mode_name(),
            device: conn.seen.device.clone(),
            rates: &conn.rates,
            fill: conn.fill(),
            fallback_reason: conn.seen.fallback_reason(),
        }),
        Row::Program(_) => None,
    });
    let shown = Shown {
        summary: &model.summary,
        programs: programs.collect(),
        connections: connections.collect(),
    };
    serde_json::to_writer(&mut *out, &shown)?;
    writeln!(out)?;
    out.flush()
}
