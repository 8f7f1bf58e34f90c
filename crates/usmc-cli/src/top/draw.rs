//! The screen: totals above, the table or details, and a line of help. Cells are written one by one, so that what does not fit is cut
//! and only what is visible is formatted.

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::app::{App, Screen, Typing};
use super::arrange::{Kind, Row, layout, percent};
use super::counts::short;
use super::details;
use super::model::{ByMode, Summary, ends, share};

/// Colours of 16, which each terminal has chosen so that they can be read on its background; or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Theme {
    /// Whether there are colours.
    pub has_colours: bool,
}

impl Theme {
    fn colour(self, colour: Color) -> Style {
        if self.has_colours { Style::new().fg(colour) } else { Style::new() }
    }

    /// Of what is SMC-D, SMC-R, TCP.
    fn of_mode(self, place: usize) -> Style {
        self.colour([Color::Green, Color::Cyan, Color::Red][place])
    }

    fn title(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    fn selected(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED | Modifier::BOLD)
    }

    /// What explains itself.
    pub fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }
}

/// A place to write lines to, from the top down.
pub struct Page<'a> {
    buf: &'a mut Buffer,
    left: Rect,
    /// How it looks.
    pub theme: Theme,
}

impl Page<'_> {
    /// A line of parts, one behind the other.
    pub fn line(&mut self, parts: &[(&str, Style)]) {
        if self.left.height == 0 {
            return;
        }
        let mut x = self.left.x;
        for (text, style) in parts {
            let room = usize::from(self.left.right().saturating_sub(x));
            (x, _) = self.buf.set_stringn(x, self.left.y, text, room, *style);
        }
        self.left.y += 1;
        self.left.height -= 1;
    }

    /// Characters of a line.
    pub fn width(&self) -> usize {
        usize::from(self.left.width)
    }
}

/// Draws all of it.
pub fn draw(frame: &mut Frame, app: &mut App, theme: Theme) {
    let area = frame.area();
    if area.is_empty() {
        return;
    }
    // On a low screen the rows are what matters.
    let header = if area.height >= 14 { header_lines(&app.model.summary, area) } else { 1 };
    let footer = area.height.saturating_sub(header).saturating_sub(2).min(2);
    let body = Rect { y: header, height: area.height - header - footer, ..area };
    let mut page = Page { buf: frame.buffer_mut(), left: Rect { height: header, ..area }, theme };
    draw_header(&mut page, app);
    page.left = body;
    match app.screen {
        Screen::Table => draw_table(&mut page, app),
        Screen::Details => details::draw(&mut page, app),
        Screen::Help => draw_help(&mut page),
    }
    page.left = Rect { y: area.height - footer, height: footer, ..area };
    draw_footer(&mut page, app);
}

fn header_lines(summary: &Summary, area: Rect) -> u16 {
    let optional = [!summary.reasons.is_empty(), has_more(summary)];
    let lines = 4 + optional.into_iter().map(u16::from).sum::<u16>();
    lines.min(area.height / 2)
}

fn has_more(summary: &Summary) -> bool {
    summary.hidden > 0 || !summary.remarks.is_empty()
}

fn draw_header(page: &mut Page, app: &App) {
    let (summary, plain, strong) = (&app.model.summary, Style::new(), page.theme.strong());
    let count = summary.connections.iter().sum::<usize>();
    let every = format!("   every {} s", app.interval.as_secs_f64());
    let ends = if count == 1 { "end of a connection" } else { "ends of connections" };
    let numbers = format!(
        " {}, {count} {ends}, {}",
        several(summary.programs, "program"),
        several(summary.listeners, "listener"),
    );
    let paused = if app.is_paused { " PAUSED" } else { "" };
    page.line(&[("usmc top:", strong), (paused, strong), (&numbers, plain), (&every, plain)]);
    let conns = summary.connections.map(|n| n as f64);
    bar(page, "Connections", summary.connections.map(|n| n.to_string()), conns);
    let bytes = summary.bytes.map(|bytes| bytes.unwrap_or(0.0));
    bar(page, "Bytes/s", summary.bytes.map(short), bytes);
    let rates = &summary.rates;
    let paid = super::counts::sum([rates.spins, rates.sleeps]).filter(|all| *all > 0.0);
    let paid = paid.zip(rates.spins).map(|(all, spins)| spins / all);
    page.line(&[
        ("Messages/s  ", strong),
        (&format!("{} out {} in", short(rates.messages[0]), short(rates.messages[1])), plain),
        ("   Sleeps/s ", strong),
        (&short(rates.sleeps), plain),
        ("   Spins that paid/s ", strong),
        (&format!("{} ({})", short(rates.spins), percent(paid)), plain),
    ]);
    if !summary.reasons.is_empty() {
        let reasons: Vec<String> =
            summary.reasons.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
        page.line(&[("Why TCP     ", strong), (&reasons.join(", "), plain)]);
    }
    if has_more(summary) {
        page.line(&[("Not shown   ", strong), (&more(summary), plain)]);
    }
}

