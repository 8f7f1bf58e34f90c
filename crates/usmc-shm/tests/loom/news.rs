//! Applications tell an agent of their slots, and the agent sleeps in between.

use usmc_shm::layout::News;

use crate::model::sync::Arc;
use crate::model::sync::atomic::AtomicU32;
use crate::model::sync::atomic::Ordering::Relaxed;
use crate::model::thread;
use crate::model::{Tcp, check};

#[derive(Default)]
struct World {
    news: News,
    /// The segment's eventfd.
    bell: Tcp,
    /// What the processes write before they tell of it.
    written: [AtomicU32; 2],
}

impl World {
    fn write(&self, slot: u32) {
        self.written[slot as usize].store(1, Relaxed);
        if self.news.tell(slot) {
            self.bell.send(0);
        }
    }

    /// The agent, until it has seen both.
    fn serve(&self) {
        let mut seen = 0;
        while seen != 0b11 {
            let told = self.news.take();
            for slot in 0..2 {
                if told & 1 << slot != 0 {
                    assert_eq!(self.written[slot].load(Relaxed), 1);
                }
            }
            seen |= told;
            if told == 0 && self.news.sleep() {
                self.bell.poll();
                self.bell.recv(8);
                self.news.wake();
            }
        }
    }
}

#[test]
fn no_news_is_lost_to_an_agent_that_sleeps() {
    check(Some(3), || {
        let world = Arc::new(World::default());
        let writers = [0, 1].map(|slot| {
            let world = world.clone();
            thread::spawn(move || world.write(slot))
        });
        world.serve();
        writers.into_iter().for_each(|writer| writer.join().unwrap());
    });
}
