//! The drop-in that brings the library into a service: no more than its own settings make necessary, and nothing that keeps it
//! from starting. What cannot be helped is said.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::config::profiles::Profile;
use crate::library;

use super::reader::{Settings, depth_of, is_yes};
use super::syscalls;

/// What a drop-in is made for.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// The group's name: [`super::group`].
    pub group: &'a str,
    /// The ISM directory.
    pub ism_dir: &'a Path,
    /// What LD_PRELOAD is to say: the library, maybe with `$LIB`.
    pub preload: &'a Path,
    /// The directory around all libraries.
    pub library_dir: &'a Path,
    /// Users that are let into the directory.
    pub users: &'a [String],
    /// What is said where the unit itself says nothing.
    pub profile: Option<&'a Profile>,
}

/// A drop-in, and what is to be known of it.
#[derive(PartialEq, Eq, Debug)]
pub struct DropIn {
    /// The whole file.
    pub text: String,
    /// What the service does not get, or what else is worth knowing.
    pub notes: Vec<String>,
}

/// Begins the line that names the group.
const GROUP: &str = "# group: ";
/// Begins the line that names the users whom this unit needs in the directory.
const USERS: &str = "# users: ";
/// The first words of a drop-in of ours.
const MARK: &str = "# Made by `usmc enable`";

/// What is in the header of a drop-in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Made {
    /// The group's name.
    pub group: String,
    /// Users that are let in for this unit.
    pub users: Vec<String>,
}

/// What a drop-in of ours says about itself; `None`: it is somebody else's.
pub fn made(text: &str) -> Option<Made> {
    let mut lines = text.lines().take_while(|line| line.starts_with('#'));
    lines.next().filter(|first| first.starts_with(MARK))?;
    let header: Vec<&str> = lines.collect();
    let value = |name: &str| header.iter().find_map(|line| line.strip_prefix(name));
    let group = value(GROUP).filter(|group| super::group::is_name(group))?.to_owned();
    let users = value(USERS).unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    Some(Made { group, users })
}

/// The drop-in for a unit with these settings, which are without it. `sets` is [`syscalls::set`].
///
/// # Errors
/// Why the library cannot get into it.
pub fn of(
    settings: &Settings,
    wanted: &Wanted<'_>,
    sets: impl Fn(&str) -> Option<BTreeSet<String>>,
) -> Result<DropIn, String> {
    refusals(settings)?;
    let mut lines = environment(settings, wanted);
    let mut notes = Vec::new();
    if settings.is_on("DynamicUser") {
        lines.push(format!("SupplementaryGroups={}", super::group::unix_name(wanted.group)));
    }
    lines.extend(file_system(settings, wanted, &mut notes));
    if settings.last("ProcSubset") == Some("pid") {
        // Two users' programs tell by the boot_id that they are on one kernel.
        let what =
            "ProcSubset=pid hides which kernel it runs on: to programs of other users it stays TCP";
        notes.push(what.to_owned());
    }
    if is_without_unix(settings) {
        lines.push("RestrictAddressFamilies=AF_UNIX".to_owned());
    }
    let calls = syscalls::additions(settings, sets);
    if !calls.allowed.is_empty() {
        notes.push(format!("its SystemCallFilter= is widened by {}", calls.allowed.join(" ")));
        lines.push(format!("SystemCallFilter={}", calls.allowed.join(" ")));
    }
    if !calls.refused.is_empty() {
        lines.push(format!("SystemCallFilter=~{}", calls.refused.join(" ")));
    }
    if !calls.unknown_sets.is_empty() {
        let sets = calls.unknown_sets.join(" ");
        notes.push(format!(
            "nobody here knows which system calls {sets} has: systemd-analyze does not say"
        ));
    }
    Ok(DropIn { text: text(wanted, &lines), notes })
}

