//! The plot of a sweep: a panel for each figure of each case, a line in it for each place, and a step along it for each value of
//! the setting.

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::HPos;

use super::mode::Mode;
use super::plot::{Area, Drawn, FAINT, GRID, INK, write};
use super::record::{CaseRecord, MeasureRecord, Record};
use super::statistics::{Spread, short};
use super::sweep::Point;

const WIDTH: i32 = 1360;
const COLUMNS: usize = 3;
const PANEL: (i32, i32) = (440, 280);
const MARGIN: i32 = 20;
const HEAD: i32 = 92;
/// Inside a panel, where its lines are: left, right, above, below.
const INSIDE: [i32; 4] = [58, 16, 40, 40];
const LINE: i32 = 20;

const COLOURS: [RGBColor; 6] = [
    RGBColor(18, 120, 84),
    RGBColor(196, 72, 40),
    RGBColor(54, 96, 180),
    RGBColor(150, 90, 170),
    RGBColor(190, 140, 20),
    RGBColor(90, 90, 90),
];

/// A figure at one value of the setting.
struct Dot {
    step: usize,
    spread: Spread,
}

struct Panel<'a> {
    title: String,
    /// What the figures are.
    unit: String,
    /// By place.
    lines: Vec<(&'a str, Vec<Dot>)>,
}

/// All panels, and what they have in common.
struct Panels<'a> {
    setting: &'a str,
    values: Vec<&'a str>,
    places: Vec<&'a str>,
    all: Vec<Panel<'a>>,
}

/// The plot as SVG.
///
/// # Errors
/// When the library that draws it fails.
pub fn svg(record: &Record) -> Result<String> {
    let mut text = String::new();
    let panels = Panels::of(record);
    let rows = panels.all.len().div_ceil(COLUMNS) as i32;
    let height = HEAD + LINE * panels.places.len() as i32 + rows * PANEL.1 + MARGIN;
    {
        let area =
            SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32)).into_drawing_area();
        draw(&area, record, &panels).map_err(|problem| anyhow!("cannot draw: {problem}"))?;
    }
    Ok(text)
}

impl<'a> Panels<'a> {
    fn of(record: &'a Record) -> Panels<'a> {
        let mut panels =
            Panels { setting: "", values: Vec::new(), places: Vec::new(), all: Vec::new() };
        for case in &record.cases {
            let Some(point) = &case.point else { continue };
            panels.setting = &point.setting;
            let step = place_of(&mut panels.values, &point.value);
            place_of(&mut panels.places, &point.place);
            for measure in &case.measures {
                panels.add(case, point, measure, step);
            }
        }
        panels
    }

    fn add(&mut self, case: &CaseRecord, point: &'a Point, measure: &MeasureRecord, step: usize) {
        let title = match &case.measures[..] {
            [_] => point.case.clone(),
            _ => format!("{}: {}", point.case, measure.name),
        };
        let (unit, spread) = match measure.factors.get(&Mode::Usmc) {
            Some(factor) => ("× TCP", Some(factor)),
            None => (&measure.unit[..], measure.figures.get(&Mode::Usmc)),
        };
        let Some(&spread) = spread else { return };
        let at = self.all.iter().position(|panel| panel.title == title).unwrap_or_else(|| {
            self.all.push(Panel { title, unit: unit.to_owned(), lines: Vec::new() });
            self.all.len() - 1
        });
        let lines = &mut self.all[at].lines;
        let line = lines.iter().position(|line| line.0 == point.place).unwrap_or_else(|| {
            lines.push((&point.place, Vec::new()));
            lines.len() - 1
        });
        lines[line].1.push(Dot { step, spread });
    }
}

/// Where the word is, which is added if it is new.
fn place_of<'a>(words: &mut Vec<&'a str>, word: &'a str) -> usize {
    words.iter().position(|known| *known == word).unwrap_or_else(|| {
        words.push(word);
        words.len() - 1
    })
}

fn draw(area: &Area, record: &Record, panels: &Panels) -> Drawn {
    area.fill(&WHITE)?;
    let title = format!("uSMC by {}", panels.setting);
    write(area, &title, (MARGIN, 28), 24, &INK, HPos::Left)?;
    let about = format!(
        "Median of {} rounds taken in turn, lines: lowest to highest; runs of {} s. {}",
        record.rounds,
        short(record.seconds),
        record.machine.shown()
    );
    write(area, &about, (MARGIN, 56), 13, &FAINT, HPos::Left)?;
    for (i, place) in panels.places.iter().enumerate() {
        let y = HEAD - 8 + LINE * i as i32;
        let stroke = colour(i).stroke_width(3);
        area.draw(&PathElement::new([(MARGIN, y), (MARGIN + 24, y)], stroke))?;
        write(area, place, (MARGIN + 32, y), 13, &INK, HPos::Left)?;
    }
    let top = HEAD + LINE * panels.places.len() as i32;
    for (i, panel) in panels.all.iter().enumerate() {
        let (column, row) = ((i % COLUMNS) as i32, (i / COLUMNS) as i32);
        draw_panel(area, panels, panel, (MARGIN + column * PANEL.0, top + row * PANEL.1))?;
    }
    area.present()?;
    Ok(())
}

fn colour(i: usize) -> RGBColor {
    COLOURS[i % COLOURS.len()]
}

