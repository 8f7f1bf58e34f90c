//! The workloads that need nothing installed. Client and server are [`super::part`].

mod connect;
mod crowd;
mod exchange;
mod fixed;
mod oversubscribed;

use super::case::Case;
use super::mode::Way;
use super::part::spec::{Address, Role, Spec, Wait};

/// All of them, for these CPUs.
pub fn cases(cpus: &[usize]) -> Vec<Case> {
    let mut cases = exchange::cases(cpus);
    cases.extend(connect::cases());
    cases.extend(crowd::cases());
    cases.extend(fixed::cases(cpus));
    cases.extend(oversubscribed::cases(cpus));
    cases
}

/// Those between two machines.
pub fn between(way: Way) -> Vec<Case> {
    let mut cases = exchange::between();
    if way == Way::Rdma {
        cases.push(connect::by_rdma());
    }
    cases
}

/// Both parts of an exchange; their roles and the address follow.
fn spec(request: usize, answer: usize, chunk: usize, wait: Wait, cpus: Vec<usize>) -> Spec {
    let role = Role::ServeEvents;
    Spec { at: Address::LOCAL, request, answer, chunk, wait, cpus, role }
}
