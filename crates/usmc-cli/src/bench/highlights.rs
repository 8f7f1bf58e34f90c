//! The picture for people: a few figures in words, and how many times better than TCP each is, on a logarithmic scale.
//!
//! Which figures these are is said by their measures ([`super::case::Measure::highlight`]). The SVG is written here and not by the plot's
//! library, as its colours follow the reader's scheme, which takes a style sheet.

use std::fmt::Write;

use anyhow::{Result, ensure};

use super::mode::Mode;
use super::record::{MeasureRecord, Record};
use super::statistics::{Spread, short};

/// Pixels.
const WIDTH: i32 = 744;
const MARGIN: i32 = 16;
/// Names end here, bars begin and end, the ratio ends, the figures begin.
const NAMES: i32 = 254;
const LEFT: i32 = 266;
const RIGHT: i32 = 504;
const RATIO: i32 = 570;
const FIGURES: i32 = 586;
const HEAD: i32 = 92;
const FOOT: i32 = 62;
const ROW: i32 = 26;
/// Of the title, of a row's words, of all else.
const LARGE: i32 = 17;
const MIDDLE: i32 = 13;
const SMALL: i32 = 11;
const FONTS: &str = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif";

/// Of one scheme, by class of the style sheet.
#[derive(Clone, Copy)]
struct Palette {
    paper: u32,
    ink: u32,
    faint: u32,
    grid: u32,
    usmc: u32,
    unix: u32,
    worse: u32,
}

const LIGHT: Palette = Palette {
    paper: 0xff_ff_ff,
    ink: 0x1f_23_28,
    faint: 0x59_63_6e,
    grid: 0xe1_e4_e8,
    usmc: 0x12_78_54,
    unix: 0x5b_86_b8,
    worse: 0xb4_3c_1e,
};
const DARK: Palette = Palette {
    paper: 0x0d_11_17,
    ink: 0xe6_ed_f3,
    faint: 0x9a_a4_af,
    grid: 0x2a_31_3a,
    usmc: 0x35_b0_84,
    unix: 0x6f_9f_d8,
    worse: 0xf0_80_5c,
};

impl Palette {
    fn rules(&self) -> String {
        let fill = |class: &str, colour: u32| format!(".{class}{{fill:#{colour:06x}}}");
        [
            fill("paper", self.paper),
            fill("ink", self.ink),
            fill("faint", self.faint),
            fill("grid", self.grid),
            fill("usmc", self.usmc),
            fill("unix", self.unix),
            fill("worse", self.worse),
        ]
        .concat()
    }
}

/// A highlight that was compared with TCP.
struct Row<'a> {
    words: &'a str,
    measure: &'a MeasureRecord,
    factor: Spread,
}

/// The picture as SVG, the largest gain first.
///
/// # Errors
/// When the record has no highlight.
pub fn svg(record: &Record) -> Result<String> {
    let rows = rows(record);
    ensure!(
        !rows.is_empty(),
        "nothing that was measured is a highlight; without --highlights the plot has all of it"
    );
    let scale = Scale::of(&rows);
    let bottom = HEAD + ROW * rows.len() as i32;
    let height = bottom + FOOT;
    let mut picture = Picture::new(height);
    picture.text((MARGIN, 30), LARGE, "ink strong", "start", "How many times better than TCP");
    picture.legend();
    picture.text((FIGURES, HEAD - 10), SMALL, "faint", "start", "TCP → uSMC");
    for tick in scale.ticks() {
        let (x, one) = (scale.x(tick), tick == 1.0);
        let (class, width) = if one { ("faint", 2) } else { ("grid", 1) };
        picture.bar(class, (x - width / 2, HEAD - 4), (width, bottom - HEAD + 8));
        picture.text((x, HEAD - 10), SMALL, "faint", "middle", &format!("{tick} ×"));
    }
    for (row, y) in rows.iter().zip((HEAD..).step_by(ROW as usize)) {
        picture.row(row, &scale, y);
    }
    let rounds = match record.rounds {
        1 => "One round of TCP, UNIX sockets and uSMC in turn; logarithmic scale.".to_owned(),
        n => format!(
            "Medians of {n} rounds of TCP, UNIX sockets and uSMC in turn; logarithmic scale."
        ),
    };
    let place = fitting(&record.machine.in_brief(), SMALL, WIDTH - 2 * MARGIN);
    picture.text((MARGIN, bottom + 30), SMALL, "faint", "start", &rounds);
    picture.text((MARGIN, bottom + 48), SMALL, "faint", "start", &place);
    Ok(picture.end())
}

