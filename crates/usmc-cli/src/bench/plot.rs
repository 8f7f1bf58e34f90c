//! The plot: how many times better than TCP, a line for each figure, on a logarithmic scale.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::mode::Mode;
use super::record::{CaseRecord, MeasureRecord, Record};
use super::statistics::{Spread, short};
use super::sweep_plot;
use super::targets::{self, Target};

const WIDTH: i32 = 1360;
/// Bars begin and end here; names are to the left, figures to the right.
const LEFT: i32 = 400;
const RIGHT: i32 = 900;
/// Where the ratio ends and the figures begin.
const RATIO: i32 = 972;
const FIGURES: i32 = 994;
const HEAD: i32 = 118;
const FOOT: i32 = 50;
const ROW: i32 = 24;
/// Above the first row of each workload.
const GAP: i32 = 10;

const SMC: RGBColor = RGBColor(18, 120, 84);
const WORSE: RGBColor = RGBColor(196, 72, 40);
const UNIX: RGBColor = RGBColor(150, 176, 206);
pub(super) const INK: RGBColor = RGBColor(34, 34, 34);
pub(super) const FAINT: RGBColor = RGBColor(110, 110, 110);
pub(super) const GRID: RGBColor = RGBColor(222, 222, 222);
const BAND: RGBColor = RGBColor(246, 247, 249);

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A figure and where it is.
struct Row<'a> {
    case: &'a CaseRecord,
    measure: &'a MeasureRecord,
    y: i32,
    first: bool,
}

/// The plot as SVG.
///
/// # Errors
/// When the library that draws it fails.
pub fn svg(record: &Record) -> Result<String> {
    if record.cases.iter().any(|case| case.point.is_some()) {
        return sweep_plot::svg(record);
    }
    let mut text = String::new();
    let (rows, height) = rows(record);
    {
        let area =
            SVGBackend::with_string(&mut text, (WIDTH as u32, height as u32)).into_drawing_area();
        draw(&area, record, &rows, height).map_err(|problem| anyhow!("cannot draw: {problem}"))?;
    }
    Ok(text)
}

fn rows(record: &Record) -> (Vec<Row<'_>>, i32) {
    let mut rows: Vec<Row> = Vec::new();
    let mut y = HEAD;
    for case in &record.cases {
        for measure in &case.measures {
            let first = rows.last().is_none_or(|row| row.case.workload != case.workload);
            y += if first { GAP } else { 0 };
            rows.push(Row { case, measure, y, first });
            y += ROW;
        }
    }
    (rows, y + FOOT)
}

/// Where a factor is.
struct Scale {
    least: f64,
    most: f64,
}

impl Scale {
    fn of(rows: &[Row]) -> Scale {
        let mut scale = Scale { least: 0.5, most: 4.0 };
        for row in rows {
            let spreads = row.measure.factors.values().flat_map(|f| [f.least, f.most]);
            for factor in spreads.chain(row.measure.kernel_smc) {
                scale.least = scale.least.min(factor / 1.2);
                scale.most = scale.most.max(factor * 1.2);
            }
        }
        scale
    }

    fn x(&self, factor: f64) -> i32 {
        let [least, most, factor] = [self.least, self.most, factor].map(f64::ln);
        LEFT + (f64::from(RIGHT - LEFT) * ((factor - least) / (most - least)).clamp(0.0, 1.0))
            as i32
    }