/// What is not in the tables.
pub fn more(summary: &Summary) -> String {
    let mut parts = Vec::new();
    if summary.hidden > 0 {
        let Summary { hidden, hidden_under, .. } = summary;
        parts.push(format!(
            "{hidden} processes of other users, {hidden_under} of them under uSMC (sudo usmc top)"
        ));
    }
    parts.extend(summary.remarks.iter().cloned());
    parts.join("; ")
}

fn several(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// Numbers by mode, and their parts of the whole.
fn bar(page: &mut Page, title: &str, numbers: ByMode<String>, parts: ByMode<f64>) {
    const BAR: usize = 24;
    let theme = page.theme;
    let mut line = vec![(format!("{title:<12}"), theme.strong())];
    for (place, (number, name)) in numbers.iter().zip(["SMCD", "SMCR", "TCP"]).enumerate() {
        line.push((format!("{number:>5} "), Style::new()));
        line.push((format!("{name}  "), theme.of_mode(place)));
    }
    if page.width() >= 72
        && let Some(shared) = share(parts)
    {
        let all: f64 = parts.iter().sum();
        line.push(("[".to_owned(), Style::new()));
        let mut drawn = 0;
        let mut sum = 0.0;
        for (place, part) in parts.into_iter().enumerate() {
            sum += part;
            let until = (sum / all * BAR as f64).round() as usize;
            let sign = ["|", "/", "."][place];
            line.push((sign.repeat(until.saturating_sub(drawn)), theme.of_mode(place)));
            drawn = until;
        }
        line.push(("]".to_owned(), Style::new()));
        line.push((format!(" {:>4}", percent(Some(shared))), theme.strong()));
    }
    let parts: Vec<(&str, Style)> =
        line.iter().map(|(text, style)| (text.as_str(), *style)).collect();
    page.line(&parts);
}

fn draw_table(page: &mut Page, app: &mut App) {
    if page.left.height == 0 {
        return;
    }
    let columns = layout(app.wish.kind.columns(), page.left.width);
    let (area, title) = (page.left, page.theme.title());
    page.buf.set_style(Rect { height: area.height.min(1), ..area }, title);
    let mut x = area.x;
    for (column, width) in &columns {
        let sorts = column.field == app.wish.sort;
        let mark = if app.wish.is_reversed { "^" } else { "*" };
        // The mark has room before the titles of numbers, which stand to the right.
        let text = format!("{}{}", if sorts { mark } else { "" }, column.title);
        let style =
            if sorts { title.add_modifier(Modifier::BOLD | Modifier::UNDERLINED) } else { title };
        cell(page.buf, (x, area.y, *width), &text, column.is_number, style);
        x += width + 1;
    }
    let height = area.height.saturating_sub(1);
    app.scroll(height.into());
    let places = (app.first..app.order.len()).take(height.into());
    for (y, at) in (area.y + 1..).zip(places) {
        let Some(row) = Row::of(&app.model, app.wish.kind, app.order[at]) else { continue };
        let (line, is_selected) = (Rect { y, height: 1, ..area }, at == app.at);
        let mut x = area.x;
        for (column, width) in &columns {
            let style = style_of(page.theme, &row, column.field);
            cell(page.buf, (x, y, *width), &row.cell(column.field), column.is_number, style);
            x += width + 1;
        }
        if is_selected {
            page.buf.set_style(line, page.theme.selected());
        }
    }
    if app.order.is_empty() {
        page.left = Rect { y: area.y + area.height.min(1), height, ..area };
        page.line(&[(nothing(app), Style::new())]);
    }
}

fn nothing(app: &App) -> &'static str {
    match app.wish.kind {
        _ if app.model.summary.programs == 0 => {
            "no program runs under uSMC; start one by usmc run -- PROGRAM"
        }
        _ if app.wish.only_tcp || !app.wish.filter.is_empty() => "nothing is as it was asked for",
        Kind::Connections => "no connections yet",
        Kind::Programs => "no programs",
    }
}