fn rows(record: &Record) -> Vec<Row<'_>> {
    let measures = record.cases.iter().flat_map(|case| &case.measures);
    let mut rows: Vec<Row> = measures
        .filter_map(|measure| {
            let words = measure.highlight.as_deref()?;
            Some(Row { words, measure, factor: *measure.factors.get(&Mode::Usmc)? })
        })
        .collect();
    rows.sort_by(|a, b| b.factor.median.total_cmp(&a.factor.median));
    rows
}

/// Where a factor is.
struct Scale {
    least: f64,
    most: f64,
}

impl Scale {
    fn of(rows: &[Row]) -> Scale {
        let mut scale = Scale { least: 0.8, most: 12.0 };
        let factors = rows.iter().flat_map(|row| row.measure.factors.values());
        for factor in factors {
            scale.least = scale.least.min(factor.median / 1.2);
            scale.most = scale.most.max(factor.median * 1.1);
        }
        scale
    }

    fn x(&self, factor: f64) -> i32 {
        let [least, most, factor] = [self.least, self.most, factor].map(f64::ln);
        let part = ((factor - least) / (most - least)).clamp(0.0, 1.0);
        LEFT + (f64::from(RIGHT - LEFT) * part).round() as i32
    }

    /// As many multiples of the powers of ten as have place beside each other.
    fn ticks(&self) -> Vec<f64> {
        let steps: &[f64] = match self.most / self.least {
            wide if wide > 600.0 => &[1.0],
            wide if wide > 30.0 => &[1.0, 3.0],
            _ => &[1.0, 2.0, 5.0],
        };
        let powers =
            (-3..7).flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
        powers.filter(|tick| (self.least..=self.most).contains(tick)).collect()
    }
}

/// SVG that grows.
struct Picture(String);

impl Picture {
    fn new(height: i32) -> Picture {
        let (light, dark) = (LIGHT.rules(), DARK.rules());
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
             <title>uSMC beside TCP: how many times better</title>\n\
             <style>text{{font-family:{FONTS}}}.strong{{font-weight:600}}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>\n"
        );
        // The paper is the picture's own: a page may be of the other scheme than its reader's system.
        let _ = writeln!(
            text,
            "<rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>"
        );
        Picture(text)
    }

    fn bar(&mut self, class: &str, (x, y): (i32, i32), (width, height): (i32, i32)) {
        let _ = writeln!(
            self.0,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"
        );
    }

    /// Text whose base line is at `y`.
    fn text(&mut self, (x, y): (i32, i32), size: i32, class: &str, anchor: &str, text: &str) {
        let text = escaped(text);
        let _ = writeln!(
            self.0,
            "<text class=\"{class}\" x=\"{x}\" y=\"{y}\" font-size=\"{size}\" text-anchor=\"{anchor}\">{text}</text>"
        );
    }

    fn legend(&mut self) {
        let mut x = MARGIN;
        for (class, thick, words) in
            [("usmc", 10, "uSMC"), ("unix", 4, "UNIX sockets"), ("faint", 0, "TCP: 1 ×")]
        {
            match thick {
                0 => self.bar(class, (x + 7, 46), (2, 14)),
                _ => self.bar(class, (x, 53 - thick / 2), (16, thick)),
            }
            self.text((x + 22, 57), SMALL, "ink", "start", words);
            x += 22 + width(words, SMALL) + 14;
        }
    }

    fn row(&mut self, row: &Row, scale: &Scale, y: i32) {
        let (base, one) = (y + 17, scale.x(1.0));
        self.text((NAMES, base), MIDDLE, "ink", "end", row.words);
        let to = |picture: &mut Picture, class, factor: f64, (y, thick)| {
            let x = scale.x(factor);
            picture.bar(class, (one.min(x), y), ((x - one).abs().max(1), thick));
        };
        let usmc = row.factor.median;
        to(self, if usmc < 1.0 { "worse" } else { "usmc" }, usmc, (y + 5, 11));
        if let Some(unix) = row.measure.factors.get(&Mode::Unix) {
            to(self, "unix", unix.median, (y + 17, 4));
        }
        self.text((RATIO, base), MIDDLE, "ink strong", "end", &format!("{} ×", short(usmc)));
        self.text((FIGURES, base), SMALL, "ink", "start", &figures(row.measure));
    }

    fn end(mut self) -> String {
        self.0 += "</svg>\n";
        self.0
    }
}

/// TCP's figure and uSMC's, of thousands of a unit in the next one.
fn figures(measure: &MeasureRecord) -> String {
    let median = |mode| measure.figures.get(&mode).map_or(0.0, |figure: &Spread| figure.median);
    let (tcp, usmc) = (median(Mode::Tcp), median(Mode::Usmc));
    let (by, unit) = match &measure.unit[..] {
        "MB/s" if tcp.max(usmc) >= 1000.0 => (1000.0, "GB/s"),
        unit => (1.0, unit),
    };
    format!("{} → {} {unit}", short(tcp / by), short(usmc / by))
}