    /// 1, 2 and 5 times the powers of ten, or the powers alone where there are many.
    fn ticks(&self) -> Vec<f64> {
        let wide = self.most / self.least > 3000.0;
        let steps: &[f64] = if wide { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let powers = (-3..7).flat_map(|power| steps.iter().map(move |s| s * 10f64.powi(power)));
        powers.filter(|tick| (self.least..=self.most).contains(tick)).collect()
    }
}

pub(super) type Drawn = Result<(), Box<dyn std::error::Error>>;

fn draw(area: &Area, record: &Record, rows: &[Row], height: i32) -> Drawn {
    area.fill(&WHITE)?;
    let scale = Scale::of(rows);
    let bottom = height - FOOT;
    write(area, "TCP, UNIX sockets and uSMC", (20, 28), 24, &INK, HPos::Left)?;
    let rounds = match record.rounds {
        1 => "One round".to_owned(),
        n => format!("Median of {n} rounds, taken in turn; thin lines: lowest to highest"),
    };
    write(
        area,
        &format!("{rounds}. {}", record.machine.shown()),
        (20, 52),
        13,
        &FAINT,
        HPos::Left,
    )?;
    legend(area)?;
    for row in rows.iter().step_by(2) {
        let corners = [(12, row.y), (WIDTH - 12, row.y + ROW)];
        area.draw(&Rectangle::new(corners, BAND.filled()))?;
    }
    for tick in scale.ticks() {
        let x = scale.x(tick);
        let (style, width) = if tick == 1.0 { (FAINT, 2) } else { (GRID, 1) };
        area.draw(&PathElement::new([(x, HEAD), (x, bottom)], style.stroke_width(width)))?;
        let label = format!("{tick} ×");
        write(area, &label, (x, HEAD - 10), 12, &FAINT, HPos::Center)?;
        write(area, &label, (x, bottom + 14), 12, &FAINT, HPos::Center)?;
    }
    write(area, "better than TCP by", (LEFT - 16, HEAD - 10), 12, &FAINT, HPos::Right)?;
    write(area, "TCP → uSMC", (FIGURES, HEAD - 10), 12, &FAINT, HPos::Left)?;
    write(area, "target", (WIDTH - 20, HEAD - 10), 12, &FAINT, HPos::Right)?;
    for row in rows {
        draw_row(area, &scale, row)?;
    }
    area.present()?;
    Ok(())
}

fn legend(area: &Area) -> Drawn {
    let mut x = 20;
    let y = 80;
    for (what, width, kind) in [
        ("uSMC", 62, 0),
        ("uSMC, worse than TCP", 160, 1),
        ("UNIX sockets", 112, 2),
        ("target", 68, 3),
        ("kernel SMC, published, on other machines", 270, 4),
    ] {
        let middle = y;
        match kind {
            0 => bar(area, (x, x + 16), middle, 8, &SMC)?,
            1 => bar(area, (x, x + 16), middle, 8, &WORSE)?,
            2 => bar(area, (x, x + 16), middle, 5, &UNIX)?,
            3 => target_mark(area, x + 8, middle)?,
            _ => published_mark(area, x + 8, middle)?,
        }
        write(area, what, (x + 22, y), 13, &INK, HPos::Left)?;
        x += width + 24;
    }
    Ok(())
}

fn draw_row(area: &Area, scale: &Scale, row: &Row) -> Drawn {
    let (case, measure) = (row.case, row.measure);
    let middle = row.y + ROW / 2;
    let name = format!("{}: {}", case.name, measure.name);
    let size = if name.chars().count() > 52 { 12 } else { 13 };
    let ink = if row.first { INK } else { RGBColor(60, 60, 60) };
    write(area, &name, (LEFT - 16, middle), size, &ink, HPos::Right)?;
    let from = scale.x(1.0);
    if let Some(unix) = measure.factors.get(&Mode::Unix) {
        bar(area, (from, scale.x(unix.median)), middle + 6, 5, &UNIX)?;
    }
    if let Some(smc) = measure.factors.get(&Mode::Usmc) {
        let colour = if smc.median < 1.0 { WORSE } else { SMC };
        bar(area, (from, scale.x(smc.median)), middle - 2, 8, &colour)?;
        whisker(area, scale, smc, middle - 2)?;
    }
    for target in targets::of(&case.name, &measure.name) {
        if let Target::Factor(least) = target {
            target_mark(area, scale.x(least), middle)?;
        }
    }
    if let Some(published) = measure.kernel_smc {
        published_mark(area, scale.x(published), middle)?;
    }
    if let Some(factor) = measure.factors.get(&Mode::Usmc) {
        let ratio = format!("{} ×", short(factor.median));
        write(area, &ratio, (RATIO, middle), 13, &INK, HPos::Right)?;
    }
    write(area, &figures(measure), (FIGURES, middle), 13, &INK, HPos::Left)?;
    let (mut words, mut all_met) = (Vec::new(), true);
    for verdict in &measure.targets {
        let Some(met) = verdict.met else { continue };
        words.push(format!("{}{}", if met { "" } else { "missed: " }, verdict.target));
        all_met &= met;
    }
    let colour = if all_met { SMC } else { WORSE };
    write(area, &words.join(", "), (WIDTH - 20, middle), 12, &colour, HPos::Right)?;
    Ok(())
}

/// TCP's figure and uSMC's.
fn figures(measure: &MeasureRecord) -> String {
    let median = |mode| measure.figures.get(&mode).map(|figure: &Spread| short(figure.median));
    let usmc = median(Mode::Usmc).unwrap_or_default();
    match median(Mode::Tcp) {
        Some(tcp) => format!("{tcp} → {usmc} {}", measure.unit),
        None => format!("{usmc} {}", measure.unit),
    }
}

fn bar(area: &Area, (from, to): (i32, i32), middle: i32, thick: i32, colour: &RGBColor) -> Drawn {
    let corners = [(from.min(to), middle - thick / 2), (from.max(to), middle + thick - thick / 2)];
    area.draw(&Rectangle::new(corners, colour.filled()))?;
    Ok(())
}

fn whisker(area: &Area, scale: &Scale, factor: &Spread, y: i32) -> Drawn {
    let (from, to) = (scale.x(factor.least), scale.x(factor.most));
    if to > from {
        area.draw(&PathElement::new([(from, y), (to, y)], INK.stroke_width(1)))?;
        for x in [from, to] {
            area.draw(&PathElement::new([(x, y - 3), (x, y + 3)], INK.stroke_width(1)))?;
        }
    }
    Ok(())
}

fn target_mark(area: &Area, x: i32, y: i32) -> Drawn {
    area.draw(&PathElement::new([(x, y - 10), (x, y + 10)], INK.stroke_width(2)))?;
    Ok(())
}

fn published_mark(area: &Area, x: i32, y: i32) -> Drawn {
    let corners = [(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)];
    area.draw(&Polygon::new(corners, WHITE.filled()))?;
    let line = [corners[0], corners[1], corners[2], corners[3], corners[0]];
    area.draw(&PathElement::new(line, RGBColor(120, 60, 160).stroke_width(2)))?;
    Ok(())
}

pub(super) fn write(
    area: &Area,
    text: &str,
    at: (i32, i32),
    size: i32,
    colour: &RGBColor,
    side: HPos,
) -> Drawn {
    let font = ("sans-serif", size).into_font().color(colour);
    let style = font.pos(Pos::new(side, VPos::Center));
    area.draw(&Text::new(text.to_owned(), at, style))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::sample;
    use super::*;

    #[test]
    fn the_plot_is_well_formed_and_names_every_figure() {
        let mut record = sample();
        record.machine.processor = "A & B <C>".to_owned();
        let text = svg(&record).expect("SVG");
        let document = roxmltree::Document::parse(&text).expect("XML");
        assert!(document.root_element().has_tag_name(("http://www.w3.org/2000/svg", "svg")));
        let words: Vec<&str> = document.descendants().filter_map(|node| node.text()).collect();
        for case in &record.cases {
            for measure in &case.measures {
                let name = format!("{}: {}", case.name, measure.name);
                assert!(words.iter().any(|word| word.trim() == name), "{name}");
            }
        }
        assert!(words.iter().any(|word| word.contains("A & B <C>")), "{words:?}");
    }

    #[test]
    fn nothing_measured_is_a_plot_too() {
        let mut record = sample();
        record.cases.clear();
        roxmltree::Document::parse(&svg(&record).expect("SVG")).expect("XML");
    }

    #[test]
    fn the_scale_has_its_ends_and_its_one() {
        let scale = Scale { least: 0.1, most: 1000.0 };
        assert_eq!((scale.x(0.1), scale.x(1000.0)), (LEFT, RIGHT));
        assert!(scale.x(1.0) > LEFT && scale.x(1.0) < scale.x(2.0));
        assert_eq!(scale.ticks(), [0.1, 1.0, 10.0, 100.0, 1000.0]);
    }
}
