//! What commands print: tables for people, columns as wide as their widest cell and two blanks between them; and JSON.

use std::io::{self, Write};

use serde::Serialize;

/// A column's title, and whether its cells are numbers and stand to the right.
pub type Column = (&'static str, bool);

/// Prints a value as JSON.
///
/// # Errors
/// When `out` cannot be written.
pub fn json(out: &mut impl Write, value: &(impl Serialize + ?Sized)) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// Prints the titles and the rows.
///
/// # Errors
/// When `out` cannot be written.
pub fn print<const N: usize>(
    out: &mut impl Write,
    columns: &[Column; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> io::Result<()> {
    let mut table = vec![columns.map(|(title, _)| title.to_owned())];
    table.extend(rows);
    let mut widths = [0; N];
    for line in &table {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    for line in &table {
        let mut text = String::new();
        for ((cell, width), (_, right)) in line.iter().zip(widths).zip(columns) {
            let padding = " ".repeat(width - cell.chars().count());
            let (before, after) = if *right { (&padding[..], "") } else { ("", &padding[..]) };
            text.extend([before, cell, after, "  "]);
        }
        writeln!(out, "{}", text.trim_end())?;
    }
    Ok(())
}