/// Pixels that a text of this size takes at most, by the wide letters of DejaVu Sans.
fn width(text: &str, size: i32) -> i32 {
    let thousandths: i32 = text
        .chars()
        .map(|c| match c {
            'i' | 'j' | 'l' | ' ' | '.' | ',' | ':' | ';' | '\'' | '|' => 340,
            'f' | 't' | 'r' | 'I' | '(' | ')' | '/' | '-' | '"' => 420,
            'm' | 'w' | 'M' | 'W' | '@' | '%' | '…' => 1000,
            '→' | '×' | 'A'..='Z' => 840,
            _ => 640,
        })
        .sum();
    thousandths * size / 1000 + 1
}

/// As much of a text as is no wider.
fn fitting(text: &str, size: i32, most: i32) -> String {
    if width(text, size) <= most {
        return text.to_owned();
    }
    let mut chars: Vec<char> = text.chars().collect();
    loop {
        chars.pop();
        let shown: String =
            chars.iter().collect::<String>().trim_end_matches([' ', ',']).to_owned() + "…";
        if chars.is_empty() || width(&shown, size) <= most {
            return shown;
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use roxmltree::{Document, Node};

    use super::super::catalogue;
    use super::super::record::tests::sample;
    use super::*;

    /// A record of all highlights that two cores have, and a picture of it.
    fn picture() -> (Record, String) {
        let mut record = sample();
        let template = record.cases[0].measures[0].clone();
        record.cases.truncate(1);
        let cases = catalogue(&[0, 1]);
        let measures = cases.iter().flat_map(|case| &case.measures);
        let highlights = measures.filter_map(|measure| Some((measure.highlight?, measure.unit)));
        record.cases[0].measures = highlights
            .enumerate()
            .map(|(i, (words, unit))| {
                let mut own = template.clone();
                own.highlight = Some(words.to_owned());
                own.unit = unit.to_owned();
                // As wide as figures get, and one that is worse than TCP.
                own.figures.values_mut().for_each(|figure| figure.median = 0.001_234);
                let factor = own.factors.get_mut(&Mode::Usmc).expect("its factor");
                factor.median = [0.123, 123.0, 1.0, 45.6, 7.89][i % 5];
                own
            })
            .collect();
        record.machine.processor =
            "A & B <C> of so many words that no line has place for all of them".to_owned();
        let text = svg(&record).expect("highlights");
        (record, text)
    }

    fn number(node: Node, name: &str) -> i32 {
        node.attribute(name).unwrap_or("0").parse().expect(name)
    }

    fn of<'a>(document: &'a Document, name: &str) -> Vec<Node<'a, 'a>> {
        let named = |node: &Node| node.tag_name().name() == name;
        document.descendants().filter(named).collect()
    }

    #[test]
    fn at_most_ten_rows_are_in_words_of_which_none_is_twice() {
        let (record, text) = picture();
        let document = Document::parse(&text).expect("XML");
        let names = of(&document, "text").into_iter().filter(|node| {
            node.attribute("text-anchor") == Some("end") && node.attribute("class") == Some("ink")
        });
        let mut names: Vec<&str> = names.filter_map(|node| node.text()).collect();
        let rows = record.cases[0].measures.len();
        assert_eq!(names.len(), rows);
        assert!((8..=10).contains(&rows), "{names:?}");
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows);
        assert!(names.iter().all(|name| !name.contains(['_', '('])), "{names:?}");
    }

    #[test]
    fn all_is_inside_and_no_text_runs_into_another() {
        let (_, text) = picture();
        let document = Document::parse(&text).expect("XML");
        let root = document.root_element();
        let (wide, high) = (number(root, "width"), number(root, "height"));
        assert!((680..=760).contains(&wide) && (360..=440).contains(&high), "{wide} × {high}");
        let mut boxes = Vec::new();
        for node in of(&document, "text") {
            let (words, size) = (node.text().expect("words"), number(node, "font-size"));
            let (x, long) = (number(node, "x"), width(words, size));
            let from = match node.attribute("text-anchor") {
                Some("end") => x - long,
                Some("middle") => x - long / 2,
                _ => x,
            };
            let y = number(node, "y");
            assert!(
                from >= MARGIN / 2 && from + long <= wide - MARGIN / 2,
                "{words}: {from} and {long}"
            );
            assert!(y > size && y < high - 4, "{words}: {y}");
            boxes.push((words.to_owned(), from, from + long, y));
        }
        for (i, one) in boxes.iter().enumerate() {
            for other in boxes[i + 1..].iter().filter(|other| (one.3 - other.3).abs() < 8) {
                assert!(one.2 <= other.1 || other.2 <= one.1, "{one:?} {other:?}");
            }
        }
        for node in of(&document, "rect") {
            let [x, y, w, h] = ["x", "y", "width", "height"].map(|name| number(node, name));
            assert!(x >= 0 && y >= 0 && w > 0 && h > 0 && x + w <= wide && y + h <= high);
        }
    }

    #[test]
    fn the_largest_gain_is_first_and_a_loss_is_of_its_own_colour() {
        let (_, text) = picture();
        let document = Document::parse(&text).expect("XML");
        let ratios = of(&document, "text").into_iter().filter(|node| {
            node.attribute("text-anchor") == Some("end")
                && node.attribute("class") == Some("ink strong")
        });
        let ratios: Vec<f64> = ratios
            .map(|node| {
                node.text().expect("text").trim_end_matches(" ×").parse().expect("a number")
            })
            .collect();
        assert!(ratios.windows(2).all(|pair| pair[0] >= pair[1]), "{ratios:?}");
        let worse =
            of(&document, "rect").iter().filter(|n| n.attribute("class") == Some("worse")).count();
        assert_eq!(worse, ratios.iter().filter(|ratio| **ratio < 1.0).count());
        assert!(worse > 0);
    }

    /// The contrast of two colours as WCAG 2 defines it, 1 to 21.
    fn contrast(one: u32, other: u32) -> f64 {
        let luminance = |colour: u32| {
            let part = |shift: u32| {
                let part = f64::from((colour >> shift) & 0xff) / 255.0;
                if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * part(16) + 0.7152 * part(8) + 0.0722 * part(0)
        };
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    #[test]
    fn both_schemes_have_contrast_enough() {
        assert!((contrast(0xff_ff_ff, 0) - 21.0).abs() < 0.01);
        let (_, text) = picture();
        for palette in [LIGHT, DARK] {
            for words in [palette.ink, palette.faint] {
                assert!(contrast(words, palette.paper) >= 4.5, "{words:06x}");
            }
            for bar in [palette.usmc, palette.unix, palette.worse] {
                assert!(contrast(bar, palette.paper) >= 3.0, "{bar:06x}");
            }
            assert!(text.contains(&palette.rules()));
        }
        assert!(contrast(LIGHT.paper, DARK.paper) > 15.0);
    }

    #[test]
    fn what_is_no_highlight_has_no_row() {
        let record = sample();
        let mut some = record.clone();
        some.cases[1].measures[1].highlight = Some("redis".to_owned());
        assert_eq!(rows(&some).len(), 1);
        assert!(rows(&record).is_empty());
        assert!(svg(&record).expect_err("no picture").to_string().contains("is a highlight"));
    }

    #[test]
    fn labels_of_the_scale_have_place_beside_each_other() {
        for (least, most) in
            [(0.8, 12.0), (0.8, 23.9), (0.8, 24.1), (0.8, 135.0), (0.4, 239.0), (0.05, 3000.0)]
        {
            let scale = Scale { least, most };
            let ticks = scale.ticks();
            assert!(ticks.len() > 2 && ticks.contains(&1.0), "{ticks:?}");
            for pair in ticks.windows(2) {
                let [left, right] = [pair[0], pair[1]]
                    .map(|tick| (scale.x(tick), width(&format!("{tick} ×"), SMALL)));
                assert!(left.0 + left.1 / 2 < right.0 - right.1 / 2, "{least} to {most}: {pair:?}");
            }
        }
    }

    #[test]
    fn figures_of_thousands_have_the_next_unit() {
        let mut measure = sample().cases[0].measures[0].clone();
        measure.unit = "MB/s".to_owned();
        measure.figures.get_mut(&Mode::Tcp).expect("TCP").median = 2810.0;
        measure.figures.get_mut(&Mode::Usmc).expect("uSMC").median = 24_300.0;
        assert_eq!(figures(&measure), "2.81 → 24.3 GB/s");
        measure.unit = "k/s".to_owned();
        assert_eq!(figures(&measure), "2810 → 24300 k/s");
    }

    #[test]
    fn a_text_is_cut_where_it_does_not_fit() {
        assert_eq!(fitting("short", 11, 100), "short");
        let cut = fitting("a text, that is long", 11, 60);
        assert!(
            cut.ends_with('…')
                && width(&cut, 11) <= 60
                && "a text, that is long".starts_with(cut.trim_end_matches('…'))
        );
    }
}
