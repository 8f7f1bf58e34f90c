//! The end of a link: lost, or deleted by agreement (RFC 7609 section 4;
//! `smc_llc_process_srv_delete_link`, `smc_llc_process_cli_delete_link`).
//!
//! Whoever notices that a link is lost moves its connections and says so over another link: the
//! client by a request that the server sends back, the server by that request itself. The client's
//! answer to it is the end; then the server tries to get a second link again.

use super::{Delayed, Event, Fabric, Flow, LinkGroup, LinkIndex, Role, Time};
use crate::handshake::LLC_TIMEOUT;
use crate::wire::llc::{Body, DeleteLink, DeleteReason};

impl<const RMBS: usize> LinkGroup<RMBS> {
    /// A link is lost on this side: no message went through it any more, or will.
    pub(super) fn lose_link(&mut self, index: LinkIndex, fabric: &mut impl Fabric, now: Time) {
        self.end_flow_over(index, fabric);
        let Some(link) = self.link(index) else { return };
        let (id, was_active) = (link.id, link.active);
        self.drop_link(index, fabric);
        let to = self.any_link();
        if was_active {
            self.events.push(Event::LinkDown { index, to });
        }
        let Some(via) = to else { return self.end() };
        let delete =
            DeleteLink { link_id: id, reason: DeleteReason::LOST_PATH, all: false, orderly: true };
        match self.config.role {
            Role::Client => self.send(via, false, Body::DeleteLink(delete)),
            Role::Server => self.delete_at_client(via, delete, now),
        }
    }

    /// Server: a link with two ports of its own has come, and the client is to delete the one that it replaces.
    pub(super) fn replace_asymmetric(
        &mut self,
        new: LinkIndex,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        let old = self.asymmetric().filter(|old| *old != new);
        let Some((old, id)) = old.and_then(|old| Some((old, self.link(old)?.id))) else { return };
        self.remove(old, fabric);
        let reason = DeleteReason::NO_ASYMMETRIC;
        let request = DeleteLink { link_id: id, reason, all: false, orderly: true };
        self.delete_at_client(new, request, now);
    }

    /// Server: the client is to delete the link, and to say that it has.
    fn delete_at_client(&mut self, via: LinkIndex, request: DeleteLink, now: Time) {
        if !self.is_idle() {
            self.delayed = Some(Delayed::Tell { request });
            return;
        }
        self.send(via, false, Body::DeleteLink(request));
        let victim = request.link_id;
        self.flow = Flow::Delete { via, victim, deadline: now + LLC_TIMEOUT };
    }

    /// A flow that needs the link has failed.
    fn end_flow_over(&mut self, index: LinkIndex, fabric: &mut impl Fabric) {
        match self.flow {
            Flow::First { .. } => {
                self.flow = Flow::Idle;
                self.events.push(Event::FirstLinkFailed);
            }
            Flow::Add { via, new, .. } if via == index || new == index => {
                self.abandon_new_link(new == index, fabric);
            }
            Flow::Announce { via, .. } if via == index => self.on_announced(false),
            Flow::Withdraw { via, .. } if via == index => self.on_withdrawn(false),
            Flow::Delete { via, .. } if via == index => self.flow = Flow::Idle,
            Flow::Request { .. } => self.flow = Flow::Idle,
            _ => {}
        }
    }

    /// The peer's request.
    pub(super) fn on_delete_request(
        &mut self,
        via: LinkIndex,
        request: &DeleteLink,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        if request.all {
            if self.config.role == Role::Server {
                // It comes back to the client that asked for it.
                self.send(via, false, Body::DeleteLink(*request));
            }
            return self.end();
        }
        let victim = self.by_id(request.link_id);
        if victim.is_none() && self.config.role == Role::Server {
            return; // Deleted already: the client has been told, or will be.
        }
        // A new link that the peer gives up ends the flow it is part of.
        if let (Flow::Add { new, .. }, Some(index)) = (self.flow, victim)
            && new == index
        {
            self.abandon_new_link(false, fabric);
            if self.config.role == Role::Client {
                self.answer_delete(via, request, DeleteReason::NONE);
            }
            return;
        }
        if !matches!(self.flow, Flow::Idle | Flow::Request { .. }) {
            if self.delayed.is_none() {
                self.delayed = Some(Delayed::Delete { via, request: *request });
            }
            return;
        }
        self.delete(via, request, fabric, now);
    }

    fn delete(
        &mut self,
        via: LinkIndex,
        request: &DeleteLink,
        fabric: &mut impl Fabric,
        now: Time,
    ) {
        let victim = self.by_id(request.link_id);
        match (self.config.role, victim) {
            (Role::Client, None) => {
                self.answer_delete(via, request, DeleteReason::NO_SUCH_LINK);
            }
            (Role::Client, Some(index)) => {
                self.answer_delete(via, request, DeleteReason::NONE);
                self.remove(index, fabric);
            }
            (Role::Server, None) => {}
            (Role::Server, Some(index)) => {
                self.remove(index, fabric);
                if !self.is_terminated() {
                    self.delete_at_client(via, *request, now);
                }
            }
        }
    }

    fn answer_delete(&mut self, via: LinkIndex, request: &DeleteLink, reason: DeleteReason) {
        self.send(via, true, Body::DeleteLink(DeleteLink { reason, ..*request }));
    }

    fn remove(&mut self, index: LinkIndex, fabric: &mut impl Fabric) {
        let was_active = self.link(index).is_some_and(|link| link.active);
        self.drop_link(index, fabric);
        let to = self.any_link();
        if was_active {
            self.events.push(Event::LinkDown { index, to });
        }
        if to.is_none() {
            self.end();
        }
    }

    /// Server: the client has deleted the link, or does not answer. A second link is tried again.
    pub(super) fn on_delete_response(&mut self, fabric: &mut impl Fabric, now: Time) {
        self.flow = Flow::Idle;
        self.run_delayed(fabric, now);
        let _ = self.try_add_link(None, fabric, now);
    }

    /// What had to wait for the end of a flow.
    pub(super) fn run_delayed(&mut self, fabric: &mut impl Fabric, now: Time) {
        if self.is_terminated() || !self.is_idle() {
            return;
        }
        match self.delayed.take() {
            None => {}
            Some(Delayed::Add) => {
                let _ = self.try_add_link(None, fabric, now);
            }
            Some(Delayed::Delete { via, request }) => {
                // The link that it came over may be gone by now.
                let via = self.link(via).map(|_| via).or(self.any_link());
                if let Some(via) = via {
                    self.delete(via, &request, fabric, now);
                }
            }
            Some(Delayed::Tell { request }) => {
                if let Some(via) = self.any_link() {
                    self.delete_at_client(via, request, now);
                }
            }
        }
    }
}
