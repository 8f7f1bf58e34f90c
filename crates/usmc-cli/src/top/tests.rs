//! The model, the order of rows, keys, and what is drawn, without a terminal and without a process.

use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::{Color, Modifier};
use usmc::observe::{Mode, State};
use usmc::reason::Reason;

use super::app::{App, Effect, Screen, interval};
use super::arrange::{Field, Kind, Row, Wish, arrange, layout};
use super::batch;
use super::draw::{Theme, draw};
use super::model::Model;
use super::sample::{app, look, program, seen, socket};
use crate::sockets::Look;

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn press(app: &mut App, keys: &[KeyCode]) -> Effect {
    let mut effect = Effect::Draw;
    for code in keys {
        effect = app.key(KeyEvent::new(*code, KeyModifiers::NONE));
    }
    effect
}

fn say(app: &mut App, text: &str) -> Effect {
    press(app, &text.chars().map(KeyCode::Char).collect::<Vec<_>>())
}

/// A column of what is shown.
fn column(app: &App, field: Field) -> Vec<String> {
    let row = |at: &usize| Row::of(&app.model, app.wish.kind, *at).expect("a row").cell(field);
    app.order.iter().map(row).collect()
}

/// What is on a screen of this size.
fn screen(app: &mut App, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a backend");
    terminal.draw(|frame| draw(frame, app, Theme { has_colours: true })).expect("drawn");
    let buffer = terminal.backend().buffer().clone();
    let line = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

#[test]
fn rates_are_what_happened_between_two_looks() {
    let mut app = app();
    assert_eq!(column(&app, Field::Tx), ["100", "50", "-"]);
    assert_eq!(column(&app, Field::Rx), ["50", "100", "-"]);
    assert_eq!(column(&app, Field::Messages), ["150", "150", "-"]);
    assert_eq!(column(&app, Field::Mode), ["SMCD", "SMCD", "TCP"]);
    let summary = &app.model.summary;
    assert_eq!(summary.connections, [2, 0, 1]);
    assert_eq!(summary.bytes, [Some(300.0), Some(0.0), Some(0.0)]);
    assert_eq!(summary.rates.bytes, [Some(150.0), Some(150.0)]);
    assert_eq!(summary.rates.spins, Some(75.0));
    assert_eq!(summary.reasons, [(Reason::NotRegistered.text().to_owned(), 1)]);
    press(&mut app, &[KeyCode::Char('p')]);
    assert_eq!(column(&app, Field::Program), ["redis", "client"]);
    assert_eq!(column(&app, Field::Share), ["100%", "100%"]);
}

#[test]
fn the_first_look_has_no_rates() {
    let mut model = Model::default();
    let one = || vec![seen(socket(Mode::Smcd, [1, 2], [900, 900]), 0, 1)];
    model.take(look(one()), seconds(5));
    assert_eq!(model.conns[0].rates.bytes, [None; 2]);
    assert_eq!(model.programs[0].rates.bytes, [None; 2]);
    assert_eq!(model.summary.bytes, [None; 3]);
    // No time has passed: no rate either, and no division by nothing.
    model.take(look(one()), seconds(5));
    assert_eq!(model.conns[0].rates.bytes, [None; 2]);
}

#[test]
fn a_number_that_another_process_or_socket_has_now_is_another_connection() {
    let mut model = Model::default();
    let conn = |inode| vec![seen(socket(Mode::Smcd, [1, 2], [900, 900]), 0, inode)];
    model.take(look(conn(1)), seconds(0));
    model.take(look(conn(2)), seconds(1));
    assert_eq!(model.conns[0].rates.bytes, [None; 2], "another inode");
    let mut other = look(conn(2));
    other.programs[0].start = Some(77);
    model.take(other, seconds(2));
    assert_eq!(model.conns[0].rates.bytes, [None; 2], "another process");
    assert_eq!(model.programs[0].rates.bytes, [None; 2], "another process");
}

#[test]
fn a_count_that_goes_back_has_no_rate() {
    let mut model = Model::default();
    let conn = |tx| look(vec![seen(socket(Mode::Smcd, [1, 2], [tx, 5]), 0, 1)]);
    model.take(conn(u64::MAX), seconds(0));
    model.take(conn(3), seconds(1));
    assert_eq!(model.conns[0].rates.bytes, [None, Some(0.0)]);
}

#[test]
fn a_program_has_what_its_closed_connections_did() {
    let mut model = Model::default();
    let at = |conns: Vec<(u64, u64)>, closed| {
        let conns = conns.into_iter();
        let conns = conns.map(|(inode, tx)| seen(socket(Mode::Smcd, [1, 2], [tx, 0]), 0, inode));
        Look {
            programs: vec![program(9, "p", closed)],
            sockets: conns.collect(),
            ..Look::default()
        }
    };
    model.take(at(vec![(1, 400)], 1000), seconds(0));
    // The first sends 100 more and goes, another comes, sends 30 and goes, a third comes and sends 7.
    model.take(at(vec![(3, 7)], 1000 + 500 + 30), seconds(1));
    assert_eq!(model.programs[0].rates.bytes[0], Some(137.0));
    assert_eq!(model.conns[0].rates.bytes[0], None);
    model.take(at(vec![(3, 7)], 1530), seconds(2));
    assert_eq!(model.programs[0].rates.bytes[0], Some(0.0));
}

#[test]
fn what_changes_over_goes_on_with_its_bytes() {
    let mut model = Model::default();
    let conn = |mode, tx| {
        let mut one = seen(socket(mode, [1, 2], [tx, 0]), 0, 1);
        if mode == Mode::Tcp {
            let kernel = crate::sock_diag::Kernel {
                state: crate::sock_diag::ESTABLISHED,
                local: one.socket.local,
                peer: one.socket.peer,
                tx_bytes: tx,
                rx_bytes: 0,
                tx_queued: 0,
                rx_queued: 0,
                tx_segments: 9,
                rx_segments: 9,
            };
            one.kernel = Some(kernel);
        }
        look(vec![one])
    };
    model.take(conn(Mode::Tcp, 100), seconds(0));
    model.take(conn(Mode::Tcp, 150), seconds(1));
    assert_eq!(model.summary.bytes[2], Some(50.0));
    model.take(conn(Mode::Smcd, 250), seconds(2));
    assert_eq!(model.conns[0].rates.bytes[0], Some(100.0));
    assert_eq!(model.conns[0].rates.messages, [None; 2], "segments are no calls");
}

#[test]
fn the_fill_is_that_of_the_fuller_ring_and_may_be_more() {
    let mut model = Model::default();
    let other = |tx| {
        let mut one = look(vec![
            seen(socket(Mode::Smcd, [1, 2], [tx, 0]), 0, 1),
            seen(socket(Mode::Smcd, [2, 1], [0, 0]), 1, 2),
        ]);
        one.join_ends();
        one
    };
    for (tx, cell) in [(0, "0%"), (131_072, "50%"), (1_048_576, "400%"), (4_194_304, "16x")] {
        model.take(other(tx), seconds(0));
        let row = Row::of(&model, Kind::Connections, 0).expect("a row");
        assert_eq!(row.cell(Field::Fill), cell);
    }
}

#[test]
fn listeners_are_counted_and_are_no_connections() {
    let mut model = Model::default();
    let mut listener = socket(Mode::Tcp, [80, 0], [0, 0]);
    (listener.state, listener.reason) = (State::Listen, 0);
    model.take(look(vec![seen(listener, 0, 1)]), seconds(0));
    assert_eq!((model.conns.len(), model.summary.listeners), (0, 1));
}

#[test]
fn rows_are_sorted_by_the_column_and_the_other_way_round() {
    let mut app = app();
    let by = |app: &mut App, sort: Field, is_reversed: bool| {
        (app.wish.sort, app.wish.is_reversed) = (sort, is_reversed);
        app.arrange();
    };
    by(&mut app, Field::Tx, true);
    assert_eq!(column(&app, Field::Tx), ["-", "50", "100"]);
    by(&mut app, Field::Pid, false);
    assert_eq!(column(&app, Field::Pid), ["100", "200", "200"]);
    by(&mut app, Field::Program, false);
    assert_eq!(column(&app, Field::Program), ["client", "client", "redis"]);
    by(&mut app, Field::Peer, false);
    assert_eq!(column(&app, Field::Peer), ["127.0.0.1:80", "127.0.0.1:6379", "127.0.0.1:40000"]);
    by(&mut app, Field::Reason, false);
    assert_eq!(column(&app, Field::Mode)[0], "TCP", "those with a reason come first");
}

#[test]
fn a_filter_looks_at_programs_addresses_and_reasons() {
    let mut app = app();
    for (text, rows) in
        [("REDIS", 1), ("client", 2), ("40000", 2), ("smcd", 2), ("not under usmc", 1), ("x", 0)]
    {
        say(&mut app, "/");
        say(&mut app, text);
        press(&mut app, &[KeyCode::Enter]);
        assert_eq!(app.order.len(), rows, "{text}");
        press(&mut app, &[KeyCode::Esc]);
        assert_eq!(app.order.len(), 3);
    }
    say(&mut app, "t");
    assert_eq!(column(&app, Field::Mode), ["TCP"]);
    say(&mut app, "p");
    assert_eq!(column(&app, Field::Program), ["client"], "a program with connections on TCP");
}

#[test]
fn the_chosen_row_stays_chosen_wherever_it_goes() {
    let mut app = app();
    press(&mut app, &[KeyCode::Down]);
    assert_eq!(app.row().expect("a row").cell(Field::Tx), "50");
    say(&mut app, "r");
    assert_eq!(app.row().expect("a row").cell(Field::Tx), "50");
    press(&mut app, &[KeyCode::Enter]);
    assert_eq!(app.screen, Screen::Details);
    assert!(screen(&mut app, 80, 24).iter().any(|line| line.contains("127.0.0.1:40000")));
    // It ends.
    let rest = vec![seen(socket(Mode::Smcd, [6379, 40_000], [1, 1]), 0, 1)];
    app.model.take(look(rest), seconds(14));
    app.arrange();
    assert!(screen(&mut app, 80, 24).iter().any(|line| line.contains("It has ended")));
    press(&mut app, &[KeyCode::Esc]);
    assert!(app.row().is_some() && app.screen == Screen::Table);
}

#[test]
fn keys_do_what_the_help_says() {
    let mut app = app();
    assert_eq!(say(&mut app, "d0.5"), Effect::Draw);
    assert_eq!(press(&mut app, &[KeyCode::Enter]), Effect::Look);
    assert_eq!(app.interval, Duration::from_millis(500));
    say(&mut app, "dx");
    press(&mut app, &[KeyCode::Enter]);
    assert!(app.problem.as_deref().is_some_and(|problem| problem.contains("write seconds")));
    assert_eq!((say(&mut app, " "), app.is_paused), (Effect::Draw, true));
    assert_eq!((say(&mut app, " "), app.is_paused), (Effect::Look, false));
    let before = app.wish.sort;
    say(&mut app, "s");
    assert_eq!(app.wish.sort, Field::Rx);
    say(&mut app, "<");
    assert_eq!(app.wish.sort, before);
    say(&mut app, "?");
    assert!(screen(&mut app, 80, 24).iter().any(|line| line.contains("reverse the order")));
    // Typed text is no order.
    say(&mut app, "x/q");
    assert_eq!(app.wish.filter, "q");
    press(&mut app, &[KeyCode::Esc]);
    assert_eq!(say(&mut app, "q"), Effect::Quit);
    let control = |c| KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL);
    assert_eq!(app.key(control('c')), Effect::Quit);
    assert_eq!(app.key(control('z')), Effect::Suspend);
}

