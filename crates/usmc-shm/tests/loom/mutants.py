#!/usr/bin/env python3
"""Are the models any good? Weakens every ordering of the protocols, one at a time, in a copy of the crate,
and lists those whose absence no model notices.

Two in span.rs are known to survive: loom never lets a later store overtake an earlier access, which is what
the Acquire in `begin_tcp_send` forbids; and nothing modelled reads the boundary after `is_ring`.

    python3 crates/usmc-shm/tests/loom/mutants.py [FILE…]        e.g. ring.rs; all protocol files if none
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
FILES = sys.argv[1:] or ["ring.rs", "ring/window.rs", "ring/sleep.rs", "bell.rs", "span.rs", "handshake.rs", "lock.rs", "region/units.rs"]
WEAKER = {"Acquire": ["Relaxed"], "Release": ["Relaxed"], "AcqRel": ["Acquire", "Release"]}


def mutants(text):
    """(line number, description, mutated text) of every weakening."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.lstrip().startswith(("//", "use ")):
            continue
        for site in re.finditer(r"fence\(SeqCst\);|\b(?:Acquire|Release|AcqRel)\b", line):
            word = site.group()
            for weaker in WEAKER.get(word, [""]):
                changed = line[: site.start()] + path(weaker) + line[site.end() :]
                mutated = lines[:number] + [changed] + lines[number + 1 :]
                yield number + 1, f"{word} → {weaker or 'nothing'}", "\n".join(mutated)


def path(ordering):
    return ordering and f"crate::sync::Ordering::{ordering}"


def survives(copy, target):
    env = dict(os.environ, RUSTFLAGS="--cfg loom -Awarnings", RUST_BACKTRACE="0", CARGO_TARGET_DIR=target)
    env["CARGO_PROFILE_RELEASE_LTO"] = "off"
    run = ["cargo", "test", "-q", "-p", "usmc-shm", "--release", "--test", "loom"]
    built = subprocess.run(run + ["--no-run"], cwd=copy, env=env, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"a mutant does not compile:\n{built.stderr}")
    try:
        tested = subprocess.run(run, cwd=copy, env=env, capture_output=True, timeout=300)
    except subprocess.TimeoutExpired:
        return False
    return tested.returncode == 0


def main():
    survivors = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy, target = Path(scratch, "copy"), str(Path(scratch, "target"))
        ignore = shutil.ignore_patterns("target", ".git")
        shutil.copytree(ROOT, copy, ignore=ignore)
        for name in FILES:
            path = copy / "crates/usmc-shm/src" / name
            original = path.read_text()
            for number, what, text in mutants(original):
                path.write_text(text)
                alive = survives(copy, target)
                survivors += alive
                print(f"{'SURVIVES' if alive else 'found   '} {name}:{number} {what}", flush=True)
            path.write_text(original)
    print(f"{survivors} survive")


main()
