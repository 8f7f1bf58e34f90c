//! What the state words of a slot say. Nothing outside this crate names their bits.
//!
//! A word is loaded once, and the questions are asked of what that load has found. net/smc has the same states in its CDC
//! messages: `peer_done_writing` is [`EndState::Shut`], `peer_conn_closed` [`EndState::Closed`], `peer_conn_abort`
//! [`EndState::Aborted`].

use crate::layout::{
    BY_SENDER, END_CORK, END_CUT, END_ERRNO_SHIFT, END_ERROR_TAKEN, END_FAR, END_GIVEN_BACK,
    END_HANDS_ON, END_MARKS_SHIFT, END_NODELAY, END_RESET_SEEN, END_RESETS, END_SENT_AFTER,
    END_SHUT_RD, End, Producer, TCP_AGAIN, TX_RING, TX_TCP, TXF_ABORT, TXF_BACK, TXF_CLOSED,
    TXF_COPIED, TXF_DONE, TXF_ENDS, TXF_LEFT, TXF_LOOK, TXF_RETURNS, TXF_SHUT,
};
use crate::sync::Ordering::{self, AcqRel, Acquire, Relaxed, SeqCst};

/// Where a direction's bytes go, as its sender says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tx {
    /// Through the kernel's TCP.
    Tcp,
    /// Through the ring.
    Ring,
    /// Through the kernel's TCP again.
    Back,
}

/// Where the next bytes of a direction come from, as far as its receiver knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rx {
    /// From TCP. The receiver has not seen a switch yet.
    Unmeasured,
    /// From TCP, so many bytes, and then from the ring.
    Span(u64),
    /// From the ring.
    Ring,
    /// From TCP, behind doorbells: the sender has left the ring before the receiver had seen the switch.
    BySender,
    /// From TCP, for good.
    Tcp,
}

/// How far an end of the connection has gone towards its close.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum EndState {
    /// It sends and reads.
    Open,
    /// It has shut its sending direction down.
    Shut,
    /// It neither sends nor reads: it is closed, or both its directions are shut down.
    Closed,
    /// It was closed with unread data or with SO_LINGER 0, or disconnected: TCP sends a RST.
    Aborted,
}

