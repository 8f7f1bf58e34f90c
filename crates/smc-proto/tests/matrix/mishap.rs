//! What can happen to a message on its way, and how each side's handshake has to end then.

use std::time::Duration;

use smc_proto::handshake::Path;

use crate::oracle::{At, PEERDECL, PEERNOSMC, TIMEOUT_CL, Verdict};
use crate::support::peers::{Behind, Faults};

/// A byte that no application here writes.
pub const GARBAGE: u8 = 0x55;

/// What happens to one CLC message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mishap {
    /// It comes byte by byte.
    Bytewise,
    /// It comes a little late.
    Late,
    /// It comes after the time that any CLC message may take.
    TooLate,
    /// Something else comes that is as long.
    Garbage,
    /// A message of no kind.
    OtherKind,
    /// It says that it is longer than any message.
    Oversized,
    /// Its end is wrong.
    Trailer,
    /// Half of it comes, and then nothing for ever.
    Cut,
    /// The stream ends in front of it.
    ClosedBefore,
    /// The stream ends in the middle of it.
    ClosedWithin,
}

use Mishap::*;

pub const MISHAPS: [Mishap; 10] = [
    Bytewise,
    Late,
    TooLate,
    Garbage,
    OtherKind,
    Oversized,
    Trailer,
    Cut,
    ClosedBefore,
    ClosedWithin,
];

/// How one side's handshake ends.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum End {
    Smc,
    /// TCP: the reason, and the peer's.
    Tcp(u32, Option<u32>),
    Failed(Why),
}

/// Why a connection fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    Malformed,
    Closed,
    /// By time, here or (a moment before) at the peer, who hangs up then.
    Time,
}

/// Who sends what, in which order: the client is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    Proposal,
    Accept,
    Confirm,
    Decline,
}

/// The messages of a handshake, and how it ends for both if nothing happens to them.
pub fn script(verdict: &Verdict) -> (Vec<(usize, Sent)>, [End; 2]) {
    let mut sent = vec![(0, Sent::Proposal), (1, Sent::Accept), (0, Sent::Confirm)];
    match *verdict {
        Verdict::Silent => (Vec::new(), [End::Tcp(PEERNOSMC, None); 2]),
        Verdict::OneSided => panic!("there is no common script"),
        Verdict::Smc(_) => (sent, [End::Smc; 2]),
        Verdict::Unheard { code, .. } => {
            sent.push((1, Sent::Decline));
            (sent, [End::Smc, End::Tcp(code, None)])
        }
        Verdict::Declined { by_client, at, code, .. } => {
            let before = match at {
                At::Start => 0,
                At::Proposal => 1,
                At::Accept => 2,
                At::Link => 3,
            };
            sent.truncate(before);
            sent.push((usize::from(!by_client), Sent::Decline));
            let mut ends = [End::Tcp(code, None), End::Tcp(PEERDECL, Some(code))];
            if !by_client {
                ends.reverse();
            }
            (sent, ends)
        }
    }
}

/// The faults that do this to the nth message.
pub fn faults<'f>(mishap: Mishap, n: usize, early: bool) -> Faults<'f> {
    let clc = move |message: usize, bytes: &mut Vec<u8>| {
        if message != n {
            return Behind::Open;
        }
        let last = bytes.len() - 1;
        match mishap {
            Bytewise | Late | TooLate => {}
            Garbage => bytes.fill(GARBAGE),
            OtherKind => bytes[4] = 5,
            Oversized => bytes[5..7].fill(0xff),
            Trailer => bytes[last] ^= 0xff,
            Cut | ClosedWithin => bytes.truncate(last / 2),
            ClosedBefore => bytes.clear(),
        }
        match mishap {
            Cut => Behind::Stalled,
            ClosedBefore | ClosedWithin => Behind::Closed,
            _ => Behind::Open,
        }
    };
    let delay = move |message: usize| match mishap {
        Late if message == n => Duration::from_millis(900),
        TooLate if message == n => Duration::from_millis(6_100),
        _ => Duration::ZERO,
    };
    Faults {
        clc: Box::new(clc),
        delay: Box::new(delay),
        piece: Box::new(move || if mishap == Bytewise { 1 } else { usize::MAX }),
        early,
        ..Faults::default()
    }
}

/// Whether the reader gives up before it has the message.
pub fn loses(mishap: Mishap) -> bool {
    matches!(mishap, Cut | TooLate | ClosedBefore | ClosedWithin)
}

/// How both sides end if this happens to the nth message of the script.
pub fn ends(verdict: &Verdict, mishap: Mishap, n: usize, early: bool) -> [End; 2] {
    let (sent, base) = script(verdict);
    let (sender, kind) = sent[n];
    let reader = 1 - sender;
    let new_link = match verdict {
        Verdict::Declined { at, .. } => *at == At::Link,
        Verdict::Smc(chosen) | Verdict::Unheard { chosen, .. } => {
            chosen.first_contact && matches!(chosen.path, Path::Rv1 | Path::Rv2)
        }
        Verdict::Silent | Verdict::OneSided => false,
    };
    let behind_confirm = n == 3;
    if behind_confirm && matches!(verdict, Verdict::Unheard { .. }) {
        return base; // Nobody reads it.
    }
    let mut ends = base;
    match mishap {
        Bytewise | Late => return base,
        // Nobody looks at the end of a Decline (facts, section 2).
        Trailer if kind == Sent::Decline => return base,
        _ if behind_confirm && loses(mishap) => {
            ends[reader] = End::Tcp(TIMEOUT_CL, None);
            return ends;
        }
        Cut | TooLate => ends[reader] = End::Failed(Why::Time),
        ClosedBefore | ClosedWithin => ends[reader] = End::Failed(Why::Closed),
        // A client that does not begin as one that speaks SMC is a plain one.
        Garbage if n == 0 => ends[reader] = End::Tcp(PEERNOSMC, None),
        Garbage | OtherKind | Oversized | Trailer => ends[reader] = End::Failed(Why::Malformed),
    }
    ends[sender] = match kind {
        Sent::Decline => base[sender],
        // What the server's application writes is no Accept.
        Sent::Proposal if mishap == Garbage && !early => End::Failed(Why::Malformed),
        Sent::Proposal if mishap == Garbage => End::Failed(Why::Time),
        Sent::Proposal | Sent::Accept => End::Failed(Why::Time),
        Sent::Confirm if new_link => End::Tcp(TIMEOUT_CL, None),
        Sent::Confirm => End::Smc,
    };
    ends
}
