//! What the engine looks at when it is time, and which queue pair is whose: the cost of a message does not depend on how many
//! connections and groups there are.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;
use smc_proto::link_group::{LinkIndex, Time};

use crate::buffers::Buffers;
use crate::connection::ConnId;
use crate::engine::Engine;
use crate::groups::GroupIndex;
use crate::nic::QpId;

#[derive(Debug, Default)]
pub(crate) struct Timers {
    /// Connections with a deadline.
    conns: BTreeSet<(Time, ConnId)>,
    /// Groups, each with the earliest time that it can have something to do. Messages put that off, and are not noted here.
    groups: BTreeSet<(Time, GroupIndex)>,
    /// When the first group has been without a connection for long enough.
    idle: Option<Time>,
    /// Links over which something could not be posted.
    broken: Vec<QpId>,
    /// The earliest of all these.
    next: Option<Time>,
    /// Whose a queue pair is.
    owners: FxHashMap<QpId, (GroupIndex, LinkIndex)>,
}

impl Timers {
    pub(crate) fn next(&self) -> Option<Time> {
        self.next
    }

    /// Each change of what may be due ends with this.
    fn changed(&mut self) {
        let broken = (!self.broken.is_empty()).then_some(Time::ZERO);
        let conns = self.conns.first().map(|(due, _)| *due);
        let groups = self.groups.first().map(|(due, _)| *due);
        self.next = broken.into_iter().chain(conns).chain(groups).chain(self.idle).min();
    }

    pub(crate) fn pop_conn(&mut self, now: Time) -> Option<ConnId> {
        self.conns.first().filter(|(due, _)| *due <= now)?;
        let conn = self.conns.pop_first().map(|(_, conn)| conn);
        self.changed();
        conn
    }

    pub(crate) fn pop_group(&mut self, now: Time) -> Option<GroupIndex> {
        self.groups.first().filter(|(due, _)| *due <= now)?;
        let group = self.groups.pop_first().map(|(_, group)| group);
        self.changed();
        group
    }

    pub(crate) fn pop_broken(&mut self) -> Option<QpId> {
        let qp = self.broken.pop();
        self.changed();
        qp
    }

    pub(crate) fn is_broken(&mut self, qp: QpId) {
        if !self.broken.contains(&qp) {
            self.broken.push(qp);
            self.changed();
        }
    }

    /// Whether a group has been without a connection for long enough.
    pub(crate) fn is_idle(&self, now: Time) -> bool {
        self.idle.is_some_and(|idle| idle <= now)
    }

    pub(crate) fn set_conn(&mut self, conn: ConnId, from: Option<Time>, to: Option<Time>) {
        if let Some(from) = from {
            self.conns.remove(&(from, conn));
        }
        if let Some(to) = to {
            self.conns.insert((to, conn));
        }
        self.changed();
    }

    pub(crate) fn set_group(&mut self, group: GroupIndex, from: Option<Time>, to: Option<Time>) {
        if let Some(from) = from {
            self.groups.remove(&(from, group));
        }
        if let Some(to) = to {
            self.groups.insert((to, group));
        }
        self.changed();
    }
}

impl<B: Buffers> Engine<B> {
    pub(crate) fn by_qp(&self, qp: QpId) -> Option<(GroupIndex, LinkIndex)> {
        self.timers.owners.get(&qp).copied()
    }

    /// A connection's next deadline.
    pub(crate) fn set_deadline(&mut self, conn: ConnId, deadline: Option<Time>) {
        if let Some(known) = self.conns.get_mut(conn) {
            let before = std::mem::replace(&mut known.deadline, deadline);
            self.timers.set_conn(conn, before, deadline);
        }
    }

    /// Connections have come to groups, or left them.
    pub(crate) fn look_at_idle(&mut self) {
        self.timers.idle = self.known.next_timeout();
        self.timers.changed();
    }

    /// A group's links and deadlines may be others.
    pub(crate) fn look_at_group(&mut self, at: GroupIndex) {
        let Some(Some(group)) = self.groups.get_mut(at.number()) else { return };
        for index in LinkIndex::ALL {
            let link = group.link(index);
            let (qp, is_broken) =
                (link.map(|link| link.qp), link.is_some_and(|link| link.is_broken));
            if let Some(qp) = qp.filter(|_| is_broken) {
                self.timers.is_broken(qp);
            }
            let Some(listed) = group.listed.get_mut(index.number()) else { continue };
            if *listed != qp {
                // The number may be another link's by now.
                if let Some(gone) = std::mem::replace(listed, qp)
                    && self.timers.owners.get(&gone) == Some(&(at, index))
                {
                    self.timers.owners.remove(&gone);
                }
                if let Some(qp) = qp {
                    self.timers.owners.insert(qp, (at, index));
                }
            }
        }
        let due = group.next_timeout();
        if due.is_some_and(|due| group.due.is_none_or(|before| due < before)) {
            self.timers.set_group(at, group.due, due);
            group.due = due;
        }
    }

    /// RMBs of a group are to be withdrawn, which begins with the next [`Engine::handle_timeout`]: nothing can be sent here.
    pub(crate) fn look_at_rmbs(&mut self, at: GroupIndex) {
        let Some(Some(group)) = self.groups.get_mut(at.number()) else { return };
        let is_idle = group.llc.as_ref().is_some_and(|flows| flows.is_idle());
        if is_idle && group.to_withdraw().is_some() {
            self.timers.set_group(at, group.due, Some(Time::ZERO));
            group.due = Some(Time::ZERO);
        }
    }

    /// A group is gone.
    pub(crate) fn forget_group(
        &mut self,
        at: GroupIndex,
        listed: &[Option<QpId>],
        due: Option<Time>,
    ) {
        for qp in listed.iter().flatten() {
            if self.timers.owners.get(qp).is_some_and(|owner| owner.0 == at) {
                self.timers.owners.remove(qp);
            }
        }
        self.timers.set_group(at, due, None);
        self.look_at_idle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_deadline_is_next_and_a_broken_link_does_not_wait() {
        let mut timers = Timers::default();
        let at = Time::from_secs;
        assert_eq!(timers.next(), None);
        timers.set_group(GroupIndex(3), None, Some(at(30)));
        timers.set_conn(ConnId(7), None, Some(at(6)));
        assert_eq!(timers.next(), Some(at(6)));
        timers.set_conn(ConnId(7), Some(at(6)), Some(at(40)));
        assert_eq!((timers.next(), timers.pop_conn(at(39))), (Some(at(30)), None));
        assert_eq!(
            (timers.pop_group(at(30)), timers.pop_group(at(30))),
            (Some(GroupIndex(3)), None)
        );
        timers.is_broken(QpId(1));
        timers.is_broken(QpId(1));
        assert_eq!((timers.next(), timers.pop_broken()), (Some(Time::ZERO), Some(QpId(1))));
        assert_eq!((timers.pop_broken(), timers.next()), (None, Some(at(40))));
    }
}
