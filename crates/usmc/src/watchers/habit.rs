//! Whether it pays to put registrations off, as a set's connections have shown.

use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

/// What a set's connections are like.
#[repr(C)]
pub struct Habit {
    /// Nonzero: registrations are put off. What had something to tell at once counts one, what had not [`LATE`].
    credit: AtomicU32,
    /// Connections in a row that had, while they are not.
    in_time: AtomicU32,
    /// How often they have been in vain, of late.
    failures: AtomicU32,
}

/// So many connections in a row make a habit.
const HABIT: u32 = 8;
/// The most credit, with which all is forgotten that was in vain.
const CREDIT: u32 = 16;
const LATE: u32 = 2;
/// Twice as many connections in a row are wanted each time, up to 8 << 9.
const FAILURES: u32 = 9;

impl Habit {
    /// Nothing is known.
    pub fn forget(&self) {
        for cell in [&self.credit, &self.in_time, &self.failures] {
            cell.store(0, Relaxed);
        }
    }

    /// A connection had something to tell in its first wait.
    pub fn was_in_time(&self) {
        let credit = self.credit.load(Relaxed);
        if credit >= CREDIT {
            return;
        }
        if credit > 0 {
            self.credit.store(credit + 1, Relaxed);
            if credit + 1 == CREDIT {
                self.failures.store(0, Relaxed);
            }
            return;
        }
        let in_time = self.in_time.load(Relaxed) + 1;
        let is_habit = in_time >= HABIT << self.failures.load(Relaxed).min(FAILURES);
        self.in_time.store(if is_habit { 0 } else { in_time }, Relaxed);
        self.credit.store(if is_habit { HABIT } else { 0 }, Relaxed);
    }

    /// One had nothing to tell then.
    pub fn was_late(&self) {
        self.in_time.store(0, Relaxed);
        let credit = self.credit.load(Relaxed);
        self.credit.store(credit.saturating_sub(LATE), Relaxed);
        if (1..=LATE).contains(&credit) {
            self.failures.store((self.failures.load(Relaxed) + 1).min(FAILURES), Relaxed);
        }
    }

    /// Whether registrations are put off.
    pub fn puts_off(&self) -> bool {
        self.credit.load(Relaxed) > 0
    }

    /// A connection that was not put off had nothing to tell in its first wait.
    pub fn had_nothing(&self) {
        self.in_time.store(0, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_habit_is_made_of_some_and_broken_by_few() {
        let habit = Habit {
            credit: AtomicU32::new(0),
            in_time: AtomicU32::new(0),
            failures: AtomicU32::new(0),
        };
        let puts_off = || habit.puts_off();
        let in_time = |times: u32| (0..times).for_each(|_| habit.was_in_time());
        in_time(HABIT - 1);
        habit.was_late();
        in_time(HABIT - 1);
        assert!(!puts_off());
        in_time(1);
        assert!(puts_off());
        (0..HABIT / LATE).for_each(|_| habit.was_late());
        assert!(!puts_off());
        // More is wanted then, each time.
        for failures in 1..20 {
            let wanted = HABIT << failures.min(FAILURES);
            in_time(wanted - 1);
            assert!(!puts_off());
            in_time(1);
            assert!(puts_off());
            (0..HABIT / LATE).for_each(|_| habit.was_late());
        }
        // Until it has lasted.
        in_time((HABIT << FAILURES) + CREDIT);
        (0..CREDIT / LATE).for_each(|_| habit.was_late());
        assert!(!puts_off());
        in_time(HABIT << 1);
        assert!(puts_off());
    }
}
