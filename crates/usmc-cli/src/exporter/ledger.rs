//! The sums of processes that have ended, and the names that are told apart.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::counts::{Counter, Counts, Device, Key};

/// Whose counts are summed up: programs of one name at one device.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Owner {
    /// The ISM directory, as its processes name it.
    pub ism_dir: String,
    /// The program's name.
    pub program: String,
}

/// Stands for all that are not told apart.
pub const OTHER: &str = "other";
/// Stands for the directory of processes that have none.
pub const NONE: &str = "none";
/// Directories that are told apart.
const DIRS: usize = 64;
/// Regions that are told apart.
const REGIONS: usize = 16;
/// Bytes of a name at most.
const NAME: usize = 128;

/// A name as a label has it: a process chooses its own.
fn printable(name: &str) -> String {
    let name = name.chars().map(|c| if c.is_control() { '?' } else { c });
    let mut left = NAME;
    name.take_while(|c| {
        let fits = left >= c.len_utf8();
        left = left.saturating_sub(c.len_utf8());
        fits
    })
    .collect()
}

/// The names that are told apart. What comes once there are too many is [`OTHER`], so that nobody can make series without end.
#[derive(Debug)]
pub struct Names {
    owners: BTreeSet<Owner>,
    dirs: BTreeSet<String>,
    regions: BTreeSet<[u64; 2]>,
    most: usize,
}

impl Names {
    /// For so many owners.
    pub fn new(most: usize) -> Names {
        Names { owners: BTreeSet::new(), dirs: BTreeSet::new(), regions: BTreeSet::new(), most }
    }

    /// The owner of a process with these names.
    pub fn owner(&mut self, ism_dir: &str, program: &str) -> Owner {
        let (mut ism_dir, program) = (printable(ism_dir), printable(program));
        if !self.dirs.contains(&ism_dir) {
            if self.dirs.len() < DIRS {
                self.dirs.insert(ism_dir.clone());
            } else {
                OTHER.clone_into(&mut ism_dir);
            }
        }
        let owner = Owner { ism_dir, program };
        if self.owners.contains(&owner) {
            return owner;
        }
        if self.owners.len() < self.most {
            self.owners.insert(owner.clone());
            return owner;
        }
        Owner { program: OTHER.to_owned(), ..owner }
    }

    /// The device, or what stands for it.
    pub fn device(&mut self, device: Device) -> Device {
        let Device::Region(id) = device else { return device };
        if self.regions.contains(&id) || self.regions.len() < REGIONS {
            self.regions.insert(id);
            return device;
        }
        Device::OtherRegion
    }

    /// Counts with the devices that are told apart.
    pub fn tell_apart(&mut self, counts: &Counts) -> Counts {
        counts.with_devices(|device| self.device(device))
    }

    /// Keeps the names of sums that are there already.
    pub fn know(&mut self, owner: &Owner, counts: &Counts) {
        self.dirs.insert(owner.ism_dir.clone());
        self.owners.insert(owner.clone());
        for (key, _) in counts.iter() {
            if let Device::Region(id) = key.device {
                self.regions.insert(id);
            }
        }
    }
}

/// The sums of processes that have ended.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Ledger(BTreeMap<Owner, Counts>);

impl Ledger {
    /// A process has ended, and has counted this.
    pub fn fold(&mut self, owner: Owner, counts: &Counts) {
        let sums = self.0.entry(owner).or_default();
        sums.add(counts);
        sums.more(Key::of(Counter::ProcessesEnded), 1);
    }

    /// What was kept.
    pub fn restore(&mut self, owner: Owner, counts: &Counts) {
        self.0.entry(owner).or_default().add(counts);
    }

    /// By owner.
    pub fn iter(&self) -> impl Iterator<Item = (&Owner, &Counts)> {
        self.0.iter()
    }

    /// The sums with those of processes that run.
    pub fn with<'a>(&self, live: impl Iterator<Item = (&'a Owner, &'a Counts)>) -> Ledger {
        let mut all = self.clone();
        for (owner, counts) in live {
            all.restore(owner.clone(), counts);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beyond_the_limit_are_others() {
        let mut names = Names::new(2);
        for (program, told) in
            [("a", "a"), ("b", "b"), ("c", OTHER), ("a", "a"), ("d", OTHER), ("b", "b")]
        {
            assert_eq!(names.owner("/dev/shm/x", program).program, told, "{program}");
        }
        for i in 0..2 * DIRS {
            names.owner(&format!("/{i}"), "a");
        }
        assert_eq!(names.owner("/new", "a").ism_dir, OTHER);
        for i in 0..2 * REGIONS as u64 {
            names.device(Device::Region([0, i]));
        }
        assert_eq!(names.device(Device::Region([0, 1])), Device::Region([0, 1]));
        assert_eq!(names.device(Device::Region([7, 1])), Device::OtherRegion);
        assert_eq!(names.device(Device::Loopback), Device::Loopback);
    }

    #[test]
    fn names_are_short_and_printable() {
        let mut names = Names::new(9);
        let owner = names.owner(&"ü".repeat(200), "a\nb\x1b");
        assert_eq!((owner.ism_dir.len(), owner.program.as_str()), (NAME, "a?b?"));
    }

    #[test]
    fn sums_survive_and_live_ones_are_added() {
        let owner = Owner { ism_dir: "/x".to_owned(), program: "p".to_owned() };
        let key = Key::of(Counter::Sleeps);
        let of = |n| Counts::from(vec![(key, n)]);
        let mut ledger = Ledger::default();
        ledger.fold(owner.clone(), &of(3));
        ledger.fold(owner.clone(), &of(4));
        let live = of(5);
        let all = ledger.with([(&owner, &live)].into_iter());
        let sums = all.iter().next().map(|(_, counts)| counts.iter().collect::<Vec<_>>());
        assert_eq!(sums, Some(vec![(key, 12), (Key::of(Counter::ProcessesEnded), 2)]));
    }
}
