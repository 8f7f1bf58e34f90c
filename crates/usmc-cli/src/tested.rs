//! The programs that uSMC is tested with, as `docs/testing.md` has them: the table is built in.

const TEXT: &str = include_str!("../../../docs/testing.md");
/// The table's header.
const HEADER: &str = "| program | tested by | where |";

/// By what the program of this file name is tested.
pub fn by(name: &str) -> Option<&'static str> {
    rows().find(|row| row.names.contains(&name)).map(|row| row.by)
}

/// One row.
struct Row {
    names: Vec<&'static str>,
    by: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "the test looks there"))]
    places: Vec<&'static str>,
}

fn rows() -> impl Iterator<Item = Row> {
    let lines = TEXT.lines().skip_while(|line| *line != HEADER).skip(2);
    lines.take_while(|line| line.starts_with('|')).map(|line| {
        let mut cells = line.split('|').skip(1).map(str::trim);
        let mut next = || cells.next().unwrap_or_default();
        Row { names: words(next()), by: next(), places: words(next()) }
    })
}

/// What stands between backquotes.
fn words(cell: &'static str) -> Vec<&'static str> {
    cell.split('`').skip(1).step_by(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_program_is_named_where_it_is_said_to_be_tested() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for row in rows() {
            assert!(!row.names.is_empty() && !row.by.is_empty(), "{:?}", row.names);
            let read = |place: &&str| std::fs::read_to_string(root.join(place)).expect(place);
            let texts: Vec<String> = row.places.iter().map(read).collect();
            for name in &row.names {
                // `python-suite.sh` says PYTHON.
                let is_named = |text: &String| {
                    text.to_lowercase().contains(&name.replace("python3", "python"))
                };
                assert!(texts.iter().any(is_named), "{name} in {:?}", row.places);
            }
        }
        assert!(rows().count() > 8);
        assert_eq!(by("nginx").map(|by| by.is_empty()), Some(false));
        assert_eq!(by("sh"), None);
    }
}
