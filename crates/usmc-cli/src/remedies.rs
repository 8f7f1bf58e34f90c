//! What can be done about each reason for TCP.

use usmc::reason::Reason;

/// All reasons, in the order of their codes.
pub fn all() -> impl Iterator<Item = Reason> {
    (0..=u8::MAX).filter_map(Reason::from_code).filter(|reason| *reason != Reason::None)
}

/// What helps; `None` where the connection goes on by itself, or the program is as it is.
pub fn of(reason: Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::NotRegistered => {
            "start the other end by `usmc run`, with the same ISM directory (`ism_dir`), or with a region in common (`regions`)"
        }
        Reason::NoOffer => {
            "start the client by `usmc run`, with the same ISM directory (`ism_dir`), or with a region in common (`regions`)"
        }
        Reason::NoDevice => {
            "the directory holds what another version or user left: stop its programs and remove it"
        }
        Reason::Excluded => "change the rules of usmc.toml(5)",
        Reason::NoMemory => "free memory, or raise the memory limit of this user or container",
        Reason::RegionFull => {
            "see whose its units are (`usmc region show`); say which machines are dead for good (`usmc region evict`), or make a \
             larger region"
        }
        Reason::RegionDrained => {
            "once it stays after all, `usmc region drain --undo`, and start the program anew"
        }
        Reason::SwitchedOff => "`usmc on`",
        Reason::NotOnLink => {
            "name the listener's network in `region_nets`, if its host is to be trusted"
        }
        Reason::Uncached => {
            "give the machine the same file as persistent memory instead (virtio-pmem, /dev/dax*): the host or its \
             firmware has this device's memory mapped uncached, which is slower than TCP"
        }
        Reason::Lockdown => {
            "use persistent memory (/dev/dax*) instead, or boot without Secure Boot; see kernel_lockdown(7)"
        }
        Reason::RegionForeign => "make one by `usmc region init`, or take it out of `regions`",
        Reason::RegionVersion => {
            "use one version of uSMC on all machines, and make the region anew while none uses it"
        }
        Reason::RegionClosed => {
            "give it to a group of this user's: in a virtual machine by `usmc region setup`, else by chgrp, chmod g+rw"
        }
        Reason::RegionPages => {
            "make its namespace anew by ndctl with --align=4K: with larger pages a program that switches transparent huge \
             pages off, such as redis, would get SIGBUS"
        }
        Reason::OffersFull | Reason::TableFull => {
            "too many programs share this directory; give some another with --ism-dir"
        }
        Reason::NoSegment => "let UNIX sockets be made in the directory, and a path be shorter",
        Reason::KernelFeature => {
            "switch it off in the program: TCP Fast Open, kTLS, MSG_ZEROCOPY, time stamps, socket filters"
        }
        Reason::PeerBroken => "restart the other end, and use one version of uSMC everywhere",
        Reason::Adopted => "start the program that it came from by `usmc run`, too",
        Reason::PassedOn => "start the program that it was passed to by `usmc run`, too",
        Reason::PeerLeft => "see the reason at the other end (`usmc ss` there)",
        Reason::Unread | Reason::TooMuch => "raise `ring_size`",
        Reason::Uring | Reason::ByUring => "let the program do without: `io_uring = \"deny\"`",
        Reason::PeerSilent => {
            "start the other end by `usmc run`, on a host with the programs of `usmc ebpf load`"
        }
        Reason::NoCommonDevice => "let both ends share an ISM directory (`ism_dir`), or a region",
        Reason::NotHeld => "where addresses are translated, name the other end in `peers`",
        Reason::Declined => "`usmc check --declines` explains the code",
        Reason::Short | Reason::Brief => {
            "if such connections are to change over, too: `change_over = \"at-once\"`"
        }
        // On its way, or over.
        Reason::None | Reason::Pending | Reason::Handshake | Reason::PeerGone => return None,
        // What the program does.
        Reason::Stdio
        | Reason::NoBoundary
        | Reason::ShutDown
        | Reason::Urgent
        | Reason::Lent
        | Reason::Sandboxed
        | Reason::OwnFiles
        | Reason::Interrupted
        | Reason::Forked => return None,
        // What stands between both ends.
        Reason::OptionEchoed => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use usmc::observe::REASONS;

    use super::*;

    /// Those that nobody can do anything about.
    const AS_IT_IS: [Reason; 13] = [
        Reason::Pending,
        Reason::Handshake,
        Reason::PeerGone,
        Reason::Stdio,
        Reason::NoBoundary,
        Reason::ShutDown,
        Reason::Urgent,
        Reason::Lent,
        Reason::Sandboxed,
        Reason::OwnFiles,
        Reason::Interrupted,
        Reason::Forked,
        Reason::OptionEchoed,
    ];

    #[test]
    fn every_reason_has_words_a_remedy_and_a_place_in_the_manual() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/man/usmc-ss.1");
        let page = std::fs::read_to_string(page).expect("the page");
        let mut texts = HashSet::new();
        for reason in all() {
            let text = reason.text();
            assert!(!text.is_empty() && text.len() <= 80 && text.is_ascii(), "{reason:?}: {text}");
            assert!(texts.insert(text), "{reason:?} has another's words");
            assert!((reason as usize) < REASONS, "{reason:?} is not counted apart");
            let remedy = of(reason);
            assert_eq!(remedy.is_none(), AS_IT_IS.contains(&reason), "{reason:?}: {remedy:?}");
            assert!(remedy.is_none_or(|remedy| !remedy.is_empty()), "{reason:?}");
            let item = format!("\n.It {text}");
            assert!(page.contains(&item), "usmc-ss(1) does not explain {text:?}");
        }
        assert!(texts.len() > 40 && of(Reason::None).is_none());
    }

    /// "It says TCP: what now?" has a section for each reason, with its cause, and with what helps in these words.
    #[test]
    fn the_page_for_newcomers_has_every_reason_and_what_helps() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/it-says-tcp.md");
        let page = std::fs::read_to_string(page).expect("the page");
        let sections = page.split("\n### ").skip(1);
        let mut told = HashSet::new();
        for section in sections {
            let section = section.split("\n## ").next().expect("text");
            let (title, text) = section.split_once("\n\n").expect("a title and text");
            let reason = all().find(|reason| reason.text() == title);
            let reason = reason.unwrap_or_else(|| panic!("no reason is called {title:?}"));
            assert!(told.insert(title), "{title} is there twice");
            let (cause, helps) = match text.split_once("**What helps:** ") {
                Some((cause, helps)) => (cause, Some(helps.trim())),
                None => (text, None),
            };
            assert!(cause.trim().len() > 20, "{title} has no cause");
            assert_eq!(helps, of(reason), "{title}");
        }
        assert_eq!(told.len(), all().count());
    }
}
