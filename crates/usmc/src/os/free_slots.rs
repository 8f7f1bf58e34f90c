//! Which slots of one of our segments can be handed out.

use usmc_shm::layout::SLOTS_MAX;

/// Zero bytes are a segment without slots.
pub struct FreeSlots {
    slots: u32,
    free: u32,
    lost: u32,
    /// Free slots `[..free]`, last in first out; slots that others still hold `[slots - lost..slots]`.
    stack: [u16; SLOTS_MAX as usize],
}

impl FreeSlots {
    /// All of `slots` slots are free, 0 first. At most [`SLOTS_MAX`].
    pub fn reset(&mut self, slots: u32) {
        (self.slots, self.free, self.lost) = (slots, slots, 0);
        for (i, place) in self.stack[..slots as usize].iter_mut().enumerate() {
            *place = (slots as usize - 1 - i) as u16;
        }
    }

    /// Takes a free slot.
    pub fn take(&mut self) -> Option<u32> {
        self.free = self.free.checked_sub(1)?;
        Some(self.stack[self.free as usize] as u32)
    }

    /// A slot that was taken is free again.
    pub fn give(&mut self, slot: u32) {
        debug_assert!(self.free + self.lost < self.slots);
        self.stack[self.free as usize] = slot as u16;
        self.free += 1;
    }

    /// A slot that was taken is not used by us any more, but by the acceptor or a forked process.
    pub fn lose(&mut self, slot: u32) {
        debug_assert!(self.free + self.lost < self.slots);
        self.lost += 1;
        self.stack[(self.slots - self.lost) as usize] = slot as u16;
    }

    /// Frees those lost slots that are `gone` from everybody else's side, too.
    pub fn collect(&mut self, mut gone: impl FnMut(u32) -> bool) {
        let from = (self.slots - self.lost) as usize;
        let lost = &mut self.stack[from..self.slots as usize];
        let mut found = 0;
        for at in 0..lost.len() {
            if gone(lost[at] as u32) {
                lost.swap(found, at);
                found += 1;
            }
        }
        self.stack.copy_within(from..from + found, self.free as usize);
        self.free += found as u32;
        self.lost -= found as u32;
    }

    /// Whether most slots are with processes that do not let go.
    pub fn is_mostly_lost(&self) -> bool {
        self.lost * 2 > self.slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, PartialEq, Debug)]
    enum State {
        Free,
        Used,
        Lost,
    }

    /// Random takes, gives, losses and collections against a plain array of states.
    #[test]
    fn no_slot_is_handed_out_twice_and_none_vanishes() {
        let mut seed = 1u64;
        let mut draw = move |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % below
        };
        for slots in [1, 2, 3, 16, 64] {
            let mut free = FreeSlots { slots: 0, free: 0, lost: 0, stack: [0; SLOTS_MAX as usize] };
            free.reset(slots);
            let mut model = [State::Free; 64];
            let count = |model: &[State; 64], state| {
                model[..slots as usize].iter().filter(|s| **s == state).count()
            };
            for _ in 0..20_000 {
                let slot = draw(slots as u64) as usize;
                match (draw(8), model[slot]) {
                    (0..3, _) => match free.take() {
                        Some(slot) => {
                            assert_eq!(model[slot as usize], State::Free);
                            model[slot as usize] = State::Used;
                        }
                        None => assert_eq!(count(&model, State::Free), 0),
                    },
                    (3..5, State::Used) => {
                        free.give(slot as u32);
                        model[slot] = State::Free;
                    }
                    (5..7, State::Used) => {
                        free.lose(slot as u32);
                        model[slot] = State::Lost;
                    }
                    (7, _) => {
                        let odds = draw(3) + 1;
                        free.collect(|slot| {
                            assert_eq!(model[slot as usize], State::Lost);
                            let gone = draw(odds) == 0;
                            if gone {
                                model[slot as usize] = State::Free;
                            }
                            gone
                        });
                    }
                    _ => {}
                }
                assert_eq!(free.free as usize, count(&model, State::Free));
                assert_eq!(free.lost as usize, count(&model, State::Lost));
            }
        }
    }
}
