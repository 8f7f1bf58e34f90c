//! Findings, and how they are printed: for people, for scripts that want failures only, or as JSON.

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

use crate::table;

/// How much a finding matters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Weight {
    /// As it should be.
    #[serde(rename = "ok")]
    Good,
    /// Worth knowing.
    #[serde(rename = "note")]
    Note,
    /// Keeps connections on TCP.
    #[serde(rename = "fail")]
    Failure,
}

/// One finding.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// How much it matters.
    pub weight: Weight,
    /// The fact.
    pub fact: String,
    /// What to do about it.
    pub remedy: Option<String>,
}

impl Finding {
    /// As it should be.
    pub fn good(fact: impl Into<String>) -> Finding {
        Finding { weight: Weight::Good, fact: fact.into(), remedy: None }
    }

    /// Worth knowing.
    pub fn note(fact: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { weight: Weight::Note, fact: fact.into(), remedy: Some(remedy.into()) }
    }

    /// In the way.
    pub fn failure(fact: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding { weight: Weight::Failure, fact: fact.into(), remedy: Some(remedy.into()) }
    }

    /// Whether it is in the way.
    pub fn is_failure(&self) -> bool {
        self.weight == Weight::Failure
    }
}

/// Who reads the report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Style {
    /// People.
    Full,
    /// People who asked for something else: sections beside that say what is in the way, if anything.
    Brief,
    /// Scripts that print what is in the way.
    Quiet,
    /// Programs: one JSON object at the end.
    Json,
}

/// Findings under a title.
#[derive(Serialize, Debug)]
struct Section {
    title: String,
    findings: Vec<Finding>,
}

/// What is printed as JSON.
#[derive(Serialize)]
struct Whole<'a> {
    works: bool,
    verdict: &'a [String],
    sections: &'a [Section],
}

/// What a brief report has of a section.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    All,
    /// All but what is as it should be.
    Odd,
    Failures,
}

/// Prints findings as they are made, and counts failures.
pub struct Report<W> {
    out: W,
    style: Style,
    sections: Vec<Section>,
    verdict: Vec<String>,
    is_titled: bool,
    part: Part,
    /// Of all sections.
    pub failures: usize,
}

impl<W: Write> Report<W> {
    /// An empty one.
    pub fn new(out: W, style: Style) -> Report<W> {
        let (sections, verdict) = (Vec::new(), Vec::new());
        Report { out, style, sections, verdict, is_titled: true, part: Part::All, failures: 0 }
    }

    /// Begins a section, of which everything is said.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn title(&mut self, title: impl Display) -> io::Result<()> {
        self.begin(title, Part::All)
    }

    /// Begins a section that matters to what was asked for: a brief report leaves out what is as it should be.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn beside(&mut self, title: impl Display) -> io::Result<()> {
        self.begin(title, Part::Odd)
    }

    /// Begins a section that does not: a brief report has failures of it.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn aside(&mut self, title: impl Display) -> io::Result<()> {
        self.begin(title, Part::Failures)
    }

    fn begin(&mut self, title: impl Display, part: Part) -> io::Result<()> {
        self.sections.push(Section { title: title.to_string(), findings: Vec::new() });
        (self.is_titled, self.part) = (false, part);
        let is_shown = match self.style {
            Style::Full => true,
            Style::Brief => part == Part::All,
            Style::Quiet | Style::Json => false,
        };
        if is_shown { self.print_title() } else { Ok(()) }
    }

    fn print_title(&mut self) -> io::Result<()> {
        if let Some(section) = self.sections.last().filter(|_| !self.is_titled) {
            writeln!(self.out, "{}", section.title)?;
        }
        self.is_titled = true;
        Ok(())
    }

    fn prints(&self, weight: Weight) -> bool {
        match self.style {
            Style::Full => true,
            Style::Brief => match self.part {
                Part::All => true,
                Part::Odd => weight != Weight::Good,
                Part::Failures => weight == Weight::Failure,
            },
            Style::Quiet => weight == Weight::Failure,
            Style::Json => false,
        }
    }

    /// Adds findings to the section.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn add(&mut self, findings: impl IntoIterator<Item = Finding>) -> io::Result<()> {
        for finding in findings {
            self.failures += usize::from(finding.is_failure());
            if self.prints(finding.weight) {
                self.print_title()?;
                self.print(&finding)?;
            }
            if let Some(section) = self.sections.last_mut() {
                section.findings.push(finding);
            }
        }
        // Steps that wait are seen one by one.
        self.out.flush()
    }

    fn print(&mut self, finding: &Finding) -> io::Result<()> {
        let label = match finding.weight {
            Weight::Good => "ok  ",
            Weight::Note => "note",
            Weight::Failure => "FAIL",
        };
        writeln!(self.out, "  {label}  {}", finding.fact)?;
        match &finding.remedy {
            Some(remedy) => writeln!(self.out, "        -> {remedy}"),
            None => Ok(()),
        }
    }

    /// Says what all of it comes to.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn verdict(&mut self, text: impl Display) -> io::Result<()> {
        if matches!(self.style, Style::Full | Style::Brief) {
            writeln!(self.out, "{text}")?;
        }
        self.verdict.push(text.to_string());
        Ok(())
    }

    /// Ends it; whether it works.
    ///
    /// # Errors
    /// When the output cannot be written.
    pub fn end(mut self, works: bool) -> io::Result<()> {
        if self.style == Style::Json {
            let whole = Whole { works, verdict: &self.verdict, sections: &self.sections };
            table::json(&mut self.out, &whole)?;
        }
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(style: Style) -> String {
        let mut out = Vec::new();
        let mut report = Report::new(&mut out, style);
        report.title("One").expect("memory");
        report.add([Finding::good("a")]).expect("memory");
        report.beside("Two").expect("memory");
        report.add([Finding::good("b"), Finding::note("c", "d")]).expect("memory");
        report.aside("Three").expect("memory");
        report.add([Finding::note("e", "h")]).expect("memory");
        report.aside("Four").expect("memory");
        report.add([Finding::failure("f", "g")]).expect("memory");
        assert_eq!(report.failures, 1);
        report.verdict("No.").expect("memory");
        report.end(false).expect("memory");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn each_reader_gets_what_is_asked_for() {
        let brief =
            "One\n  ok    a\nTwo\n  note  c\n        -> d\nFour\n  FAIL  f\n        -> g\nNo.\n";
        assert_eq!(told(Style::Brief), brief);
        let full = brief.replace("Two\n", "Two\n  ok    b\n");
        assert_eq!(told(Style::Full), full.replace("Four", "Three\n  note  e\n        -> h\nFour"));
        assert_eq!(told(Style::Quiet), "Four\n  FAIL  f\n        -> g\n");
        let json: serde_json::Value = serde_json::from_str(&told(Style::Json)).expect("JSON");
        assert_eq!((&json["works"], &json["verdict"][0]), (&false.into(), &"No.".into()));
        let finding = &json["sections"][3]["findings"][0];
        assert_eq!((&finding["weight"], &finding["remedy"]), (&"fail".into(), &"g".into()));
        assert_eq!(json["sections"][0]["findings"][0]["weight"], "ok");
    }
}