#[test]
fn an_interval_has_bounds() {
    for (text, is_one) in [
        ("2", true),
        (" 0.1", true),
        ("3600", true),
        ("0.05", false),
        ("3601", false),
        ("-1", false),
        ("NaN", false),
        ("inf", false),
        ("", false),
    ] {
        assert_eq!(interval(text).is_ok(), is_one, "{text}");
    }
}

#[test]
fn a_screen_of_80_columns_has_all_that_matters() {
    let lines = screen(&mut app(), 80, 24);
    for part in [
        "usmc top: 2 programs, 3 ends of connections, 0 listeners   every 2 s",
        "Connections     2 SMCD      0 SMCR      1 TCP  [||||||||||||||||........]  67%",
        "Bytes/s       300 SMCD      0 SMCR      0 TCP  [||||||||||||||||||||||||] 100%",
        "Messages/s  150 out 150 in   Sleeps/s 15   Spins that paid/s 75 (83%)",
        "Why TCP     1 peer is not under uSMC on this device",
        "    PID PROGRAM       PEER                  MODE *TX/s  RX/s MSG/s FILL WHY TCP",
        "    100 redis         127.0.0.1:40000       SMCD   100    50   150    - -",
        "    200 client        127.0.0.1:6379        SMCD    50   100   150    - -",
        "    200 client        127.0.0.1:80          TCP      -     -     -    - peer is",
    ] {
        assert!(lines.iter().any(|line| line == part), "{part}\n{}", lines.join("\n"));
    }
    assert_eq!(lines[22], "redis 127.0.0.1:6379 <- 127.0.0.1:40000");
    assert!(lines[23].starts_with("q quit"), "{}", lines[23]);
}

