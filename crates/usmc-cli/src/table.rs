//! What commands print: tables for people, columns as wide as their widest cell and two blanks between them; and JSON.

use std::io::{self, Write};

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
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
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(columns.map(|(title, _)| title)).add_rows(rows);
    for (column, (_, right)) in table.column_iter_mut().zip(columns) {
        column.set_padding((0, 2));
        if *right {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    writeln!(out, "{}", table.trim_fmt())
}
