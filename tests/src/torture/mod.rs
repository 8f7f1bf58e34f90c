//! Torture: random programs of socket operations, run over TCP and under uSMC, whose every observable is compared.
//!
//! A [`program::Program`] is a list of steps; each is one call of one thread of one process. A [`run::World`] has
//! the processes (`programs/actor`) and does the steps one after the other: the next begins when every thread has
//! answered or sleeps in the kernel. What came of a step is text ([`run::Observation`]). [`verdict`] runs a program
//! both ways, decides whether a difference is one that TCP itself leaves to timing (then TCP shows it, too, when
//! it is asked often enough), and shrinks what is not.

pub mod generate;
mod model;
pub mod program;
pub mod run;
pub mod verdict;