#[test]
fn programs_and_details_are_drawn() {
    let mut app = app();
    press(&mut app, &[KeyCode::End, KeyCode::Enter]);
    let text = screen(&mut app, 80, 24).join("\n");
    for part in [
        "Program          client, process 200, descriptor 5",
        "Peer address     127.0.0.1:80",
        "State            ACTIVE, the connecting end",
        "Why TCP          peer is not under uSMC on this device",
        "What helps       start the other end by `usmc run`",
    ] {
        assert!(text.contains(part), "{part}\n{text}");
    }
    press(&mut app, &[KeyCode::Esc, KeyCode::Home, KeyCode::Enter]);
    let text = screen(&mut app, 80, 24).join("\n");
    assert!(text.contains("Rings            262144 bytes each, 16384 taken for sending"), "{text}");
    assert!(text.contains("Sent             1200 bytes"), "{text}");
    say(&mut app, "p");
    let text = screen(&mut app, 100, 24).join("\n");
    assert!(text.contains("200 client") && text.contains("SHARE"), "{text}");
    press(&mut app, &[KeyCode::Down, KeyCode::Enter]);
    let text = screen(&mut app, 80, 24).join("\n");
    assert!(text.contains("Connections      1 SMCD, 0 SMCR, 1 TCP, 0 listeners"), "{text}");
    assert!(text.contains("Since it began   1 connections in a ring, 1 on TCP only"), "{text}");
}

