//! Requests and answers on connections with a thread each: `pingpong`, `stream`, `ipc`, `rr1`, `rr10`, `streaming`, `paced`.

use std::hint::spin_loop;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use super::line::{self, Line};
use super::spec::{Done, Exchange, Spec};

/// Exchanges before a run at least, so that a connection had the calls in which it changes over.
const WARM_UP: u64 = 150;
/// Long exchanges are fewer.
const WARM_UP_TIME: Duration = Duration::from_millis(100);
/// Single exchanges whose time is kept: the last million.
const TIMES: usize = 1 << 20;

/// The server.
pub fn serve(spec: &Spec, connections: usize) -> Result<()> {
    let (listener, port) = line::listen(&spec.at)?;
    super::say("listening", &port)?;
    let answer = |mut line: Line| -> Result<()> {
        let (mut request, answer) = (vec![0; spec.request], vec![b'a'; spec.answer]);
        while line.receive(&mut request).context("cannot receive")? {
            line.send(&answer).context("cannot send")?;
        }
        Ok(())
    };
    let accept = || -> Result<Line> {
        let (socket, _) = listener.accept().context("cannot accept")?;
        Line::new(socket, spec)
    };
    if connections == 1 {
        // A program of one thread, as most are that talk to one peer.
        return answer(accept()?);
    }
    thread::scope(|scope| {
        for _ in 0..connections {
            let line = accept()?;
            scope.spawn(move || answer(line));
        }
        Ok(())
    })
}

/// One connection of the client.
struct Talk {
    line: Line,
    request: Vec<u8>,
    answer: Vec<u8>,
    times: Vec<u32>,
}

impl Talk {
    fn new(spec: &Spec) -> Result<Talk> {
        // Memory first: a client does not connect and then let its server wait.
        let (request, answer) = (vec![b'r'; spec.request], vec![0; spec.answer]);
        let times = vec![1; TIMES];
        let line = Line::new(line::connect(&spec.at)?, spec)?;
        Ok(Talk { line, request, answer, times })
    }

    fn exchange(&mut self) -> Result<()> {
        self.line.send(&self.request).context("cannot send")?;
        let answered = self.line.receive(&mut self.answer).context("cannot receive")?;
        answered.then_some(()).ok_or_else(|| anyhow!("the server hung up"))
    }

    fn warm_up(&mut self) -> Result<()> {
        let begin = Instant::now();
        for done in 1.. {
            self.exchange()?;
            if done >= WARM_UP || begin.elapsed() > WARM_UP_TIME {
                break;
            }
        }
        Ok(())
    }

    /// So many exchanges.
    fn measure(&mut self, wanted: &Exchange) -> Result<u64> {
        let length = Duration::from_secs_f64(wanted.seconds);
        let begin = Instant::now();
        let (mut last, mut done) = (Duration::ZERO, 0);
        while done < wanted.most && last < length {
            self.exchange()?;
            let now = begin.elapsed();
            self.times[done as usize % TIMES] = (now - last).as_nanos().min(u32::MAX.into()) as u32;
            last = now;
            done += 1;
            if wanted.pause_us > 0 {
                // No sleep: what wakes this end is to be the answer alone.
                let next = now + Duration::from_micros(wanted.pause_us);
                while last < next {
                    spin_loop();
                    last = begin.elapsed();
                }
            }
        }
        self.times.truncate(done as usize);
        Ok(done)
    }
}

/// Half the median, in microseconds.
fn one_way(mut times: Vec<u32>) -> f64 {
    if times.is_empty() {
        return 0.0;
    }
    let middle = times.len() / 2;
    f64::from(*times.select_nth_unstable(middle).1) / 2e3
}

/// The client.
pub fn exchange(spec: &Spec, wanted: &Exchange) -> Result<()> {
    if wanted.connections == 1 {
        let mut talk = Talk::new(spec)?;
        talk.warm_up()?;
        super::start(|| talk.warm_up())?;
        let (cpu, begin) = (super::cpu_time(), Instant::now());
        let operations = talk.measure(wanted)?;
        return end(operations, cpu, begin, talk.times);
    }
    let talks = (0..wanted.connections).map(|_| Talk::new(spec)).collect::<Result<Vec<Talk>>>()?;
    let gate = Barrier::new(wanted.connections + 1);
    let warm = AtomicBool::new(true);
    // Every thread passes the gate as often as this one, whatever becomes of its connection.
    let play = |mut talk: Talk| -> Result<(u64, Vec<u32>)> {
        let mut outcome = Ok(());
        while warm.load(Ordering::Acquire) {
            outcome = outcome.and_then(|()| talk.warm_up());
            gate.wait();
            gate.wait();
        }
        let measured = outcome.and_then(|()| talk.measure(wanted));
        gate.wait();
        // The connection stays open until the driver has looked at it.
        gate.wait();
        Ok((measured?, talk.times))
    };
    thread::scope(|scope| {
        let threads: Vec<_> = talks.into_iter().map(|talk| scope.spawn(|| play(talk))).collect();
        gate.wait();
        super::start(|| {
            gate.wait();
            gate.wait();
            Ok(())
        })?;
        warm.store(false, Ordering::Release);
        let (cpu, begin) = (super::cpu_time(), Instant::now());
        gate.wait();
        gate.wait();
        let (seconds, cpu_seconds) = since(cpu, begin);
        super::say("measured", &())?;
        super::hear()?;
        gate.wait();
        let mut done = Done { seconds, cpu_seconds, ..Done::default() };
        let mut times = Vec::new();
        for thread in threads {
            let (operations, own) = thread.join().map_err(|_| anyhow!("a thread ended"))??;
            done.operations += operations;
            times.extend(own);
        }
        done.one_way_us = one_way(times);
        super::say("done", &done)?;
        super::rest()
    })
}

fn since(cpu: Duration, begin: Instant) -> (f64, f64) {
    (begin.elapsed().as_secs_f64(), (super::cpu_time() - cpu).as_secs_f64())
}

fn end(operations: u64, cpu: Duration, begin: Instant, times: Vec<u32>) -> Result<()> {
    let (seconds, cpu_seconds) = since(cpu, begin);
    super::say("measured", &())?;
    super::hear()?;
    let one_way_us = one_way(times);
    super::say("done", &Done { operations, seconds, cpu_seconds, one_way_us, ..Done::default() })?;
    super::rest()
}
