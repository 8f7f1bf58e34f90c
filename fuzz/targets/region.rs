//! A region whose header, peers and words are anything: it is opened, joined, claimed from, swept, and given back to.
//!
//! Whatever stands there, what is claimed lies inside, is nobody else's, and nothing runs for ever.
#![no_main]

use libfuzzer_sys::fuzz_target;
use usmc_shm::region::peers::{Identity, NAME};
use usmc_shm::region::units::{Member, Run};
use usmc_shm::region::{Region, UNIT, len_for};

const UNITS: usize = 12;
/// Behind the tables nothing is looked at.
const TABLES: usize = len_for(UNITS) - UNITS * UNIT;

#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "memory for a region")] [u8; 4096]);

fuzz_target!(|input: &[u8]| {
    let mut pages: Vec<Page> = (0..len_for(UNITS) / 4096).map(|_| Page([0; 4096])).collect();
    let base: *mut u8 = pages.as_mut_ptr().cast();
    // SAFETY: zero bytes of this input alone, which outlive the region.
    let made = unsafe { Region::format(base, len_for(UNITS), [1, 2]) };
    assert_eq!(made.map(|region| region.units()), Some(UNITS));
    // Pieces of the input: where to, how long, and bytes.
    let mut rest = input;
    let (mut steps, mut written) = (Vec::new(), 0);
    while let [low, high, len, after @ ..] = rest {
        let at = usize::from(u16::from_le_bytes([*low, *high])) * 8 % TABLES;
        let len = usize::from(*len).min(after.len()).min(TABLES - at);
        let (bytes, after) = after.split_at(len);
        // SAFETY: within the tables, which nobody has a reference to.
        unsafe { base.add(at).copy_from_nonoverlapping(bytes.as_ptr(), len) };
        steps.extend_from_slice(bytes);
        written += len;
        rest = after;
    }
    assert!(written <= input.len());
    // SAFETY: as above.
    let Ok(region) = (unsafe { Region::open(base, len_for(UNITS)) }) else { return };
    let (peers, words) = (region.peers(), region.words());
    for (number, peer) in peers.all() {
        assert!(number != 0 && peer.name(&mut [0; NAME]) <= NAME);
        let _ = (peer.identity(), peer.uses());
    }
    let identity = Identity { host: [7, 7], directory: [8, 8], station: 9 };
    let Some(own) = peers.join(&identity, b"fuzz") else { return };
    assert!(peers.is_alive(own) && peers.join(&identity, b"again") == Some(own));
    let member = Member::new(own, 5, 6).expect("a member");
    let mut claimed: Vec<Run> = Vec::new();
    for step in steps {
        match step % 4 {
            0 => claimed.extend(region.claim(usize::from(step / 4) * UNIT / 8, member)),
            1 => {
                if let Some(run) = claimed.pop() {
                    words.release(run);
                }
            }
            2 => region.sweep(|_| step & 4 != 0, |_| step & 8 != 0),
            _ => {
                let _ = peers.all().nth(usize::from(step / 4)).map(|(_, peer)| peer.declare_gone());
            }
        }
        let seen: Vec<Run> = words.runs().collect();
        let units: usize = seen.iter().map(|run| run.count as usize).sum();
        // A liar's run may have units that are free.
        assert!(units <= UNITS && words.free() <= UNITS && seen.iter().all(inside));
        for run in &claimed {
            assert!(run.owner == member && inside(run));
        }
    }
});

fn inside(run: &Run) -> bool {
    run.first as usize + run.count as usize <= UNITS && run.count > 0
}