#[test]
fn no_size_of_a_screen_is_too_small() {
    let mut app = app();
    for width in [1, 2, 7, 20, 40, 79, 200] {
        for height in [1, 2, 3, 4, 8, 13, 14, 50] {
            for keys in ["", "p", "c", "?", "x/a", "d"] {
                say(&mut app, keys);
                screen(&mut app, width, height);
                press(&mut app, &[KeyCode::Esc, KeyCode::Enter]);
                screen(&mut app, width, height);
                press(&mut app, &[KeyCode::Esc, KeyCode::Esc]);
            }
        }
    }
    // Nor is there too little to show.
    screen(&mut App::new(seconds(1)), 80, 24);
    let lines = screen(&mut self::app(), 40, 24);
    assert!(lines.iter().any(|line| line.contains("MODE") && line.contains("TX/s")), "{lines:#?}");
    assert!(lines.iter().any(|line| line.contains("redis") && line.contains("100")), "{lines:#?}");
}

#[test]
fn colours_are_left_out_where_they_are_not_wanted() {
    let styles = |has_colours| {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a backend");
        let mut app = app();
        terminal.draw(|frame| draw(frame, &mut app, Theme { has_colours })).expect("drawn");
        let cells = terminal.backend().buffer().content().to_vec();
        let coloured = cells.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset);
        let reversed = cells.iter().any(|cell| cell.modifier.contains(Modifier::REVERSED));
        (coloured, reversed)
    };
    assert_eq!((styles(true), styles(false)), ((true, true), (false, true)));
}

