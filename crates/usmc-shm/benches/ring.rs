//! What the ring costs by itself, beside what the machine's shared memory costs by itself.
//!
//! ```text
//! cargo bench -p usmc-shm --bench ring
//! ```
//!
//! Two pinned threads, then two pinned processes with mappings of their own, over one sealed memfd.
//!
//! Target: one way, 14 bytes, at most 0.25 µs in the median, where the bare line takes 0.15. On a virtual
//! machine the bare line itself moves by a factor of five with the place and the neighbours its CPUs have,
//! so all rows are measured in turn, several times, with their spread, and beside the bare line of the same
//! pass: the ratio is the figure to compare between runs, and a run that was kept off the CPU says so.
#![allow(missing_docs, reason = "a program")]

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering::Acquire, Ordering::Release};
use std::time::Instant;
use std::{array, ptr, thread};

use usmc_shm::layout::{ACCEPTOR, CLIENT, WINDOW_SHIFT_MAX, WINDOW_SHIFT_MIN, segment_len};
use usmc_shm::ring::Ring;
use usmc_shm::segment::Segment;

const PASSES: usize = 7;
const ROUNDS: usize = 100_000;
const WARM_UP: usize = 10_000;
const STREAM_BYTES: usize = 1 << 30;
const CHUNK: usize = 64 << 10;

/// A memfd with one slot, and who runs the two ends.
struct Stage {
    fd: i32,
    len: usize,
    cpus: [usize; 2],
}

impl Stage {
    fn new(ring_shift: u32, cpus: [usize; 2]) -> Stage {
        let len = segment_len(1, ring_shift, 0).expect("a valid ring");
        // SAFETY: plain system calls with valid arguments.
        let fd = unsafe {
            let fd = libc::memfd_create(c"bench".as_ptr(), libc::MFD_ALLOW_SEALING);
            assert!(fd >= 0, "memfd_create: {}", std::io::Error::last_os_error());
            assert_eq!(libc::ftruncate(fd, len as libc::off_t), 0);
            assert_eq!(
                libc::fcntl(fd, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW),
                0
            );
            fd
        };
        let stage = Stage { fd, len, cpus };
        // SAFETY: a zeroed mapping of `len` bytes that nobody else has yet and nobody unmaps.
        let seg = unsafe { Segment::create(stage.map(), 1, (ring_shift, 0), 1, 1) };
        for end in [CLIENT, ACCEPTOR] {
            ring(&seg, end).reset();
        }
        stage
    }

    fn map(&self) -> *mut u8 {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a fresh mapping of the whole file.
        let base = unsafe { libc::mmap(ptr::null_mut(), self.len, protection, flags, self.fd, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        base.cast()
    }

    fn open(&self) -> Segment {
        // SAFETY: the file is sealed against shrinking and the mapping stays.
        unsafe { Segment::open(self.map(), self.len, self.len) }.expect("made by `new`")
    }

    /// Runs `first` here, `second` at the other end, each pinned and with its own mapping.
    fn play<T>(
        &self,
        processes: bool,
        first: impl FnOnce(&Segment) -> T,
        second: impl FnOnce(&Segment) + Send,
    ) -> T {
        let other = || {
            pin(self.cpus[1]);
            second(&self.open());
        };
        if !processes {
            return thread::scope(|scope| {
                scope.spawn(other);
                pin(self.cpus[0]);
                first(&self.open())
            });
        }
        // SAFETY: this program has one thread here.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: plain system calls; the child must not outlive its parent, nor run its exit handlers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            other();
            // SAFETY: as above.
            unsafe { libc::_exit(0) }
        }
        pin(self.cpus[0]);
        let result = first(&self.open());
        // SAFETY: our own child.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
        result
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // SAFETY: our own descriptor.
        unsafe { libc::close(self.fd) };
    }
}

fn ring(seg: &Segment, sender: usize) -> Ring<'_> {
    seg.ring(0, sender).expect("slot 0 exists")
}

fn pin(cpu: usize) {
    // SAFETY: an all-zero set is empty; the call reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &set);
    }
}

/// The first and the last CPU this process may use: rarely siblings of one core.
fn two_cpus() -> Option<[usize; 2]> {
    // SAFETY: the call fills the set.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&set), &mut set);
        set
    };
    // SAFETY: the index is below the set's size.
    let mine =
        || (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) });
    let (first, last) = (mine().next()?, mine().next_back()?);
    (first != last).then_some([first, last])
}

