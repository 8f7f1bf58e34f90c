//! A program as data and as text: one step a line, `PROCESS.THREAD OPERATION ARGUMENT…`. With `&` before the operation
//! the next step begins at the same moment.

use std::fmt;
use std::str::FromStr;

/// One call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Which process makes it.
    pub process: usize,
    /// Which of its threads.
    pub thread: usize,
    /// Its name in `programs/actor/actor.c`.
    pub op: String,
    /// Its arguments. The port of `connect` is given as the listener's handle. How much is in flight after a `fill` is
    /// each kind's own affair: so a length of `drain` below 0 is in 64ths of what is in flight in the stream of this
    /// seed, and one of `push` in hundredths of what the last `fill` has left in flight.
    pub args: Vec<i64>,
    /// The next step does not wait for it.
    pub at_once: bool,
}

/// Steps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// In order.
    pub steps: Vec<Step>,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at_once = if self.at_once { "&" } else { "" };
        write!(f, "{}.{} {at_once}{}", self.process, self.thread, self.op)?;
        self.args.iter().try_for_each(|arg| write!(f, " {arg}"))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

impl FromStr for Step {
    type Err = String;

    fn from_str(line: &str) -> Result<Step, String> {
        let wrong = || format!("`{line}` is not `PROCESS.THREAD OPERATION ARGUMENT…`");
        let mut words = line.split_whitespace();
        let (process, thread) = words.next().and_then(|w| w.split_once('.')).ok_or_else(wrong)?;
        let op = words.next().ok_or_else(wrong)?;
        let (at_once, op) = op.strip_prefix('&').map_or((false, op), |op| (true, op));
        let args = words.map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
        let number = |text: &str| text.parse().map_err(|_| wrong());
        let (process, thread) = (number(process)?, number(thread)?);
        Ok(Step { process, thread, op: op.to_owned(), args, at_once })
    }
}

impl FromStr for Program {
    type Err = String;

    /// Empty lines, and what follows a `#`, do not count.
    fn from_str(text: &str) -> Result<Program, String> {
        let code = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
        let steps =
            code.filter(|line| !line.is_empty()).map(str::parse).collect::<Result<_, _>>()?;
        Ok(Program { steps })
    }
}
