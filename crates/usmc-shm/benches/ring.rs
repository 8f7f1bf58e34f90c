//! Placeholder until the measurement is written.
fn main() {}
