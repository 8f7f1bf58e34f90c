//! The commands that bring a pair of programs into shared memory.

use std::collections::{BTreeSet, HashMap};

use crate::compose::{self, Container, shell_words};
use crate::steps::call;

use super::pairs::{Pair, Program};

/// Writes them into the pairs.
pub fn fill(pairs: &mut [Pair]) {
    let ids: BTreeSet<String> = pairs
        .iter()
        .flat_map(|pair| [&pair.server, &pair.client])
        .filter_map(|program| program.container.clone())
        .collect();
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let containers = if ids.is_empty() { Vec::new() } else { compose::inspect(&ids) };
    let containers: HashMap<String, Container> =
        containers.into_iter().map(|container| (container.id.clone(), container)).collect();
    for pair in pairs {
        pair.commands = commands(&pair.server, &pair.client, &containers);
    }
}

fn commands(
    server: &Program,
    client: &Program,
    containers: &HashMap<String, Container>,
) -> Vec<String> {
    let is_done = |program: &Program| program.library == Some(true);
    if [server, client].iter().any(|end| end.obstacle.is_some())
        || (is_done(server) && is_done(client))
    {
        return Vec::new();
    }
    let ends = [server, client];
    let mut commands = Vec::new();
    let services: BTreeSet<&str> =
        ends.iter().filter_map(|end| end.service.as_deref()).map(short).collect();
    if !services.is_empty() {
        let services: Vec<&str> = services.into_iter().collect();
        commands.push(format!("usmc enable {}", shell_words(&services)));
    }
    commands.extend(of_containers(&ends, containers));
    let shares = !commands.is_empty();
    let own = ends.iter().filter(|end| end.service.is_none() && end.container.is_none());
    let own: BTreeSet<(&str, Option<u32>)> = own.map(|end| (&*end.program, end.user)).collect();
    for (program, user) in own {
        commands.extend(of_process(program, user, shares, server.user == client.user));
    }
    commands
}

fn short(service: &str) -> &str {
    service.strip_suffix(".service").unwrap_or(service)
}

fn of_containers(ends: &[&Program; 2], containers: &HashMap<String, Container>) -> Vec<String> {
    let ids: Vec<&String> = ends.iter().filter_map(|end| end.container.as_ref()).collect();
    let mut projects: Vec<(&[String], BTreeSet<&str>)> = Vec::new();
    let mut others = 0;
    for id in ids {
        let Some(container) = containers.get(id).filter(|container| !container.files.is_empty())
        else {
            others += 1;
            continue;
        };
        match projects.iter_mut().find(|(files, _)| *files == &*container.files) {
            Some((_, services)) => drop(services.insert(&container.service)),
            None => projects.push((&container.files, BTreeSet::from([&*container.service]))),
        }
    }
    let mut commands = Vec::new();
    for (files, services) in projects {
        let words: Vec<&str> = services.into_iter().collect();
        let (place, others) = compose::place(files);
        commands.push(format!(
            "usmc enable --compose {} {}",
            compose::shell(&place),
            shell_words(&words)
        ));
        if !others.is_empty() {
            let others = others.iter().map(|file| format!("-f {}", compose::shell(file)));
            let others = others.collect::<Vec<_>>().join(" ");
            commands.push(format!(
                "# the project has more files: have {others} in the command that it prints, too"
            ));
        }
    }
    if others > 0 {
        commands.push("# a container that is no compose project's: give it the library and the ISM directory, see docs/containers.md".to_owned());
    }
    commands
}

/// For a program that somebody has started. Beside a service it needs the service's directory, and to be in its group.
fn of_process(program: &str, user: Option<u32>, shares: bool, is_one_user: bool) -> Vec<String> {
    let program = compose::shell(program);
    if shares {
        let name = user.and_then(user_name).unwrap_or_else(|| "USER".to_owned());
        let join = format!("gpasswd --add {name} usmc-default");
        let run = format!("USMC_ISM_DIR=/run/usmc/default usmc run -- {program}");
        return if user == Some(0) { vec![run] } else { vec![join, run] };
    }
    match is_one_user {
        true => vec![format!("usmc run -- {program}")],
        false => vec![format!(
            "USMC_ISM_DIR=DIR usmc run -- {program}   # DIR: of a group that both users are in"
        )],
    }
}

fn user_name(uid: u32) -> Option<String> {
    let line = call("getent", &["passwd", &uid.to_string()]).ok()?;
    line.split(':').next().map(str::to_owned).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(service: Option<&str>, container: Option<&str>, user: u32) -> Program {
        Program {
            program: "app".to_owned(),
            service: service.map(str::to_owned),
            container: container.map(str::to_owned),
            user: Some(user),
            library: Some(false),
            obstacle: None,
        }
    }

    #[test]
    fn each_place_has_its_command() {
        let container = |id: &str, service: &str| Container {
            id: id.to_owned(),
            pid: 1,
            project: "p".to_owned(),
            service: service.to_owned(),
            files: vec!["/srv/p/compose.yaml".to_owned()],
        };
        let known: HashMap<String, Container> = [("a", "api"), ("b", "db")]
            .map(|(id, name)| (id.to_owned(), container(id, name)))
            .into();
        let of = |server: &Program, client: &Program| commands(server, client, &known);
        let (redis, app) = (
            program(Some("redis-server.service"), None, 105),
            program(Some("app.service"), None, 33),
        );
        assert_eq!(of(&redis, &app), ["usmc enable app redis-server"]);
        let odd = program(Some(r"a\x2db;c.service"), None, 33);
        assert_eq!(of(&redis, &odd), [r"usmc enable 'a\x2db;c' redis-server"]);
        let (api, db) = (program(None, Some("a"), 1), program(None, Some("b"), 2));
        assert_eq!(of(&api, &db), ["usmc enable --compose /srv/p/compose.yaml api db"]);
        assert!(of(&api, &program(None, Some("c"), 1))[1].starts_with('#'));
        let (one, other) = (program(None, None, 1), program(None, None, 1));
        assert_eq!(of(&one, &other), ["usmc run -- app"]);
        let root = program(None, None, 0);
        assert_eq!(
            of(&redis, &root),
            ["usmc enable redis-server", "USMC_ISM_DIR=/run/usmc/default usmc run -- app"]
        );
        let go = Program { obstacle: Some("it is Go".to_owned()), ..app.clone() };
        assert_eq!(of(&redis, &go), [""; 0]);
        let done = |end: &Program| Program { library: Some(true), ..end.clone() };
        assert_eq!(of(&done(&redis), &done(&app)), [""; 0]);
        assert_eq!(of(&done(&redis), &app), ["usmc enable app redis-server"]);
    }
}