/// Sends as the stack does: room, copy, publish, look for sleepers.
fn send(ring: Ring<'_>, bytes: &[u8]) {
    let mut rest = bytes;
    while !rest.is_empty() {
        let room = ring.room(rest.len()).expect("a correct peer");
        let len = room.free.min(rest.len());
        if len == 0 {
            spin_loop();
            continue;
        }
        // SAFETY: len ≤ room.free and ≤ the slice.
        unsafe { ring.copy_in(room.prod, room.place, rest.as_ptr(), len) };
        ring.publish(room.prod + len as u64);
        assert!(!ring.has_rx_sleepers());
        rest = &rest[len..];
    }
}

/// Receives at least one byte, as the stack does.
fn receive(ring: Ring<'_>, into: &mut [u8]) -> usize {
    loop {
        let data = ring.data().expect("a correct peer");
        if data.len == 0 {
            spin_loop();
            continue;
        }
        let len = data.len.min(into.len());
        // SAFETY: len ≤ data.len and ≤ the slice.
        unsafe { ring.copy_out(data.cons, data.place, into.as_mut_ptr(), len) };
        assert!(!ring.consume_waking(&data, len));
        return len;
    }
}

fn receive_all(ring: Ring<'_>, into: &mut [u8]) {
    let mut got = 0;
    while got < into.len() {
        got += receive(ring, &mut into[got..]);
    }
}

/// Half of each round trip, in nanoseconds, sorted.
fn one_way(mut round: impl FnMut()) -> Vec<f64> {
    (0..WARM_UP).for_each(|_| round());
    let mut times: Vec<f64> = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        round();
        times.push(start.elapsed().as_nanos() as f64 / 2.0);
    }
    times.sort_by(f64::total_cmp);
    times
}

fn ping_pong<const SIZE: usize>(stage: &Stage, processes: bool) -> Vec<f64> {
    stage.play(
        processes,
        |seg| {
            let mut bytes = [0x55; SIZE];
            one_way(|| {
                send(ring(seg, CLIENT), &bytes);
                receive_all(ring(seg, ACCEPTOR), &mut bytes);
            })
        },
        |seg| {
            let mut bytes = [0; SIZE];
            for _ in 0..WARM_UP + ROUNDS {
                receive_all(ring(seg, CLIENT), &mut bytes);
                send(ring(seg, ACCEPTOR), &bytes);
            }
        },
    )
}

/// One word there, one word back, on lines of their own: what no protocol can beat.
fn bounce(stage: &Stage, processes: bool) -> Vec<f64> {
    const STEP: usize = 256;
    // The ring's memory is as good as any.
    let words = |seg: &Segment| {
        let base = ring(seg, ACCEPTOR).meet();
        // SAFETY: two aligned words at the start of the ring, used as atomics by both sides.
        array::from_fn::<_, 2, _>(|i| unsafe { &*base.add(i * STEP).cast::<AtomicU64>() })
    };
    let wait = |word: &AtomicU64, value: u64| {
        while word.load(Acquire) != value {
            spin_loop();
        }
    };
    stage.play(
        processes,
        |seg| {
            let [there, back] = words(seg);
            let mut i = 0;
            one_way(|| {
                i += 1;
                there.store(i, Release);
                wait(back, i);
            })
        },
        |seg| {
            let [there, back] = words(seg);
            for i in 1..=(WARM_UP + ROUNDS) as u64 {
                wait(there, i);
                back.store(i, Release);
            }
        },
    )
}

/// Gigabytes per second of 64 KB writes and reads. Each write is stamped, and the reader checks the stamps.
fn stream(stage: &Stage, processes: bool) -> f64 {
    let word = |i: u64, at: usize| i ^ (at as u64) << 32;
    let chunk =
        |i: u64| (0..CHUNK / 8).flat_map(|at| word(i, at).to_ne_bytes()).collect::<Vec<u8>>();
    let last = |i: u64| word(i, CHUNK / 8 - 1);
    let seconds = stage.play(
        processes,
        |seg| {
            let mut bytes = vec![0; CHUNK];
            let start = Instant::now();
            for i in 0..(STREAM_BYTES / CHUNK) as u64 {
                receive_all(ring(seg, CLIENT), black_box(&mut bytes));
                assert_eq!(bytes[..8], i.to_ne_bytes());
                assert_eq!(bytes[CHUNK - 8..], last(i & 1).to_ne_bytes());
            }
            start.elapsed().as_secs_f64()
        },
        |seg| {
            let mut sources = [0, 1].map(chunk);
            for i in 0..(STREAM_BYTES / CHUNK) as u64 {
                let source = &mut sources[i as usize & 1];
                source[..8].copy_from_slice(&i.to_ne_bytes());
                send(ring(seg, CLIENT), black_box(source));
            }
        },
    );
    STREAM_BYTES as f64 / seconds / 1e9
}