fn text(wanted: &Wanted<'_>, lines: &[String]) -> String {
    let mut text = format!("{MARK}, which writes it anew; `usmc disable` removes it.\n");
    let _ = writeln!(text, "{GROUP}{}", wanted.group);
    if !wanted.users.is_empty() {
        let _ = writeln!(text, "{USERS}{}", wanted.users.join(" "));
    }
    text.push_str("[Service]\n");
    text.push_str(&lines.join("\n"));
    text.push('\n');
    text
}

/// What makes it pointless.
fn refusals(settings: &Settings) -> Result<(), String> {
    let unset = settings.words("UnsetEnvironment");
    let takes = |name: &str| {
        unset
            .iter()
            .any(|word| word == name || word.strip_prefix(name).is_some_and(|v| v.starts_with('=')))
    };
    if takes("LD_PRELOAD") || takes("USMC_ISM_DIR") {
        return Err("its UnsetEnvironment= takes LD_PRELOAD or USMC_ISM_DIR away; remove it there"
            .to_owned());
    }
    let families = settings.words("RestrictAddressFamilies");
    if families.iter().any(|family| family == "none") {
        return Err("RestrictAddressFamilies=none: it makes no connections".to_owned());
    }
    Ok(())
}

fn environment(settings: &Settings, wanted: &Wanted<'_>) -> Vec<String> {
    let own = settings.variable("LD_PRELOAD");
    // What an earlier drop-in of ours has put in front would be there twice.
    let own = own.and_then(|list| library::strip(list.as_ref()));
    let preload = library::prepend(Path::new(&literal(wanted.preload)), own.as_deref());
    let assign =
        |name: &str, value: &str| format!("Environment={}", quoted(&format!("{name}={value}")));
    let ours = [
        assign("LD_PRELOAD", &preload.to_string_lossy()),
        assign("USMC_ISM_DIR", &literal(wanted.ism_dir)),
    ];
    // A drop-in's word counts more than the unit's, and a profile's less.
    let variables = wanted.profile.map(Profile::variables).unwrap_or_default();
    let unsaid = variables.into_iter().filter(|(name, _)| settings.variable(name).is_none());
    let unsaid = unsaid.filter(|(name, _)| *name != "USMC_ISM_DIR");
    let of_profile = unsaid.map(|(name, text)| assign(name, &text.replace('%', "%%")));
    ours.into_iter().chain(of_profile).collect()
}

/// A path of ours, in which nothing is a specifier. The unit's own values may have some.
fn literal(path: &Path) -> String {
    path.to_string_lossy().replace('%', "%%")
}

/// A word of a unit file, which no blank ends.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/=._-:+@,$%".contains(c);
    match word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\"")),
    }
}

/// What the unit's view of the file system lacks. Each path may be missing (`-`): the service starts without.
fn file_system(settings: &Settings, wanted: &Wanted<'_>, notes: &mut Vec<String>) -> Vec<String> {
    let mut lines = Vec::new();
    let (dir, library) = (wanted.ism_dir, wanted.library_dir);
    let path = |path: &Path| quoted(&literal(path));
    for hidden in [dir, library].into_iter().filter(|place| is_inaccessible(settings, place)) {
        notes.push(format!("InaccessiblePaths= hides {}: it stays TCP", hidden.display()));
    }
    for (key, place) in [("NoExecPaths", library), ("ReadOnlyPaths", dir)] {
        if settings.paths(key).iter().any(|path| path == place) {
            // Of one path's two settings the stricter counts.
            notes.push(format!("{key}= names {}: it stays TCP", place.display()));
        }
    }
    if is_elsewhere(settings) || is_covered(settings, dir) {
        lines.push(format!("BindPaths=-{}", path(dir)));
    }
    if is_elsewhere(settings) || is_covered(settings, library) {
        lines.push(format!("BindReadOnlyPaths=-{}", path(library)));
    }
    if is_read_only(settings, dir) {
        lines.push(format!("ReadWritePaths=-{}", path(dir)));
    }
    if is_not_executable(settings, library) {
        lines.push(format!("ExecPaths=-{}", path(library)));
    }
    lines
}

