#!/usr/bin/env python3
"""sockperf, redis and nginx over TCP and over uSMC, in turn, and a table of both.

Each run over uSMC is looked at with `usmc ss` while it is under load: it counts only if its connections
really were in shared memory.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import report
from host import Failure, World, cores, prepare
from workloads import workloads

TCP, SMC = False, True


def main():
    try:
        usable = cores()
        options = parse(list(workloads(usable)))
        prepare()
        return demo(options, len(usable))
    except (Failure, OSError) as failure:
        print(f"demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; everything it started is stopped and removed", file=sys.stderr)
        return 1


def parse(known):
    names = {workload.name: workload for workload in known}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Workloads: {', '.join(names)}. Exit status: 0 if everything ran and was proved to be over "
               "shared memory, 1 if not. A missed target is said, and is no failure.")
    parser.add_argument("--rounds", type=positive, help="runs of each kind per workload (default 5, quick 2)")
    parser.add_argument("--only", metavar="NAME", choices=names, action="append",
                        help="only this workload; may be given several times")
    parser.add_argument("--quick", action="store_true", help="runs of half the length")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there as well")
    options = parser.parse_args()
    options.workloads = [names[name] for name in dict.fromkeys(options.only or names)]
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.seconds = 1 if options.quick else 2
    return options


def positive(text):
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def demo(options, usable):
    """Runs the workloads, shows the figures and returns the exit status."""
    print(f"Machine: {report.machine()}")
    if usable < 2:
        print("One core only: the workloads for two cores are left out.")
    if os.getloadavg()[0] > usable / 2:
        print("Other programs are busy on this machine: expect noise.")
    results, failed = {}, []
    for workload in options.workloads:
        try:
            results[workload.name] = measure(workload, options)
        except Failure as failure:
            progress("")
            print(f"demo: {workload.name}: {failure}", file=sys.stderr)
            failed.append(workload.name)
    if results:
        print(f"\n{report.table([line for lines in results.values() for line in lines])}\n")
        print(f"Median (lowest–highest) of {options.rounds} rounds (`Connection: close`: three times as many); a ratio "
              f"is within one round. Machine: {report.machine()}.\n`usmc ss` saw every run of the table under "
              "load: over uSMC in shared memory, over TCP not.")
    if options.json:
        save(options, results, failed)
    if failed:
        again = " ".join(f"--only {name}" for name in failed)
        print(f"demo: failed, see above: {', '.join(failed)}. Once more: python3 demo/demo.py {again}",
              file=sys.stderr)
    return 1 if failed else 0


def measure(workload, options):
    """All rounds of one workload, TCP first in one round and uSMC first in the next."""
    print(f"\n{workload.name}{f' ({workload.note})' if workload.note else ''}")
    series = [report.Series(measure) for measure in workload.measures]
    rounds = options.rounds * workload.often
    for number in range(1, rounds + 1):
        figures = {}
        for smc in (TCP, SMC) if number % 2 else (SMC, TCP):
            progress(f"{workload.name}: round {number} of {rounds}, {'uSMC' if smc else 'TCP'}")
            with World(smc) as world:
                figures[smc] = workload.run(world, options.seconds)
            if smc:
                proof = world.proof
        progress("")
        for line, tcp, smc in zip(series, figures[TCP], figures[SMC]):
            line.add(tcp, smc)
            print(f"  round {number}, {line.last()}")
        print(f"  {proof}", flush=True)
    return series


def progress(text):
    """A passing line on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def save(options, results, failed):
    record = {"machine": report.machine(), "rounds": options.rounds, "seconds": options.seconds,
              "workloads": {name: [line.record() for line in lines] for name, lines in results.items()},
              "failed": failed}
    options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
