//! `usmc export`: what it copies runs where it was copied to, and what was there before is not written to.

mod support;

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use support::*;

const NAME: &str = "libusmc_preload.so";

/// A directory with `usmc` and libraries beside it, as an image has it.
fn image(dir: &TempDir, library: &str) -> std::path::PathBuf {
    let image = dir.path().join("image");
    fs::create_dir_all(image.join("lib/i386-linux-gnu")).expect("a directory");
    let usmc = image.join("usmc");
    if !usmc.exists() {
        dir.usmc_at("image/usmc");
    }
    fs::write(image.join(NAME), library).expect("a file");
    fs::write(image.join("lib/i386-linux-gnu").join(NAME), "narrow").expect("a file");
    usmc
}

fn export(usmc: &Path, to: &Path) -> String {
    let mut command = clean(usmc.to_str().expect("UTF-8"));
    let output = output(command.arg("export").arg(to));
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

#[test]
fn both_libraries_and_the_command_are_copied() {
    let dir = TempDir::new();
    let (usmc, to) = (image(&dir, "wide"), dir.path().join("a/b"));
    let said = export(&usmc, &to);
    for (name, text) in [
        (NAME, "wide"),
        ("lib/i386-linux-gnu/libusmc_preload.so", "narrow"),
        ("lib32/libusmc_preload.so", "narrow"),
        ("lib/x86_64-linux-gnu/libusmc_preload.so", "wide"),
        ("lib/libusmc_preload.so", "wide"),
        ("lib64/libusmc_preload.so", "wide"),
        ("$LIB/libusmc_preload.so", "wide"),
    ] {
        assert_eq!(fs::read_to_string(to.join(name)).expect(name), text, "{name}");
    }
    assert_eq!(said.lines().last(), to.join("usmc").to_str(), "{said}");
    let mode = fs::metadata(to.join("usmc")).expect("the copy").permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    // The copy copies itself.
    let again = dir.path().join("c");
    export(&to.join("usmc"), &again);
    assert_eq!(fs::read_to_string(again.join("lib32").join(NAME)).expect("it"), "narrow");
}

#[test]
fn who_has_the_old_library_open_keeps_it() {
    let dir = TempDir::new();
    let to = dir.path().join("to");
    let usmc = image(&dir, "old");
    export(&usmc, &to);
    fs::write(to.join("other"), "theirs").expect("a file");
    let mut old = File::open(to.join(NAME)).expect("the old one");
    image(&dir, "new");
    export(&usmc, &to);
    let mut text = String::new();
    old.read_to_string(&mut text).expect("the old one");
    assert_eq!(
        (text.as_str(), fs::read_to_string(to.join(NAME)).expect("it").as_str()),
        ("old", "new")
    );
    let mut names: Vec<_> = fs::read_dir(&to)
        .expect("it")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    assert_eq!(names, ["$LIB", "lib", "lib32", "lib64", NAME, "other", "usmc"]);
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let dir = TempDir::new();
    let usmc = image(&dir, "wide");
    let file = dir.path().join("file");
    fs::write(&file, "").expect("a file");
    let mut command = clean(usmc.to_str().expect("UTF-8"));
    let output = output(command.arg("export").arg(&file));
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("mount a volume there"), "{}", stderr(&output));
}

/// A directory may be a user's, and the command root's, as in an init container.
#[test]
fn links_of_others_are_not_followed() {
    let dir = TempDir::new();
    let usmc = image(&dir, "wide");
    let (theirs, to) = (dir.path().join("theirs"), dir.path().join("to"));
    for made in [&theirs, &to] {
        fs::create_dir(made).expect("a directory");
    }
    fs::set_permissions(&theirs, fs::Permissions::from_mode(0o700)).expect("chmod");
    std::os::unix::fs::symlink(&theirs, to.join("lib")).expect("a link");
    let mut command = clean(usmc.to_str().expect("UTF-8"));
    let output = output(command.arg("export").arg(&to));
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let mode = fs::metadata(&theirs).expect("it").permissions().mode();
    assert_eq!((mode & 0o777, fs::read_dir(&theirs).expect("it").count()), (0o700, 0));
}
