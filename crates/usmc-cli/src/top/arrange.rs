//! Which rows are shown, in which order, and what stands in their cells.

use std::cmp::Ordering;
use std::net::SocketAddr;

use usmc::observe::Mode;

use super::counts::short;
use super::model::{Conn, Key, Model, Program, Who, ends};
use crate::regions;
use crate::sockets::address;

/// What a column has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Field {
    /// The process.
    Pid,
    /// Its name.
    Program,
    /// Own address.
    Local,
    /// The other end's.
    Peer,
    /// What moves the bytes.
    Mode,
    /// Bytes sent a second.
    Tx,
    /// Bytes received a second.
    Rx,
    /// Messages a second, both ways.
    Messages,
    /// How full the fuller ring is.
    Fill,
    /// Sleeps a second.
    Sleeps,
    /// Spins that paid, a second.
    Spins,
    /// Whose memory it is.
    Device,
    /// Why it is TCP.
    Reason,
    /// Open connections.
    Conns,
    /// Those over SMC-D.
    Smcd,
    /// Those over SMC-R.
    Smcr,
    /// Those over TCP.
    Tcp,
    /// The part of the bytes that is not TCP's.
    Share,
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// What it has.
    pub field: Field,
    /// Its title.
    pub title: &'static str,
    /// Characters.
    pub width: u16,
    /// Whether its cells are numbers, stand to the right, and are sorted from the largest on.
    pub is_number: bool,
    /// Where not all have room, those with the lowest ranks are shown.
    pub rank: u8,
}

const fn column(
    field: Field,
    title: &'static str,
    width: u16,
    is_number: bool,
    rank: u8,
) -> Column {
    Column { field, title, width, is_number, rank }
}

/// Of the table of connections. The last takes what room is left.
pub const CONNECTIONS: [Column; 13] = [
    column(Field::Pid, "PID", 7, true, 4),
    column(Field::Program, "PROGRAM", 12, false, 1),
    column(Field::Local, "LOCAL", 21, false, 9),
    column(Field::Peer, "PEER", 15, false, 5),
    column(Field::Mode, "MODE", 4, false, 0),
    column(Field::Tx, "TX/s", 5, true, 2),
    column(Field::Rx, "RX/s", 5, true, 3),
    column(Field::Messages, "MSG/s", 5, true, 6),
    column(Field::Fill, "FILL", 4, true, 7),
    column(Field::Sleeps, "SLP/s", 5, true, 10),
    column(Field::Spins, "SPIN/s", 6, true, 11),
    column(Field::Device, "DEVICE", 8, false, 12),
    column(Field::Reason, "WHY TCP", 8, false, 8),
];

/// Of the table of programs.
pub const PROGRAMS: [Column; 13] = [
    column(Field::Pid, "PID", 7, true, 4),
    column(Field::Program, "PROGRAM", 12, false, 1),
    column(Field::Conns, "CONN", 5, true, 6),
    column(Field::Smcd, "SMCD", 5, true, 0),
    column(Field::Smcr, "SMCR", 4, true, 11),
    column(Field::Tcp, "TCP", 5, true, 5),
    column(Field::Tx, "TX/s", 5, true, 2),
    column(Field::Rx, "RX/s", 5, true, 3),
    column(Field::Messages, "MSG/s", 5, true, 7),
    column(Field::Share, "SHARE", 5, true, 8),
    column(Field::Sleeps, "SLP/s", 5, true, 9),
    column(Field::Spins, "SPIN/s", 6, true, 10),
    column(Field::Reason, "WHY TCP", 8, false, 12),
];

/// Which table is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Ends of connections.
    Connections,
    /// Processes.
    Programs,
}

impl Kind {
    /// Its columns.
    pub fn columns(self) -> &'static [Column] {
        match self {
            Kind::Connections => &CONNECTIONS,
            Kind::Programs => &PROGRAMS,
        }
    }
}

/// What a row is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Id {
    /// An end of a connection.
    Conn(Key),
    /// A process.
    Program(Who),
}

/// A row of either table.
#[derive(Clone, Copy)]
pub enum Row<'a> {
    /// An end of a connection, and its process.
    Conn(&'a Conn, &'a Program),
    /// A process.
    Program(&'a Program),
}

