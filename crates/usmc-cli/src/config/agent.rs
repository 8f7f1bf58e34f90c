//! The table `[agent]` of a file: what `usmc agent` is told by options otherwise.

use toml::de::{DeTable, DeValue};

use super::file::scalar;
use super::near;

/// Its keys, each with the option of the same meaning. The first one is a list. Then come the names that the kernel's SMC-R had first
/// (`/proc/net/smc`), and those of its settings today below `net.smc` (Documentation/networking/smc-sysctl.rst).
const KEYS: [(&str, &str); 19] = [
    ("devices", "--device"),
    ("socket_mode", "--socket-mode"),
    ("spin", "--spin"),
    ("buffer_size", "--ring-size"),
    ("max_links", "--max-links"),
    ("max_conns", "--max-conns"),
    ("testlink_time", "--testlink-time"),
    ("mtu", "--mtu"),
    ("sndbuf", "--sndbuf"),
    ("rcvbuf", "--rcvbuf"),
    ("ctrl_buffer_count", "--ctrl-buffer-count"),
    ("max_conn_per_lgr", "--max-conns"),
    ("port_add_delay", "--port-add-delay"),
    ("wmem", "--sndbuf"),
    ("rmem", "--rcvbuf"),
    ("smcr_max_send_wr", "--ctrl-buffer-count"),
    ("smcr_max_links_per_lgr", "--max-links"),
    ("smcr_max_conns_per_lgr", "--max-conns"),
    ("smcr_testlink_time", "--testlink-time"),
];

/// What a file says of the agent: options of usmc-agent, with their values.
pub type Agent = Vec<(&'static str, String)>;

/// Reads the table. The agent itself looks at the values.
///
/// # Errors
/// What is wrong with it.
pub fn parse(table: &DeTable<'_>) -> Result<Agent, String> {
    let mut agent = Agent::new();
    for (key, value) in table {
        let name = key.get_ref();
        let Some((_, option)) = KEYS.iter().find(|(known, _)| known == name) else {
            let names = KEYS.map(|(name, _)| name);
            return Err(match near::nearest_of(name, &names) {
                Some(meant) => format!("there is no {name:?}; did you mean {meant}?"),
                None => format!("there is no {name:?}; its keys are {}", names.join(", ")),
            });
        };
        if agent.iter().any(|(said, _)| said == option) {
            return Err(format!("{name:?} has another name there already: keep one"));
        }
        let values = match value.get_ref() {
            DeValue::Array(items) if *option == "--device" => {
                items.iter().map(|item| scalar(item.get_ref())).collect()
            }
            value => scalar(value).map(|one| vec![one]),
        };
        let values = values.ok_or_else(|| match *option {
            "--device" => format!("{name} takes names of RDMA devices, such as [\"mlx5_0\"]"),
            _ => format!("{name} takes one string or whole number"),
        })?;
        agent.extend(values.into_iter().map(|value| (*option, value)));
    }
    Ok(agent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Agent, String> {
        parse(DeTable::parse(text).expect("TOML").get_ref())
    }

    #[test]
    fn keys_become_options() {
        let agent = read("devices = ['a', 'b']\nmax_links = 2\nspin = 'never'").expect("good");
        let has = |option, value: &str| agent.contains(&(option, value.to_owned()));
        assert!(has("--device", "a") && has("--device", "b") && has("--max-links", "2"));
        assert!(has("--spin", "never") && agent.len() == 4);
        let agent = read("smcr_max_conns_per_lgr = 16\nsmcr_testlink_time = 5").expect("good");
        let has = |option, value: &str| agent.contains(&(option, value.to_owned()));
        assert!(has("--max-conns", "16") && has("--testlink-time", "5") && agent.len() == 2);
        let twice = read("max_conns = 16\nsmcr_max_conns_per_lgr = 16");
        assert!(twice.is_err_and(|said| said.contains("keep one")));
        assert!(read("links = 2").is_err_and(|said| said.contains("max_links")));
        assert!(read("max_link = 2").is_err_and(|said| said.contains("did you mean max_links?")));
        let agent = read("sndbuf = '64K'\nrmem = 65536\nctrl_buffer_count = 8\nmtu = 1024");
        let has = |option, value: &str| {
            agent.as_ref().is_ok_and(|agent| agent.contains(&(option, value.to_owned())))
        };
        assert!(has("--sndbuf", "64K") && has("--rcvbuf", "65536") && has("--mtu", "1024"));
        assert!(has("--ctrl-buffer-count", "8"), "{agent:?}");
        assert!(read("sndbuf = 1\nwmem = 1").is_err_and(|said| said.contains("keep one")));
        assert!(read("max_links = [2]").is_err_and(|said| said.contains("one string")));
        assert!(read("devices = [[1]]").is_err_and(|said| said.contains("names")));
    }
}