/// Where figures of a panel are: a logarithmic scale.
struct Heights {
    least: f64,
    most: f64,
    bottom: i32,
    top: i32,
}

impl Heights {
    fn of(panel: &Panel, bottom: i32, top: i32) -> Heights {
        let spreads = panel.lines.iter().flat_map(|line| &line.1).map(|dot| dot.spread);
        let (mut least, mut most) = (f64::INFINITY, f64::MIN_POSITIVE);
        for spread in spreads {
            least = least.min(spread.least);
            most = most.max(spread.most);
        }
        // TCP's line is in the picture where it is near.
        if panel.unit.starts_with('×') {
            least = least.min(0.9);
        }
        Heights { least: least.max(1e-6) / 1.1, most: most * 1.1, bottom, top }
    }

    fn y(&self, figure: f64) -> i32 {
        let [least, most, figure] = [self.least, self.most, figure].map(f64::ln);
        let part = ((figure - least) / (most - least)).clamp(0.0, 1.0);
        self.bottom - (f64::from(self.bottom - self.top) * part) as i32
    }

    /// Round figures, not too many.
    fn ticks(&self) -> Vec<f64> {
        let steps: &[f64] = match self.most / self.least {
            ratio if ratio < 4.0 => &[1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0],
            ratio if ratio < 200.0 => &[1.0, 2.0, 5.0],
            _ => &[1.0],
        };
        let powers = (-6..9).flat_map(|power| steps.iter().map(move |s| s * 10f64.powi(power)));
        powers.filter(|tick| (self.least..=self.most).contains(tick)).collect()
    }
}

fn draw_panel(area: &Area, panels: &Panels, panel: &Panel, (x, y): (i32, i32)) -> Drawn {
    let (left, right) = (x + INSIDE[0], x + PANEL.0 - INSIDE[1]);
    let (top, bottom) = (y + INSIDE[2], y + PANEL.1 - INSIDE[3]);
    let title = format!("{}, {}", panel.title, panel.unit);
    write(area, &title, (left, top - 16), 14, &INK, HPos::Left)?;
    let heights = Heights::of(panel, bottom, top);
    for tick in heights.ticks() {
        let y = heights.y(tick);
        let is_tcp = tick == 1.0 && panel.unit.starts_with('×');
        let stroke = if is_tcp { FAINT.stroke_width(2) } else { GRID.stroke_width(1) };
        area.draw(&PathElement::new([(left, y), (right, y)], stroke))?;
        write(area, &short(tick), (left - 8, y), 12, &FAINT, HPos::Right)?;
    }
    let steps = panels.values.len().max(2) as i32 - 1;
    let across = |step: usize| left + 16 + (right - left - 32) * step as i32 / steps;
    for (step, value) in panels.values.iter().enumerate() {
        write(area, value, (across(step), bottom + 14), 12, &FAINT, HPos::Center)?;
    }
    for (place, dots) in &panel.lines {
        let i = panels.places.iter().position(|known| known == place).unwrap_or_default();
        let points = dots.iter().map(|dot| (across(dot.step), heights.y(dot.spread.median)));
        area.draw(&PathElement::new(points.collect::<Vec<_>>(), colour(i).stroke_width(2)))?;
        for dot in dots {
            let at = across(dot.step) + 2 * i as i32;
            let [least, median, most] =
                [dot.spread.least, dot.spread.median, dot.spread.most].map(|f| heights.y(f));
            area.draw(&PathElement::new([(at, least), (at, most)], colour(i).stroke_width(1)))?;
            area.draw(&Circle::new((across(dot.step), median), 3, colour(i).filled()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::plot;
    use super::super::record::tests::sample;
    use super::*;

    #[test]
    fn a_panel_has_a_line_for_each_place_and_a_step_for_each_value() {
        let mut record = sample();
        let case = record.cases.swap_remove(0);
        record.cases.clear();
        for place in ["all CPUs", "1 CPU <"] {
            for value in ["default", "50", "200"] {
                let [setting, name] = ["busy_poll_us", "ipc"].map(str::to_owned);
                let point = Point { case: name, setting, value: value.into(), place: place.into() };
                record.cases.push(CaseRecord { point: Some(point), ..case.clone() });
            }
        }
        let panels = Panels::of(&record);
        assert_eq!((panels.all.len(), panels.values.len(), panels.places.len()), (1, 3, 2));
        let lines = &panels.all[0].lines;
        assert!(lines.iter().all(|(_, dots)| dots.iter().map(|dot| dot.step).eq(0..3)));
        let text = plot::svg(&record).expect("SVG");
        let document = roxmltree::Document::parse(&text).expect("XML");
        let words: Vec<&str> =
            document.descendants().filter_map(|node| node.text()).map(str::trim).collect();
        for word in ["uSMC by busy_poll_us", "ipc, × TCP", "all CPUs", "1 CPU <", "default", "200"]
        {
            assert!(words.contains(&word), "{word}: {words:?}");
        }
    }

    #[test]
    fn heights_have_their_ends_inside() {
        let heights = Heights { least: 0.5, most: 8.0, bottom: 200, top: 100 };
        assert_eq!((heights.y(0.5), heights.y(8.0)), (200, 100));
        assert_eq!(heights.ticks(), [0.5, 1.0, 2.0, 5.0]);
        assert!(heights.y(1.0) > heights.y(2.0));
    }
}