/// Seconds of CPU this process and its children have had.
fn cpu_seconds() -> f64 {
    [libc::RUSAGE_SELF, libc::RUSAGE_CHILDREN]
        .map(|who| {
            // SAFETY: an all-zero rusage is valid; the call fills it.
            let usage = unsafe {
                let mut usage: libc::rusage = std::mem::zeroed();
                libc::getrusage(who, &raw mut usage);
                usage
            };
            [usage.ru_utime, usage.ru_stime]
                .map(|time| time.tv_sec as f64 + time.tv_usec as f64 / 1e6)
                .iter()
                .sum::<f64>()
        })
        .iter()
        .sum()
}

/// Median, least and most.
fn spread(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}

type Row = (&'static str, fn(&Stage, bool) -> Vec<f64>);

fn main() {
    const ROWS: [Row; 3] = [
        ("bare line bounce", bounce),
        ("ring, 14 bytes", ping_pong::<14>),
        ("ring, 1 KiB", ping_pong::<1024>),
    ];
    let Some(cpus) = two_cpus() else {
        println!("skipped: needs two CPUs");
        return;
    };
    let (start, cpu) = (Instant::now(), cpu_seconds());
    println!(
        "CPUs {} and {}; {PASSES} passes of {ROUNDS} round trips, each timed and halved",
        cpus[0], cpus[1]
    );
    println!(
        "\n{:<30}{:>8}  {:<15}{:>8}{:>8}",
        "one way, µs", "median", "(passes)", "p99", "÷ bare"
    );
    for (processes, who) in [(false, "threads"), (true, "processes")] {
        let mut medians = [const { Vec::new() }; 3];
        let mut tails = [const { Vec::new() }; 3];
        for _ in 0..PASSES {
            for (i, (_, run)) in ROWS.iter().enumerate() {
                let times = run(&Stage::new(WINDOW_SHIFT_MIN + 2, cpus), processes);
                medians[i].push(times[times.len() / 2] / 1000.0);
                tails[i].push(times[times.len() * 99 / 100] / 1000.0);
            }
        }
        for (i, (what, _)) in ROWS.iter().enumerate() {
            let pairs = medians[i].iter().zip(&medians[0]);
            let [ratio, ..] = spread(pairs.map(|(own, bare)| own / bare).collect());
            let [median, least, most] = spread(medians[i].clone());
            let [tail, ..] = spread(tails[i].clone());
            let (name, passes) = (format!("{what}, {who}"), format!("({least:.3}–{most:.3})"));
            println!("{name:<30}{median:>8.3}  {passes:<15}{tail:>8.3}{ratio:>8.2}");
        }
    }
    println!(
        "\n{:<30}{:>8}  {:<15}{:>8}",
        "64 KB writes, GB/s", "threads", "(passes)", "processes"
    );
    for ring_shift in (WINDOW_SHIFT_MIN + 2..=WINDOW_SHIFT_MAX).step_by(2) {
        let rates = |processes| {
            let pass = |_| stream(&Stage::new(ring_shift, cpus), processes);
            spread((0..PASSES).map(pass).collect())
        };
        let show =
            |[median, least, most]: [f64; 3]| format!("{median:>8.2}  ({least:.1}–{most:.1})");
        let name = format!("ring of {} KiB", (1 << ring_shift) / 1024);
        println!("{name:<30}{:<25}{}", show(rates(false)), show(rates(true)));
    }
    // Both ends spin, so an undisturbed run has both CPUs all the time.
    let had = (cpu_seconds() - cpu) / start.elapsed().as_secs_f64() / 2.0;
    println!("\nhad {:.0} % of both CPUs", had * 100.0);
    if had < 0.9 {
        println!("others used them, too: compare the ratios, not the times");
    }
}
