//! What the user sees and has chosen, and what keys do to that.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::arrange::{Field, Id, Kind, Row, Wish, arrange};
use super::model::Model;

/// Bounds of the time between looks, in seconds.
pub const INTERVAL_S: std::ops::RangeInclusive<f64> = 0.1..=3600.0;
/// Characters of a filter at most.
const TYPED: usize = 60;

/// What fills the screen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Screen {
    /// Connections or programs.
    Table,
    /// The selected row's details.
    Details,
    /// The keys.
    Help,
}

/// What is being typed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Typing {
    /// A filter.
    Filter(String),
    /// Seconds between looks.
    Interval(String),
}

/// What is to be done after a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// To draw.
    Draw,
    /// To look at once, as the time between looks is another one, or looks go on.
    Look,
    /// To stop the process, as its shell's user wishes.
    Suspend,
    /// To end.
    Quit,
}

/// All of it.
#[derive(Debug)]
pub struct App {
    /// What the looks said.
    pub model: Model,
    /// Which rows are wanted. The other table's, too.
    pub wish: Wish,
    other: Wish,
    /// The rows' numbers, in order.
    pub order: Vec<usize>,
    /// The place of the selected row in `order`.
    pub at: usize,
    selected: Option<Id>,
    /// The place of the first row on the screen.
    pub first: usize,
    /// What fills the screen.
    pub screen: Screen,
    /// The first line of details on the screen.
    pub scrolled: usize,
    /// What is being typed.
    pub typing: Option<Typing>,
    /// Whether no looks are taken.
    pub is_paused: bool,
    /// Time between looks.
    pub interval: Duration,
    /// What a look or a key has come to, if that was not what was wanted.
    pub problem: Option<String>,
    /// Of a connection in a region, the kernel at the other end.
    pub host: Option<String>,
    /// Rows of the table on the screen, as they were drawn last.
    pub page: usize,
}

fn wish(kind: Kind) -> Wish {
    Wish { kind, sort: Field::Tx, is_reversed: false, filter: String::new(), only_tcp: false }
}

impl App {
    /// At the begin.
    pub fn new(interval: Duration) -> App {
        App {
            model: Model::default(),
            wish: wish(Kind::Connections),
            other: wish(Kind::Programs),
            order: Vec::new(),
            at: 0,
            selected: None,
            first: 0,
            screen: Screen::Table,
            scrolled: 0,
            typing: None,
            is_paused: false,
            interval,
            problem: None,
            host: None,
            page: 10,
        }
    }

    /// What the command line says.
    pub fn begin_with(&mut self, programs: bool, only_tcp: bool, filter: Option<&str>) {
        if programs {
            self.show(Kind::Programs);
        }
        self.wish.only_tcp = only_tcp;
        filter.unwrap_or_default().clone_into(&mut self.wish.filter);
    }

    /// After a look or another wish: the selected row stays selected, wherever it is now.
    pub fn arrange(&mut self) {
        self.order = arrange(&self.model, &self.wish);
        let ids = self.order.iter().map(|at| Row::of(&self.model, self.wish.kind, *at));
        let found = self
            .selected
            .and_then(|id| ids.into_iter().position(|row| row.is_some_and(|row| row.id() == id)));
        match found {
            Some(at) => self.at = at,
            // It is gone, and so are its details.
            None if self.screen == Screen::Details => self.at = usize::MAX,
            // Nobody has chosen one.
            None if self.selected.is_none() => self.at = 0,
            None => self.select(self.at),
        }
    }

