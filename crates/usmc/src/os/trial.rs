//! Two ways of waiting that are measured in turn, with spins and without them. All processes of a machine do so at the same times: what
//! a process gains by one way depends on what the other ends of its connections do.

/// Parts of a period. All processes spin in the first one and sleep in the second one; in the others each process does what has proven
/// better for it.
pub const PARTS: u32 = 12;
/// While one of both is unknown they are measured in the first two of so few: either way may be five times slower than the other one.
pub const FIRST: u32 = 3;
/// Where it is clear which one is better, both are measured in each fourth period only.
const SELDOM: u32 = 4;
/// A process that has not waited for so many parts has not been at work.
pub const IDLE: u32 = 4 * PARTS;

/// What is measured in a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measures {
    Spins,
    Sleeps,
    Nothing,
}

/// How often a process measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pace {
    /// It does not know both ways.
    First,
    Usual,
    /// In some periods only.
    Seldom,
}

/// The part at this time ([`super::clock::now_ns`]), of parts that have `1 << shift` nanoseconds.
pub fn part_at(now_ns: u64, shift: u32) -> u32 {
    (now_ns >> shift) as u32
}

/// What a process at this pace measures in the part with this number.
pub fn measures(part: u32, pace: Pace) -> Measures {
    let parts = if pace == Pace::First { FIRST } else { PARTS };
    match part % parts {
        _ if pace == Pace::Seldom && !(part / PARTS).is_multiple_of(SELDOM) => Measures::Nothing,
        0 => Measures::Spins,
        1 => Measures::Sleeps,
        _ => Measures::Nothing,
    }
}

/// Whether a process that has decided so spins in the part.
pub fn spins(measures: Measures, decided: bool) -> bool {
    match measures {
        Measures::Spins => true,
        Measures::Sleeps => false,
        Measures::Nothing => decided,
    }
}