/// It has a root directory of its own.
fn is_elsewhere(settings: &Settings) -> bool {
    let has = |key| settings.last(key).is_some_and(|value| value != "/");
    has("RootDirectory") || has("RootImage")
}

fn is_inaccessible(settings: &Settings, place: &Path) -> bool {
    depth_of(place, &settings.paths("InaccessiblePaths")).is_some()
}

/// An empty file system or another directory stands in its place.
fn is_covered(settings: &Settings, place: &Path) -> bool {
    let below = |dirs: &[&str]| dirs.iter().any(|dir| place.starts_with(dir));
    let homes = ["/home", "/root", "/run/user"];
    let no_homes = settings.last("ProtectHome").is_some_and(|v| is_yes(v) || v == "tmpfs");
    let is_private = settings.is_on("PrivateTmp") || settings.is_on("DynamicUser");
    depth_of(place, &settings.paths("TemporaryFileSystem")).is_some()
        || (no_homes && below(&homes))
        || (is_private && below(&["/tmp", "/var/tmp"]))
}

fn is_read_only(settings: &Settings, place: &Path) -> bool {
    // DynamicUser= implies `strict`.
    let strict = settings.last("ProtectSystem") == Some("strict") || settings.is_on("DynamicUser");
    let read_only = depth_of(place, &settings.paths("ReadOnlyPaths")).or(strict.then_some(0));
    let writable = depth_of(place, &settings.paths("ReadWritePaths"));
    // Of nested paths the inner one counts.
    read_only.is_some_and(|at| writable.is_none_or(|inner| inner < at))
}

fn is_not_executable(settings: &Settings, place: &Path) -> bool {
    let forbidden = depth_of(place, &settings.paths("NoExecPaths"));
    let allowed = depth_of(place, &settings.paths("ExecPaths"));
    forbidden.is_some_and(|at| allowed.is_none_or(|inner| inner < at))
}

/// Programs hand memory over by UNIX sockets.
fn is_without_unix(settings: &Settings) -> bool {
    let mut is_allow_list = None;
    let mut listed = false;
    for assignment in settings.assigned("RestrictAddressFamilies") {
        let (inverted, names) = match assignment.value.strip_prefix('~') {
            Some(names) => (true, names),
            None => (false, &*assignment.value),
        };
        // The first assignment says which kind of list it is.
        let allows = *is_allow_list.get_or_insert(!inverted);
        if names.split_whitespace().any(|name| name == "AF_UNIX" || name == "AF_LOCAL") {
            listed = inverted != allows;
        }
    }
    is_allow_list.is_some_and(|allows| listed != allows)
}