/// A word of flags, as one load has found it, and the questions that one of some bits answers.
macro_rules! flags {
    ($(#[$doc:meta])* $name:ident: $($(#[$what:meta])* $question:ident = $bits:expr;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct $name(u32);

        impl $name {
            $(
                $(#[$what])*
                #[inline(always)]
                pub const fn $question(self) -> bool {
                    self.0 & ($bits) != 0
                }
            )*
        }
    };
}

flags! {
    /// [`Producer::flags`], as one load has found it.
    TxFlags:
    /// Whether the sender has ended its direction in any way.
    has_ended = TXF_ENDS;
    /// Whether no byte follows in this direction.
    is_done = TXF_DONE;
    /// Whether the sender's kernel has sent a FIN for a shutdown(2), whatever came later.
    was_shut = TXF_SHUT;
    /// Whether what is sent to this end is lost: it is [`EndState::Closed`] or [`EndState::Aborted`].
    reads_nothing = TXF_CLOSED | TXF_ABORT;
    /// Whether the receiver has left the ring.
    is_left = TXF_LEFT;
    /// Whether the sender goes back to TCP of its own accord.
    goes_back = TXF_BACK;
    /// Whether the direction's ring is over or to be ended: one of its ends has left it.
    ends_ring = TXF_LEFT | TXF_BACK;
    /// Whether the sender has left the other direction.
    has_left_other = TXF_LOOK;
    /// Whether one of the directions may be on its way back to TCP.
    is_returning = TXF_RETURNS;
    /// Whether copies of the ring's unread bytes are in the sender's kernel ([`Producer::copied`]).
    has_copied = TXF_COPIED;
}

impl TxFlags {
    /// The sender's end.
    #[inline(always)]
    pub const fn end(self) -> EndState {
        if self.0 & TXF_ABORT != 0 {
            EndState::Aborted
        } else if self.0 & TXF_CLOSED != 0 {
            EndState::Closed
        } else if self.0 & TXF_ENDS != 0 {
            EndState::Shut
        } else {
            EndState::Open
        }
    }

    /// Whether nothing was said at all.
    #[inline(always)]
    pub const fn is_silent(self) -> bool {
        self.0 == 0
    }

    /// A number that differs after each step towards the end.
    #[inline(always)]
    pub const fn end_bits(self) -> u32 {
        self.0 & TXF_ENDS
    }

    /// A number that differs after each change, below 256.
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        self.0
    }
}

impl core::ops::BitOr for TxFlags {
    type Output = TxFlags;

    /// What either of the two says.
    #[inline(always)]
    fn bitor(self, other: TxFlags) -> TxFlags {
        TxFlags(self.0 | other.0)
    }
}

impl Producer {
    /// What is said of the direction.
    #[inline(always)]
    pub fn flags(&self, order: Ordering) -> TxFlags {
        TxFlags(self.flags.load(order))
    }

    /// Where the direction's bytes go.
    #[inline(always)]
    pub fn tx(&self, order: Ordering) -> Tx {
        match self.state.load(order) {
            TX_TCP => Tx::Tcp,
            TX_RING => Tx::Ring,
            _ => Tx::Back,
        }
    }

    /// The sender shuts its direction down, behind the last published byte. What was said before.
    pub fn shut(&self) -> TxFlags {
        // SeqCst: a sender that is about to sleep for room sees it, or its sleep is seen.
        TxFlags(self.flags.fetch_or(TXF_DONE | TXF_SHUT, SeqCst))
    }

    /// The sender, whose direction is shut, reads no more either.
    pub fn shut_both(&self) {
        self.flags.fetch_or(TXF_CLOSED, SeqCst);
    }

    /// The shutdown that had found `before` did not happen.
    pub fn take_shut_back(&self, before: TxFlags) {
        const SHUT: u32 = TXF_DONE | TXF_SHUT | TXF_CLOSED;
        self.flags.fetch_and(!(SHUT & !before.0), Relaxed);
    }

    /// The sender's end is closed, behind the last published byte. What was said before.
    pub fn close(&self, aborts: bool) -> TxFlags {
        let abort = if aborts { TXF_ABORT } else { 0 };
        // Release: the last byte is visible. Acquire: what the receiver left before.
        TxFlags(self.flags.fetch_or(TXF_DONE | TXF_CLOSED | abort, AcqRel))
    }

    /// The sender has left the other direction.
    pub fn say_left_other(&self) {
        // Release: it is found left.
        self.flags.fetch_or(TXF_LOOK, AcqRel);
    }

    /// The sender goes back to TCP, and sends nothing there.
    pub fn go_back_done(&self) {
        self.flags.fetch_or(TXF_BACK, AcqRel);
    }

    /// The sender leaves the ring on behalf of a receiver that reads no more.
    pub fn leave_for_receiver(&self) {
        self.flags.fetch_or(TXF_LEFT, AcqRel);
    }
}

flags! {
    /// [`End::flags`], as one load has found it.
    EndFlags:
    /// Whether the receiving direction was shut down by the application.
    is_shut_rd = END_SHUT_RD;
    /// Whether the library has shut the kernel's receiving direction down: no doorbell is heard.
    is_cut = END_CUT;
    /// Whether anything of the connection's end has happened at this end, but for what its sending line says.
    has_ended = END_SHUT_RD | END_RESET_SEEN | END_ERROR_TAKEN | END_SENT_AFTER | END_CUT;
    /// Whether an error was taken out of the kernel's socket, by whatever process of this end.
    has_taken_error = END_ERROR_TAKEN;
    /// Whether the connection's error was reported to the application.
    has_told_error = END_RESET_SEEN;
    /// Whether the application has sent after the peer's end.
    has_sent_after = END_SENT_AFTER;
    /// Whether the socket's end is a reset in any case (SO_LINGER with no time).
    resets = END_RESETS;
    /// Whether the application has TCP_NODELAY set.
    has_nodelay = END_NODELAY;
    /// Whether the application has TCP_CORK set.
    has_cork = END_CORK;
    /// Whether the kernel's socket has the application's options again.
    has_given_back = END_GIVEN_BACK;
    /// Whether the end may be handed on to a program that knows nothing of the ring.
    hands_on = END_HANDS_ON;
    /// Whether the far parts of both rings are in this end's reach.
    reaches_far = END_FAR;
}

impl EndFlags {
    /// The number of the error that was taken; 0 = none. Within the peer's reach.
    #[inline(always)]
    pub const fn errno(self) -> u32 {
        self.0 >> END_ERRNO_SHIFT & 0xff
    }

    /// How often SO_RCVLOWAT was set with enough to read, modulo 256.
    #[inline(always)]
    pub const fn lowat_marks(self) -> u32 {
        self.0 >> END_MARKS_SHIFT & 0xff
    }
}

impl End {
    /// What is said of the end. Relaxed: each bit stands for itself.
    #[inline(always)]
    pub fn flags(&self) -> EndFlags {
        EndFlags(self.flags.load(Relaxed))
    }

    /// Where the next bytes come from. Relaxed: as in [`crate::span::RxSpan::source`].
    #[inline(always)]
    pub fn rx(&self) -> Rx {
        match self.tcp_left.load(Relaxed) {
            0 => Rx::Unmeasured,
            1 => Rx::Ring,
            TCP_AGAIN => Rx::Tcp,
            BY_SENDER => Rx::BySender,
            left => Rx::Span(left - 1),
        }
    }

    /// Whether TCP has been read to the boundary, and the ring is next.
    #[inline(always)]
    pub fn reads_ring(&self) -> bool {
        matches!(self.rx(), Rx::Ring)
    }

    #[inline(always)]
    fn set(&self, bit: u32, on: bool) {
        match on {
            true => self.flags.fetch_or(bit, Relaxed),
            false => self.flags.fetch_and(!bit, Relaxed),
        };
    }

    /// The receiving direction is shut down by the application, or it is not after all.
    pub fn set_shut_rd(&self, on: bool) {
        self.set(END_SHUT_RD, on);
    }

    /// No doorbell is heard from now on.
    pub fn set_cut(&self) {
        self.set(END_CUT, true);
    }

    /// The connection's error is reported now; false where it was before.
    pub fn tell_error(&self) -> bool {
        self.flags.fetch_or(END_RESET_SEEN, Relaxed) & END_RESET_SEEN == 0
    }

    /// The error was reported to nobody after all.
    pub fn untell_error(&self) {
        self.set(END_RESET_SEEN, false);
    }

    /// This error was taken out of the kernel's socket. The first one counts: the others are of a connection that is over.
    pub fn take_error(&self, errno: u32) {
        let with = |flags| {
            let error = END_ERROR_TAKEN | errno << END_ERRNO_SHIFT;
            (flags & END_ERROR_TAKEN == 0).then_some(flags | error)
        };
        let _ = self.flags.fetch_update(Relaxed, Relaxed, with);
    }

    /// The application has sent after the peer's end.
    pub fn set_sent_after(&self) {
        self.set(END_SENT_AFTER, true);
    }

    /// The socket has SO_LINGER with no time, or not.
    pub fn set_resets(&self, on: bool) {
        self.set(END_RESETS, on);
    }

    /// The application's TCP_NODELAY.
    pub fn set_nodelay(&self, on: bool) {
        self.set(END_NODELAY, on);
    }

    /// The application's TCP_CORK.
    pub fn set_cork(&self, on: bool) {
        self.set(END_CORK, on);
    }

    /// The slot has the application's options, and the kernel's socket has not.
    pub fn keep_options(&self) {
        self.set(END_GIVEN_BACK, false);
    }

    /// The kernel's socket is to have them again. What was said before: another process may have been first.
    pub fn give_options_back(&self) -> EndFlags {
        EndFlags(self.flags.fetch_or(END_GIVEN_BACK, Relaxed))
    }

    /// The end may be handed on to a program that knows nothing of the ring.
    pub fn set_hands_on(&self) {
        self.set(END_HANDS_ON, true);
    }

    /// The far parts of both rings are in reach.
    pub fn set_reaches_far(&self) {
        self.set(END_FAR, true);
    }

    /// The process of this end that takes the peer's ear, by the directory's number. The peer looks by itself where there is none.
    pub fn ear_taker(&self) -> Option<u32> {
        (self.ears.load(Relaxed) & 0xffff).checked_sub(1)
    }

    /// This process takes it, or nobody does.
    pub fn set_ear_taker(&self, process: Option<u32>) {
        self.set_ears(0xffff, process.map_or(0, |process| process + 1));
    }

    /// The process of this end whose ear the peer was sent.
    pub fn hearer(&self) -> Option<u32> {
        // Acquire: it was sent before.
        (self.ears.load(Acquire) >> 16).checked_sub(1)
    }

    /// This process' ear was sent to the peer.
    pub fn set_hearer(&self, process: u32) {
        self.set_ears(0xffff << 16, (process + 1) << 16);
    }

    /// The peer, an agent, is to wake by the ear of that number, unless it is to by another one. Whether it is.
    pub fn hears_by(&self, ear: u32) -> bool {
        let wanted = (ear + 1) << 16;
        let take = |ears: u32| (ears >> 16 == 0).then_some(ears | wanted);
        // AcqRel: the arm bit that follows shows it.
        let before = self.ears.fetch_update(AcqRel, Relaxed, take).unwrap_or_else(|ears| ears);
        before >> 16 == 0 || before & 0xffff << 16 == wanted
    }

    /// The peer, an agent, is to wake by the ear of that number no more.
    pub fn forget_ear(&self, ear: u32) {
        let known = (ear + 1) << 16;
        let take = |ears: u32| (ears & 0xffff << 16 == known).then_some(ears & 0xffff);
        let _ = self.ears.fetch_update(AcqRel, Relaxed, take);
    }

    fn set_ears(&self, half: u32, to: u32) {
        let _ = self.ears.fetch_update(AcqRel, Relaxed, |ears| Some(ears & !half | to & half));
    }

    /// SO_RCVLOWAT was set, with enough to read.
    pub fn mark_lowat(&self) {
        const MARKS: u32 = 0xff << END_MARKS_SHIFT;
        let with =
            |flags: u32| Some(flags & !MARKS | flags.wrapping_add(1 << END_MARKS_SHIFT) & MARKS);
        let _ = self.flags.fetch_update(Relaxed, Relaxed, with);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn an_end_goes_from_open_to_shut_to_closed_and_back_where_the_kernel_refuses() {
        let sender = Producer::default();
        let end = || sender.flags(Relaxed).end();
        assert_eq!(end(), EndState::Open);
        let before = sender.shut();
        assert_eq!((before.end(), end()), (EndState::Open, EndState::Shut));
        sender.shut_both();
        assert_eq!(end(), EndState::Closed);
        sender.take_shut_back(before);
        assert!(sender.flags(Relaxed).is_silent());
        sender.shut();
        let shut = sender.shut();
        sender.take_shut_back(shut);
        assert_eq!(end(), EndState::Shut, "an earlier shutdown stays");
        assert!(sender.close(false).was_shut());
        assert_eq!(end(), EndState::Closed);
        sender.close(true);
        assert_eq!(end(), EndState::Aborted);
        assert!(sender.flags(Relaxed).is_done() && sender.flags(Relaxed).reads_nothing());
    }

    #[test]
    fn the_way_back_is_no_end() {
        let sender = Producer::default();
        sender.say_left_other();
        let flags = sender.flags(Relaxed);
        assert!(flags.is_returning() && flags.has_left_other() && !flags.has_ended());
        sender.leave_for_receiver();
        assert!(sender.flags(Relaxed).is_left() && !sender.flags(Relaxed).goes_back());
    }

    #[test]
    fn an_error_is_told_once_and_the_first_one_counts() {
        let end = End::default();
        end.take_error(104);
        end.take_error(32);
        assert_eq!((end.flags().has_taken_error(), end.flags().errno()), (true, 104));
        assert!(end.tell_error() && !end.tell_error());
        end.untell_error();
        assert!(end.tell_error());
    }

    #[test]
    fn marks_count_without_an_effect_on_their_neighbours() {
        let end = End::default();
        end.set_cork(true);
        end.take_error(104);
        for _ in 0..300 {
            end.mark_lowat();
        }
        let flags = end.flags();
        assert_eq!((flags.lowat_marks(), flags.errno(), flags.has_cork()), (44, 104, true));
        end.set_cork(false);
        assert!(!end.flags().has_cork() && end.flags().has_ended());
    }

    #[test]
    fn the_next_bytes_are_where_the_word_says() {
        let end = End::default();
        for (word, rx) in [
            (0, Rx::Unmeasured),
            (1, Rx::Ring),
            (2, Rx::Span(1)),
            (BY_SENDER - 1, Rx::Span(BY_SENDER - 2)),
            (BY_SENDER, Rx::BySender),
            (TCP_AGAIN, Rx::Tcp),
        ] {
            end.tcp_left.store(word, Relaxed);
            assert_eq!(end.rx(), rx);
            assert_eq!(end.reads_ring(), word == 1);
        }
    }
}
