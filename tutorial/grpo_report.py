"""What the main process of the GRPO demo keeps of a run, as a live line, a summary, and a plot. Knows no queue."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

MIB = 1 << 20
SMOOTH = 50
_FIRST = slice(0, 10)


@dataclasses.dataclass
class History:
    """Reports of the trainer, one per training step, and the course of unit memory.

    Attributes:
        reports: dicts with `at` (monotonic seconds), `samples` (so far), `level`, and means over the samples of the
            step: `reward`, `lag` (versions between sampling and training), `entropy`, `scale`.
        memory: (monotonic seconds, bytes in the memory of all units).
    """

    reports: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Time between the first and the last training step."""
        return float(self.reports[-1]["at"] - self.reports[0]["at"]) if self.reports else 0.0

    @property
    def peak(self) -> int:
        """Most bytes seen in unit memory."""
        return max((size for _, size in self.memory), default=0)

    def mean(self, name: str, steps: slice = slice(-SMOOTH, None)) -> float:
        """Mean of a reported number over some steps, by default the latest."""
        values = [report[name] for report in self.reports[steps]]
        return float(sum(values) / max(len(values), 1))

    def smooth(self, name: str) -> list[float]:
        """A reported number after every step, as the mean of the latest steps."""
        return [self.mean(name, slice(max(0, end - SMOOTH), end)) for end in range(1, len(self.reports) + 1)]

    def rate(self, steps: slice = slice(-SMOOTH, None)) -> float:
        """Samples per second that were trained on during some steps, by default the latest."""
        first, *_, last = self.reports[steps] * 2
        return float((last["samples"] - first["samples"]) / max(last["at"] - first["at"], 1e-9))

    def line(self) -> str:
        """The present state in a few words; there must be a report."""
        used = self.memory[-1][1] if self.memory else 0
        level = self.reports[-1]["level"]
        return (
            f"reward {self.mean('reward'):.3f} at level {level} | {self.rate():,.0f} samples/s | "
            f"lag {self.mean('lag'):.1f} | units {used / MIB:.1f} MiB"
        )

    def summary(self) -> str:
        """The whole run in a few lines."""
        if not self.reports:
            return "no training step was finished; unit memory 0.0 MiB at the peak"
        last = self.reports[-1]
        return (
            f"mean reward   {self.mean('reward', _FIRST):.3f} at the start, {self.mean('reward'):.3f} at the end, "
            f"{max(self.smooth('reward')):.3f} at best; operands up to {last['level']}\n"
            f"entropy       {self.mean('entropy', _FIRST):.2f} at the start, {self.mean('entropy'):.2f} at the end\n"
            f"hidden states {self.mean('scale', _FIRST):.2f} at the start, {self.mean('scale'):.2f} at the end "
            f"(root mean square)\n"
            f"samples       {last['samples']:,} in {len(self.reports):,} steps and {self.seconds:.1f} s: "
            f"{self.rate(slice(None)):,.0f} samples/s\n"
            f"policy lag    {self.mean('lag', slice(None)):.2f} versions on average, "
            f"{max(report['lag'] for report in self.reports):.2f} at most\n"
            f"unit memory   {self.peak / MIB:.1f} MiB at the peak"
        )


def plot(history: History, path: str) -> None:
    """Draws reward and unit memory over time into a PNG file; does nothing before the first training step."""
    if not history.reports:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    zero = history.reports[0]["at"]
    when = [report["at"] - zero for report in history.reports]
    raw = [report["reward"] for report in history.reports]
    with pyplot.rc_context(
        {
            "font.size": 11,
            "axes.grid": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.alpha": 0.25,
            "legend.framealpha": 0.9,
        }
    ):
        figure, (top, bottom) = pyplot.subplots(
            2, 1, sharex=True, figsize=(10, 6.4), height_ratios=[3, 2], layout="constrained"
        )
        figure.suptitle("GRPO through TransferQueue", fontsize=14, fontweight="bold")
        top.plot(when, raw, color="#4c78a8", alpha=0.25, linewidth=0.8, label="one training step")
        top.plot(when, history.smooth("reward"), color="#1f4e79", linewidth=2.2, label=f"mean of {SMOOTH} steps")
        top.set(ylabel="mean reward (0 to 1)", ylim=(0, 1.02))
        starts = [next(steps) for _, steps in itertools.groupby(range(len(raw)), lambda i: history.reports[i]["level"])]
        for step in starts:
            if step:
                top.axvline(when[step], color="#e45756", linewidth=1.2, linestyle="--")
            late = when[step] > 0.75 * when[-1]
            top.annotate(
                f"operands up to {history.reports[step]['level']}",
                (when[step], 1.0),
                xytext=(-5 if late else 5, -4),
                textcoords="offset points",
                ha="right" if late else "left",
                va="top",
                color="#b03a38",
                fontsize=10,
            )
        top.legend(loc="lower right")
        seconds, means, highs = _per_second([(at - zero, size / MIB) for at, size in history.memory])
        bottom.fill_between(
            seconds, highs, color="#f58518", alpha=0.35, linewidth=0, step="mid", label="most in a second"
        )
        bottom.step(seconds, means, color="#a85200", linewidth=1.4, where="mid", label="mean of a second")
        bottom.axhline(history.peak / MIB, color="#777777", linewidth=1, linestyle=":")
        bottom.set(ylabel="unit memory (MiB)", xlabel="time since the first training step (s)")
        bottom.set(xlim=(max(seconds[0], -3), seconds[-1]), ylim=(0, history.peak / MIB * 1.4))
        bottom.annotate(f"peak {history.peak / MIB:.1f} MiB", (0, history.peak / MIB), va="bottom", color="#555555")
        bottom.legend(loc="upper right", ncols=2)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _per_second(samples: list[tuple[float, float]]) -> tuple[list[float], list[float], list[float]]:
    """Middle, mean and maximum of every second that has samples (time, value)."""
    middles, means, highs = [], [], []
    for second, part in itertools.groupby(samples, lambda sample: math.floor(sample[0])):
        values = [value for _, value in part]
        middles.append(second + 0.5)
        means.append(sum(values) / len(values))
        highs.append(max(values))
    return middles, means, highs