    /// The selected row.
    pub fn row(&self) -> Option<Row<'_>> {
        Row::of(&self.model, self.wish.kind, *self.order.get(self.at)?)
    }

    fn select(&mut self, at: usize) {
        self.at = at.min(self.order.len().saturating_sub(1));
        self.selected = self.row().map(|row| row.id());
    }

    /// Scrolls so that the selected row is one of `page` rows on the screen.
    pub fn scroll(&mut self, page: usize) {
        self.page = page.max(1);
        let at = self.at.min(self.order.len().saturating_sub(1));
        self.first = self.first.clamp((at + 1).saturating_sub(self.page), at);
        // No blank rows below while there are some above.
        self.first = self.first.min(self.order.len().saturating_sub(self.page));
    }

    /// A key was pressed.
    pub fn key(&mut self, key: KeyEvent) -> Effect {
        self.problem = None;
        if key.modifiers.contains(KeyModifiers::ALT) {
            // What terminals send for an Esc with another key right behind it.
            self.key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
        }
        let has_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if has_control => return Effect::Quit,
            KeyCode::Char('z') if has_control => return Effect::Suspend,
            KeyCode::Char(_) if has_control => return Effect::Draw,
            _ => {}
        }
        if let Some(typing) = self.typing.take() {
            return self.typed(typing, key.code);
        }
        match self.screen {
            Screen::Help => {
                self.screen = Screen::Table;
                if key.code == KeyCode::Char('q') { Effect::Quit } else { Effect::Draw }
            }
            Screen::Details => self.in_details(key.code),
            Screen::Table => self.in_table(key.code),
        }
    }

    fn typed(&mut self, typing: Typing, code: KeyCode) -> Effect {
        let is_filter = matches!(typing, Typing::Filter(_));
        let (Typing::Filter(mut text) | Typing::Interval(mut text)) = typing;
        match code {
            KeyCode::Enter if is_filter => return Effect::Draw,
            KeyCode::Enter => return self.set_interval(&text),
            KeyCode::Esc => text.clear(),
            KeyCode::Backspace => {
                text.pop();
            }
            KeyCode::Char(c) if text.chars().count() < TYPED => text.push(c),
            _ => {}
        }
        if is_filter {
            self.wish.filter.clone_from(&text);
            self.arrange();
        }
        if code != KeyCode::Esc {
            self.typing =
                Some(if is_filter { Typing::Filter(text) } else { Typing::Interval(text) });
        }
        Effect::Draw
    }

    fn set_interval(&mut self, text: &str) -> Effect {
        match interval(text) {
            Ok(interval) => {
                self.interval = interval;
                Effect::Look
            }
            Err(problem) => {
                self.problem = Some(problem);
                Effect::Draw
            }
        }
    }

    fn in_details(&mut self, code: KeyCode) -> Effect {
        match code {
            KeyCode::Char('q') => return Effect::Quit,
            KeyCode::Char(' ') => return self.pause(),
            KeyCode::Char('h' | '?') | KeyCode::F(1) => self.screen = Screen::Help,
            KeyCode::Char('p' | 'c') => {
                self.screen = Screen::Table;
                return self.in_table(code);
            }
            KeyCode::Up | KeyCode::Char('k') => self.scrolled = self.scrolled.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.scrolled = self.scrolled.saturating_add(1),
            KeyCode::Esc | KeyCode::Enter | KeyCode::Backspace | KeyCode::Left => {
                (self.screen, self.scrolled) = (Screen::Table, 0);
                self.arrange();
            }
            _ => {}
        }
        Effect::Draw
    }

    fn in_table(&mut self, code: KeyCode) -> Effect {
        let (at, last) = (self.at, self.order.len().saturating_sub(1));
        match code {
            KeyCode::Char('q') => return Effect::Quit,
            KeyCode::Char(' ') => return self.pause(),
            KeyCode::Char('h' | '?') | KeyCode::F(1) => self.screen = Screen::Help,
            KeyCode::Up | KeyCode::Char('k') => self.select(at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(at.saturating_add(1)),
            KeyCode::PageUp => self.select(at.saturating_sub(self.page)),
            KeyCode::PageDown => self.select(at.saturating_add(self.page)),
            KeyCode::Home | KeyCode::Char('g') => self.select(0),
            KeyCode::End | KeyCode::Char('G') => self.select(last),
            KeyCode::Char('s' | '>') | KeyCode::Right => self.sort_by(1),
            KeyCode::Char('<') | KeyCode::Left => self.sort_by(-1),
            KeyCode::Char('r') => self.change(|wish| wish.is_reversed = !wish.is_reversed),
            KeyCode::Char('t') => self.change(|wish| wish.only_tcp = !wish.only_tcp),
            KeyCode::Esc => self.change(|wish| wish.filter.clear()),
            KeyCode::Char('/') => self.typing = Some(Typing::Filter(self.wish.filter.clone())),
            KeyCode::Char('d') => self.typing = Some(Typing::Interval(String::new())),
            KeyCode::Char('p') => self.show(Kind::Programs),
            KeyCode::Char('c') => self.show(Kind::Connections),
            KeyCode::Enter if self.row().is_some() => {
                self.select(at);
                (self.screen, self.scrolled) = (Screen::Details, 0);
            }
            _ => {}
        }
        Effect::Draw
    }

    fn pause(&mut self) -> Effect {
        self.is_paused = !self.is_paused;
        if self.is_paused { Effect::Draw } else { Effect::Look }
    }

    fn change(&mut self, by: impl FnOnce(&mut Wish)) {
        by(&mut self.wish);
        self.arrange();
    }

    /// Sorts by the next column to the right, or to the left.
    fn sort_by(&mut self, step: isize) {
        let columns = self.wish.kind.columns();
        let at = columns.iter().position(|column| column.field == self.wish.sort).unwrap_or(0);
        let next = (at as isize + step).rem_euclid(columns.len() as isize) as usize;
        self.change(|wish| wish.sort = columns[next].field);
        self.select(0);
    }

    fn show(&mut self, kind: Kind) {
        if self.wish.kind != kind {
            std::mem::swap(&mut self.wish, &mut self.other);
            // One filter for both.
            self.wish.filter.clone_from(&self.other.filter);
            self.wish.only_tcp = self.other.only_tcp;
            (self.selected, self.at, self.first) = (None, 0, 0);
            self.arrange();
        }
    }
}

/// Seconds between looks, as somebody writes them.
///
/// # Errors
/// What is wrong with it.
pub fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.trim().parse().ok().filter(|seconds| INTERVAL_S.contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        format!(
            "{text:?} is no interval; write seconds from {} to {}",
            INTERVAL_S.start(),
            INTERVAL_S.end()
        )
    })
}