/// What is in a cell, to be compared.
#[derive(PartialEq, Debug)]
pub enum Value {
    /// A number, or none.
    Number(Option<f64>),
    /// An address.
    Address(SocketAddr),
    /// A text; none stands behind all others.
    Text(Option<String>),
}

impl Value {
    fn order(&self, other: &Value) -> Ordering {
        match (self, other) {
            (Value::Number(a), Value::Number(b)) => {
                let known = |n: &Option<f64>| n.unwrap_or(-1.0);
                known(a).total_cmp(&known(b))
            }
            (Value::Address(a), Value::Address(b)) => a.cmp(b),
            (Value::Text(Some(a)), Value::Text(Some(b))) => a.cmp(b),
            (Value::Text(a), Value::Text(b)) => b.is_some().cmp(&a.is_some()),
            _ => Ordering::Equal,
        }
    }
}

impl<'a> Row<'a> {
    /// Row `at` of a table.
    pub fn of(model: &'a Model, kind: Kind, at: usize) -> Option<Row<'a>> {
        match kind {
            Kind::Connections => model.conns.get(at).map(|c| Row::Conn(c, model.program_of(c))),
            Kind::Programs => model.programs.get(at).map(Row::Program),
        }
    }

    /// What it is about.
    pub fn id(&self) -> Id {
        match self {
            Row::Conn(conn, _) => Id::Conn(conn.key),
            Row::Program(program) => Id::Program(program.who),
        }
    }

    fn program(&self) -> &'a Program {
        match *self {
            Row::Conn(_, program) | Row::Program(program) => program,
        }
    }

    /// What is in a column.
    pub fn value(&self, field: Field) -> Value {
        let (program, count) = (self.program(), |n: usize| Value::Number(Some(n as f64)));
        let rates = match self {
            Row::Conn(conn, _) => &conn.rates,
            Row::Program(program) => &program.rates,
        };
        match (field, self) {
            (Field::Pid, _) => Value::Number(Some(f64::from(program.who.0))),
            (Field::Program, _) => Value::Text(Some(program.comm.clone())),
            (Field::Tx, _) => Value::Number(rates.bytes[0]),
            (Field::Rx, _) => Value::Number(rates.bytes[1]),
            (Field::Messages, _) => Value::Number(rates.all_messages()),
            (Field::Sleeps, _) => Value::Number(rates.sleeps),
            (Field::Spins, _) => Value::Number(rates.spins),
            (Field::Local, Row::Conn(conn, _)) => Value::Address(conn.seen.socket.local),
            (Field::Peer, Row::Conn(conn, _)) => Value::Address(conn.seen.socket.peer),
            (Field::Mode, Row::Conn(conn, _)) => {
                Value::Text(Some(conn.seen.mode_name().to_owned()))
            }
            (Field::Fill, Row::Conn(conn, _)) => Value::Number(conn.fill()),
            (Field::Device, Row::Conn(conn, _)) => Value::Text(conn.seen.device.clone()),
            (Field::Reason, Row::Conn(conn, _)) => Value::Text(conn.seen.fallback_reason()),
            (Field::Reason, Row::Program(program)) => {
                Value::Text(program.reasons.first().map(|(reason, _)| reason.clone()))
            }
            (Field::Conns, Row::Program(program)) => count(program.conns.iter().sum()),
            (Field::Smcd, Row::Program(program)) => count(program.conns[0]),
            (Field::Smcr, Row::Program(program)) => count(program.conns[1]),
            (Field::Tcp, Row::Program(program)) => count(program.conns[2]),
            (Field::Share, Row::Program(program)) => Value::Number(program.share()),
            _ => Value::Text(None),
        }
    }

    /// The same for people.
    pub fn cell(&self, field: Field) -> String {
        match (field, self.value(field)) {
            (Field::Fill | Field::Share, Value::Number(part)) => percent(part),
            (Field::Pid, Value::Number(pid)) => {
                pid.map_or(String::new(), |pid| format!("{pid:.0}"))
            }
            (_, Value::Number(n)) => short(n),
            (_, Value::Address(at)) => address(at),
            (Field::Device, Value::Text(device)) => {
                device.as_deref().map_or("-".to_owned(), regions::short)
            }
            (_, Value::Text(text)) => text.unwrap_or("-".to_owned()),
        }
    }

