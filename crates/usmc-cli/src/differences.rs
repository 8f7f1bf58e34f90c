//! The known differences from TCP, as `docs/differences.md` has them: the one table of them, which is built in.
//!
//! Its last column says by what a program is known that may meet a difference: functions it calls and libraries it
//! is linked with. A difference without such a word may concern any program.

use std::fmt;

const TEXT: &str = include_str!("../../../docs/differences.md");

/// One row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// What a program does.
    pub what: String,
    /// What it sees then.
    pub seen: String,
    /// Why; may be empty.
    pub why: String,
    /// Functions and libraries (`name.so`); one is enough, of those joined by `+` all are needed.
    signs: Vec<Vec<String>>,
}

impl Difference {
    /// The first sign of it in a program that calls these functions and is linked with these libraries.
    pub fn sign(&self, has: impl Fn(&str) -> bool) -> Option<String> {
        let all = |sign: &&Vec<String>| sign.iter().all(|word| has(word));
        self.signs.iter().find(all).map(|sign| sign.join(" and "))
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.what)?;
        write!(f, "    {}", self.seen)?;
        if !self.why.is_empty() {
            write!(f, "\n    because: {}", self.why)?;
        }
        Ok(())
    }
}

/// All of them, in the table's order.
pub fn all() -> Vec<Difference> {
    // The header and the line below it.
    rows(TEXT).skip(2).collect()
}

fn rows(text: &str) -> impl Iterator<Item = Difference> {
    text.lines().filter(|line| line.starts_with('|')).map(|line| {
        let mut cells = line.split('|').skip(1).map(plain);
        let mut next = || cells.next().unwrap_or_default();
        let (what, seen, why) = (next(), next(), next());
        let signs = next().split(", ").filter(|sign| !sign.is_empty()).map(sign).collect();
        Difference { what, seen, why, signs }
    })
}

fn sign(words: &str) -> Vec<String> {
    words.split('+').map(|word| word.trim().to_owned()).collect()
}

/// Without the marks of Markdown.
fn plain(cell: &str) -> String {
    cell.trim().replace('`', "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_of_the_document_is_understood() {
        let mut rows = rows(TEXT);
        let header = rows.next().expect("a table");
        assert_eq!((&*header.what, &*header.seen, &*header.why), ("what", "under uSMC", "why"));
        assert!(rows.next().is_some_and(|line| line.what.chars().all(|c| c == '-')));
        let lines = TEXT.lines().filter(|line| line.starts_with('|')).count();
        assert_eq!(all().len(), lines - 2);
        for row in all() {
            assert!(!row.what.is_empty() && !row.seen.is_empty(), "{row:?}");
            let is_word = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
            for word in row.signs.iter().flatten() {
                assert!(!word.is_empty() && word.chars().all(is_word), "{word:?} in {row:?}");
            }
        }
        for line in TEXT.lines().filter(|line| line.starts_with('|')) {
            // Nothing before the first and behind the last.
            let columns = line.split('|').count() - 2;
            assert!((3..=4).contains(&columns), "{columns} columns: {line}");
            assert!(line.ends_with('|'), "{line}");
        }
    }

    #[test]
    fn signs_are_one_of_several_or_all_of_a_sum() {
        let table =
            "| a `b` | c | | `one`, `two` + `lib.so` |\n| no | signs | here |\n| d | e | |\n";
        let rows: Vec<Difference> = rows(table).collect();
        assert_eq!((&*rows[0].what, &*rows[0].why), ("a b", ""));
        assert_eq!(rows[0].sign(|word| word == "one").as_deref(), Some("one"));
        assert_eq!(rows[0].sign(|word| word == "two"), None);
        assert_eq!(rows[0].sign(|word| word != "one").as_deref(), Some("two and lib.so"));
        for row in &rows[1..] {
            assert_eq!(row.sign(|_| true), None, "{row:?}");
        }
        assert_eq!((&*rows[1].why, &*rows[2].why), ("here", ""));
    }
}