fn style_of(theme: Theme, row: &Row, field: super::arrange::Field) -> Style {
    use super::arrange::Field;
    match (field, row) {
        (Field::Mode, Row::Conn(conn, _)) => {
            theme.of_mode(super::model::place(conn.seen.socket.mode))
        }
        (Field::Smcd, Row::Program(program)) if program.conns[0] > 0 => theme.of_mode(0),
        (Field::Smcr, Row::Program(program)) if program.conns[1] > 0 => theme.of_mode(1),
        (Field::Tcp, Row::Program(program)) if program.conns[2] > 0 => theme.of_mode(2),
        _ => Style::new(),
    }
}

/// Writes a cell, cut to its width.
fn cell(buf: &mut Buffer, (x, y, width): (u16, u16, u16), text: &str, right: bool, style: Style) {
    let len = u16::try_from(text.chars().count()).unwrap_or(u16::MAX);
    let blank = if right { width.saturating_sub(len) } else { 0 };
    // Of a number the begin is what matters, and a cut one would be another.
    let text = if right && len > width { "#" } else { text };
    buf.set_stringn(x + blank, y, text, usize::from(width - blank), style);
}

fn draw_footer(page: &mut Page, app: &App) {
    let (plain, strong) = (Style::new(), page.theme.strong());
    let said = match (&app.typing, &app.problem) {
        (Some(Typing::Filter(text)), _) => {
            format!("Filter: {text}_   (Enter keeps it, Esc clears it)")
        }
        (Some(Typing::Interval(text)), _) => format!("Seconds between looks: {text}_"),
        (None, Some(problem)) => problem.clone(),
        (None, None) if app.screen == Screen::Table => selected(app),
        (None, None) => String::new(),
    };
    if page.left.height > 1 {
        page.line(&[(&said, strong)]);
    }
    let mut asked = Vec::new();
    if app.wish.only_tcp {
        asked.push("only TCP".to_owned());
    }
    if !app.wish.filter.is_empty() {
        asked.push(format!("filter {:?}", app.wish.filter));
    }
    let asked = if asked.is_empty() { String::new() } else { format!("[{}] ", asked.join(", ")) };
    let keys = match app.screen {
        Screen::Table => {
            "q quit  h help  s sort  r reverse  / filter  p programs  c connections  t TCP"
        }
        Screen::Details => "Esc back  space pause  h help  q quit",
        Screen::Help => "any key: back  q quit",
    };
    page.line(&[(&asked, strong), (keys, plain)]);
}

/// The selected row in words, as no table of 80 columns has room for them.
fn selected(app: &App) -> String {
    match app.row() {
        Some(Row::Conn(conn, program)) => {
            let why = conn.seen.fallback_reason().map(|why| format!(": {why}"));
            format!("{} {}{}", program.comm, ends(conn), why.unwrap_or_default())
        }
        Some(Row::Program(program)) => {
            let why: Vec<String> =
                program.reasons.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
            let colon = if why.is_empty() { "" } else { ": TCP " };
            format!("{} {}{colon}{}", program.comm, program.who.0, why.join(", "))
        }
        None => String::new(),
    }
}

fn draw_help(page: &mut Page) {
    let strong = page.theme.strong();
    for (keys, meaning) in [
        ("q, Ctrl-C", "quit"),
        ("arrows, j, k", "select a row; also PgUp, PgDn, Home, End"),
        ("s, <, >", "sort by the next column, the one to the left, to the right"),
        ("r", "reverse the order"),
        ("/", "filter by a part of program, pid, address, mode, device or reason"),
        ("Esc", "clear the filter"),
        ("p, c", "show programs, connections"),
        ("t", "show only what is on TCP"),
        ("Enter", "show the selected row's details"),
        ("d", "change the interval"),
        ("space", "pause, and go on"),
        ("h, ?", "this help"),
    ] {
        page.line(&[(&format!("  {keys:<14}"), strong), (meaning, Style::new())]);
    }
    page.line(&[]);
    for line in [
        "TX/s, RX/s: bytes. MSG/s: calls in a ring, segments with data on TCP.",
        "FILL: bytes in the fuller ring that wait to be read. SHARE: bytes not over TCP.",
        "SLP/s: sleeps in the kernel. SPIN/s: spins that made one unnecessary.",
    ] {
        page.line(&[(line, Style::new())]);
    }
}