    fn is_tcp(&self) -> bool {
        match self {
            Row::Conn(conn, _) => conn.seen.socket.mode == Mode::Tcp,
            Row::Program(program) => program.conns[2] > 0,
        }
    }

    /// Whether a text, in small letters, is part of its program, addresses, mode, device or reasons.
    fn has(&self, text: &str) -> bool {
        let program = self.program();
        let is_in = |of: &str| of.to_lowercase().contains(text);
        if is_in(&program.comm) || program.who.0.to_string().contains(text) {
            return true;
        }
        match self {
            Row::Conn(conn, _) => {
                is_in(&ends(conn))
                    || is_in(conn.seen.mode_name())
                    || conn.seen.device.as_deref().is_some_and(is_in)
                    || conn.seen.fallback_reason().is_some_and(|reason| is_in(&reason))
            }
            Row::Program(program) => program.reasons.iter().any(|(reason, _)| is_in(reason)),
        }
    }
}

/// A part of the whole, or how many times that, in four characters.
pub fn percent(part: Option<f64>) -> String {
    match part {
        None => "-".to_owned(),
        Some(part) if part < 9.995 => format!("{:.0}%", part * 100.0),
        Some(times) => format!("{:.0}x", times.min(999.0)),
    }
}

/// What the user wants to see.
#[derive(Clone, PartialEq, Debug)]
pub struct Wish {
    /// Which table.
    pub kind: Kind,
    /// By what it is sorted.
    pub sort: Field,
    /// The other way round.
    pub is_reversed: bool,
    /// A part of a text.
    pub filter: String,
    /// TCP only.
    pub only_tcp: bool,
}

/// The numbers of the rows that are shown, in their order.
pub fn arrange(model: &Model, wish: &Wish) -> Vec<usize> {
    let count = match wish.kind {
        Kind::Connections => model.conns.len(),
        Kind::Programs => model.programs.len(),
    };
    let filter = wish.filter.to_lowercase();
    let is_number =
        wish.kind.columns().iter().any(|column| column.field == wish.sort && column.is_number);
    // Numbers of processes are names.
    let falls = (is_number && wish.sort != Field::Pid) != wish.is_reversed;
    let rows = (0..count).filter_map(|at| {
        let row = Row::of(model, wish.kind, at)?;
        let is_shown = (!wish.only_tcp || row.is_tcp()) && (filter.is_empty() || row.has(&filter));
        is_shown.then(|| (row.value(wish.sort), tie(&row), at))
    });
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|a, b| {
        let order = a.0.order(&b.0);
        let order = if falls { order.reverse() } else { order };
        order.then_with(|| a.1.cmp(&b.1))
    });
    rows.into_iter().map(|(_, _, at)| at).collect()
}

/// What orders rows that are equal otherwise, the same at each look.
fn tie(row: &Row) -> (u32, Option<(SocketAddr, SocketAddr)>) {
    match row {
        Row::Conn(conn, program) => {
            let s = &conn.seen.socket;
            (program.who.0, Some((s.local, s.peer)))
        }
        Row::Program(program) => (program.who.0, None),
    }
}

/// The columns that have room beside each other, and their widths. The last text takes what is left.
pub fn layout(columns: &'static [Column], width: u16) -> Vec<(&'static Column, u16)> {
    let mut by_rank: Vec<&Column> = columns.iter().collect();
    by_rank.sort_by_key(|column| column.rank);
    let mut left = width;
    let mut ranks = Vec::new();
    for column in by_rank {
        let need = column.width + u16::from(!ranks.is_empty());
        if need > left {
            break;
        }
        left -= need;
        ranks.push(column.rank);
    }
    let mut shown: Vec<_> = columns
        .iter()
        .filter(|column| ranks.contains(&column.rank))
        .map(|column| (column, column.width))
        .collect();
    // Addresses of version 4 are whole where there is room, and names nearly always.
    for (field, most) in [(Field::Peer, 21u16), (Field::Program, 15)] {
        if let Some((_, width)) = shown.iter_mut().find(|(column, _)| column.field == field) {
            let more = most.saturating_sub(*width).min(left);
            (*width, left) = (*width + more, left - more);
        }
    }
    if let Some((_, width)) = shown.iter_mut().rev().find(|(column, _)| !column.is_number) {
        *width += left;
    }
    shown
}