/// The directory around a library and, where LD_PRELOAD has `$LIB`, around all of them.
pub fn directory_of(preload: &Path) -> PathBuf {
    let parts = preload.components().take_while(|part| part.as_os_str() != "$LIB");
    let dir: PathBuf = parts.collect();
    if dir == preload { preload.parent().unwrap_or(Path::new("/")).to_owned() } else { dir }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::profiles;

    /// A drop-in's lines behind its header, and its notes.
    fn made_for(unit: &str) -> (Vec<String>, Vec<String>) {
        by(unit, "/usr/lib/usmc/libusmc_preload.so").expect("a drop-in")
    }

    fn by(unit: &str, preload: &str) -> Result<(Vec<String>, Vec<String>), String> {
        with(unit, preload, None)
    }

    fn with(
        unit: &str,
        preload: &str,
        profile: Option<&Profile>,
    ) -> Result<(Vec<String>, Vec<String>), String> {
        let preload = Path::new(preload);
        let wanted = Wanted {
            group: "web",
            ism_dir: Path::new("/run/usmc/web"),
            preload,
            library_dir: &directory_of(preload),
            users: &["www-data".to_owned()],
            profile,
        };
        let sets = |name: &str| {
            let all = syscalls::NEEDED.into_iter().chain(syscalls::OPTIONAL.map(|(name, _)| name));
            let names: Vec<&str> = match name {
                "@default" => vec![],
                "@system-service" => all.filter(|name| *name != "pidfd_getfd").collect(),
                "@privileged" => vec!["fchownat"],
                "@resources" => vec!["mbind"],
                _ => return None,
            };
            Some(names.into_iter().map(str::to_owned).collect())
        };
        let drop_in = of(&Settings::of([&*format!("[Service]\n{unit}")]), &wanted, sets)?;
        let header = made(&drop_in.text).expect("a header that is read");
        assert_eq!((&*header.group, &*header.users), ("web", &["www-data".to_owned()][..]));
        let lines = drop_in.text.lines().skip_while(|line| *line != "[Service]").skip(1);
        Ok((lines.map(str::to_owned).collect(), drop_in.notes))
    }

    const PLAIN: [&str; 2] = [
        "Environment=LD_PRELOAD=/usr/lib/usmc/libusmc_preload.so",
        "Environment=USMC_ISM_DIR=/run/usmc/web",
    ];

    /// What a unit gets besides the two variables.
    fn more(unit: &str) -> Vec<String> {
        let (lines, _) = made_for(unit);
        assert_eq!(lines[..2], PLAIN);
        lines[2..].to_vec()
    }

    #[test]
    fn a_profile_says_what_the_unit_does_not() {
        let keys = [("busy_poll_us", "5"), ("ring_size", "65536"), ("ism_dir", "/a")];
        let profile = profiles::tests::made("mine", &keys);
        let lines = |unit: &str| {
            let (lines, _) =
                with(unit, "/usr/lib/usmc/libusmc_preload.so", Some(&profile)).expect("a drop-in");
            assert_eq!(lines[..2], PLAIN);
            lines[2..].to_vec()
        };
        let (name, ring) = ("Environment=USMC_PROFILE=mine", "Environment=USMC_RING_SIZE=65536");
        assert_eq!(lines(""), [name, "Environment=USMC_BUSY_POLL_US=5", ring]);
        assert_eq!(lines("Environment=A=b USMC_BUSY_POLL_US=7\n"), [name, ring]);
    }

    // Debian 12's services, by those of their settings that matter.

    #[test]
    fn redis_server() {
        let unit = "User=redis\nProtectSystem=strict\nReadWritePaths=-/var/lib/redis\n\
            PrivateTmp=true\nPrivateUsers=true\nProtectHome=true\nMemoryDenyWriteExecute=true\n\
            ProtectProc=invisible\nRemoveIPC=true\n\
            RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX\n\
            SystemCallFilter=@system-service\nSystemCallFilter=~ @privileged @resources\n\
            ReadWriteDirectories=-/etc/redis\nNoExecPaths=/\n\
            ExecPaths=/usr/bin/redis-server /usr/lib /lib\n";
        let lines =
            ["ReadWritePaths=-/run/usmc/web", "SystemCallFilter=~fchownat:EPERM pidfd_getfd:EPERM"];
        assert_eq!(more(unit), lines);
        let (lines, notes) = by(unit, "/usr/local/lib/usmc/$LIB/libusmc_preload.so").unwrap();
        assert_eq!(lines[0], "Environment=LD_PRELOAD=/usr/local/lib/usmc/$LIB/libusmc_preload.so");
        assert_eq!(lines[3], "ExecPaths=-/usr/local/lib/usmc");
        assert_eq!(notes, Vec::<String>::new());
    }

    #[test]
    fn nginx_and_postgresql() {
        assert_eq!(more("Type=forking\nPIDFile=/run/nginx.pid\nKillMode=mixed\n"), [""; 0]);
        let postgresql =
            "Type=forking\nExecStart=-/usr/bin/pg_ctlcluster %i start\nOOMScoreAdjust=-900\n";
        assert_eq!(more(postgresql), [""; 0]);
    }

    #[test]
    fn memcached() {
        let unit = "PrivateTmp=true\nProtectSystem=full\nPrivateDevices=true\n\
            CapabilityBoundingSet=CAP_SETGID CAP_SETUID CAP_SYS_RESOURCE\n\
            RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX\nMemoryDenyWriteExecute=true\n";
        assert_eq!(more(unit), [""; 0]);
    }

    #[test]
    fn each_restriction_is_answered() {
        let dir = "/run/usmc/web";
        for (unit, line) in [
            ("ReadOnlyPaths=/run\n", format!("ReadWritePaths=-{dir}")),
            ("TemporaryFileSystem=/run:ro\n", format!("BindPaths=-{dir}")),
            ("TemporaryFileSystem=/usr\n", "BindReadOnlyPaths=-/usr/lib/usmc".to_owned()),
            ("NoExecPaths=/\n", "ExecPaths=-/usr/lib/usmc".to_owned()),
            ("NoExecPaths=/usr/lib\nExecPaths=/usr\n", "ExecPaths=-/usr/lib/usmc".to_owned()),
            ("RestrictAddressFamilies=AF_INET\n", "RestrictAddressFamilies=AF_UNIX".to_owned()),
            ("RestrictAddressFamilies=~AF_UNIX\n", "RestrictAddressFamilies=AF_UNIX".to_owned()),
            ("SystemCallFilter=~memfd_create\n", "SystemCallFilter=memfd_create".to_owned()),
        ] {
            assert_eq!(more(unit), [line], "{unit}");
        }
        for unit in [
            "ReadOnlyPaths=/run\nReadWritePaths=/run/usmc\n",
            "RestrictAddressFamilies=~AF_INET AF_UNIX\nRestrictAddressFamilies=AF_UNIX\n",
            "RestrictAddressFamilies=AF_INET\nRestrictAddressFamilies=\n",
            "RootDirectory=/\n",
        ] {
            assert_eq!(more(unit), [""; 0], "{unit}");
        }
        let own_root = more("RootDirectory=/srv/a\n");
        assert_eq!(own_root, ["BindPaths=-/run/usmc/web", "BindReadOnlyPaths=-/usr/lib/usmc"]);
        let dynamic = more("DynamicUser=yes\n");
        assert_eq!(dynamic, ["SupplementaryGroups=usmc-web", "ReadWritePaths=-/run/usmc/web"]);
        let (_, notes) = made_for("InaccessiblePaths=-/run/usmc\n");
        assert!(notes[0].contains("stays TCP"), "{notes:?}");
        let (_, notes) = made_for("ProcSubset=pid\n");
        assert!(notes[0].contains("stays TCP"), "{notes:?}");
        let (_, notes) = made_for("NoExecPaths=/usr/lib/usmc\n");
        assert!(notes[0].contains("stays TCP"), "{notes:?}");
        let home = by("ProtectHome=yes\n", "/home/a/libusmc_preload.so").unwrap().0;
        assert_eq!(home[2..], ["BindReadOnlyPaths=-/home/a"]);
    }

    #[test]
    fn what_the_unit_preloads_stays_behind_ours() {
        let (lines, _) =
            made_for("Environment=\"LD_PRELOAD=/usr/lib/libjemalloc.so.2 /x%%y.so\"\n");
        assert_eq!(
            lines[0],
            "Environment=LD_PRELOAD=/usr/lib/usmc/libusmc_preload.so:/usr/lib/libjemalloc.so.2:/x%%y.so"
        );
        assert!(by("UnsetEnvironment=A LD_PRELOAD\n", "/x.so").is_err());
        assert!(by("RestrictAddressFamilies=none\n", "/x.so").is_err());
    }

    #[test]
    fn somebody_elses_drop_in_is_known() {
        assert_eq!(made("[Service]\n# group: web\n"), None);
        assert_eq!(made(&format!("{MARK}.\n# group: ../x\n")), None);
        assert_eq!(directory_of(Path::new("/a/$LIB/x.so")), Path::new("/a"));
        assert_eq!(directory_of(Path::new("/a/b/x.so")), Path::new("/a/b"));
    }
}
