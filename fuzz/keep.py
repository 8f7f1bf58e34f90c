"""Copies the inputs that together reach the most code: keep.py CONTROL-FILE FOLDER (libFuzzer's -merge_control_file).

At most 64, each with what those before it do not reach, and the smaller of two that reach as much.
"""

import shutil
import sys
from pathlib import Path

MOST = 64


def main(control: str, folder: str) -> None:
    lines = Path(control).read_text().splitlines()
    count = int(lines[0])
    files = lines[2 : 2 + count]
    reached: dict[str, set[str]] = {}
    for line in lines[2 + count :]:
        kind, index, *features = line.split()
        if kind == "FT":
            reached[files[int(index)]] = set(features)
    size = {file: Path(file).stat().st_size for file in reached}
    all_of_them = len(set().union(*reached.values()))
    known: set[str] = set()
    kept = 0
    while kept < MOST and reached:
        best = max(reached, key=lambda file: (len(reached[file] - known), -size[file]))
        new = reached.pop(best) - known
        if not new:
            break
        known |= new
        shutil.copy(best, folder)
        kept += 1
    print(f"{kept} inputs kept, {len(known)} of {all_of_them} places reached")


main(*sys.argv[1:])