#[test]
fn columns_give_way_to_those_that_matter_more() {
    for kind in [Kind::Connections, Kind::Programs] {
        for width in 0..300 {
            let shown = layout(kind.columns(), width);
            let sum: u16 = shown.iter().map(|(_, width)| *width).sum();
            let gaps = shown.len().saturating_sub(1) as u16;
            assert!(sum + gaps <= width, "{width}");
            assert!(width < 5 || !shown.is_empty(), "{width}");
        }
        assert_eq!(layout(kind.columns(), 300).len(), kind.columns().len());
    }
}

#[test]
fn pipes_get_tables_and_objects() {
    let app = app();
    let mut text = Vec::new();
    batch::print(&mut text, &app.model, &app.wish).expect("written");
    let text = String::from_utf8(text).expect("UTF-8");
    assert!(
        text.starts_with(
            "Programs 2, listeners 0, connections 2 SMCD, 0 SMCR, 1 TCP (67% not TCP)\n"
        )
    );
    let titles = text.lines().find(|line| line.contains("WHY TCP")).expect("titles");
    assert!(titles.contains("LOCAL") && titles.contains("SPIN/s"), "{titles}");
    assert!(text.ends_with("peer is not under uSMC on this device\n\n"), "{text}");
    let mut json = Vec::new();
    batch::print_json(&mut json, &app.model, &app.wish).expect("written");
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json["connections"][0]["rates"]["bytes"][0], 100.0);
    assert_eq!(json["connections"].as_array().map(Vec::len), Some(3));
    assert_eq!(json["programs"][1]["reasons"][0][1], 1);
}

/// A look at 2000 connections, both ends, and its picture take milliseconds.
#[test]
fn many_connections_cost_little() {
    let mut app = App::new(seconds(1));
    let at = |n: u64| {
        let conn = |i: u64| {
            let [a, b] = [10_000 + i as u16, 20_000 + i as u16];
            let one = seen(socket(Mode::Smcd, [a, b], [n * i, n]), 0, 2 * i);
            [one, seen(socket(Mode::Smcd, [b, a], [n, n * i]), 1, 2 * i + 1)]
        };
        look((0..2000).flat_map(conn).collect())
    };
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a backend");
    let begin = Instant::now();
    for n in 0..10 {
        app.model.take(at(n), seconds(n));
        app.arrange();
        terminal.draw(|frame| draw(frame, &mut app, Theme { has_colours: true })).expect("drawn");
    }
    let each = begin.elapsed() / 10;
    assert_eq!(app.order.len(), 4000);
    // Of a build for debugging on a busy machine.
    assert!(each < Duration::from_millis(500), "{each:?}");
}

#[test]
fn a_wish_can_be_for_nothing() {
    let nothing = Wish { filter: "nobody".to_owned(), ..app().wish };
    assert!(arrange(&app().model, &nothing).is_empty());
    assert!(arrange(&Model::default(), &app().wish).is_empty());
}
