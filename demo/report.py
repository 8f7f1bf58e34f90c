"""Figures of all rounds, and how they are shown."""

import os
import platform
from dataclasses import dataclass, field
from statistics import median

from workloads import Measure


@dataclass
class Series:
    """The figures of one measure, round by round."""

    measure: Measure
    tcp: list[float] = field(default_factory=list)
    smc: list[float] = field(default_factory=list)

    def add(self, tcp, smc):
        self.tcp.append(tcp)
        self.smc.append(smc)

    def ratios(self):
        return [self.measure.ratio(tcp, smc) for tcp, smc in zip(self.tcp, self.smc)]

    def met(self):
        return median(self.ratios()) >= self.measure.target

    def last(self):
        """The round that was just measured, in a line."""
        unit = self.measure.unit
        return (f"{self.measure.what}: TCP {short(self.tcp[-1])} {unit}, uSMC {short(self.smc[-1])} {unit}, "
                f"ratio {short(self.ratios()[-1])} ×")

    def row(self):
        """This measure's line of the table."""
        measure = self.measure
        verdict = "met" if self.met() else "below target"
        return (f"| {measure.label} | {spread(self.tcp, measure.unit)} | {spread(self.smc, measure.unit)} "
                f"| {spread(self.ratios(), '×')} | ≥ {measure.target:g} ×: {verdict} |")

    def record(self):
        """For programs."""
        measure = self.measure
        return {"label": measure.label, "unit": measure.unit, "lower_is_better": measure.lower_is_better,
                "tcp": self.tcp, "usmc": self.smc, "ratio": self.ratios(), "median_ratio": median(self.ratios()),
                "target": measure.target, "met": self.met()}


def table(series):
    """All measures in Markdown."""
    head = ["| workload | TCP | uSMC | ratio | target |", "|---|---:|---:|---:|---:|"]
    return "\n".join(head + [line.row() for line in series])


def machine():
    """Processor, cores and kernel in a line."""
    model = platform.machine()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}"


def spread(figures, unit):
    return f"{short(median(figures))} {unit} ({short(min(figures))}–{short(max(figures))})"


def short(figure):
    """Three digits that count."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"
