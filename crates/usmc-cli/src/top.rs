//! `usmc top`: looks at the machine one after the other, and what they say of the time between them.
//!
//! [`model`] makes rows with rates of two looks, [`arrange`] sorts and filters them, [`app`] is what the user has chosen,
//! [`draw`] and [`details`] put both on a screen, [`live`] has the terminal, and [`batch`] prints. All but the last two know of no
//! terminal, no clock and no process.

pub mod app;
pub mod arrange;
pub mod batch;
pub mod counts;
pub mod details;
pub mod draw;
pub mod live;
pub mod model;
#[cfg(test)]
pub mod sample;
#[cfg(test)]
mod tests;
