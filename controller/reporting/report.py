"""report.png: the run's curves on one page, made from metrics.jsonl and evaluations.jsonl alone.

`python -m controller.reporting.report RUN_DIR` makes it again at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import numpy as np
from anyio import fail_after, run_process
from numpy.typing import NDArray

from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.metrics_log import METRICS_FILE, BadMetrics, read_evaluations, read_reports
from controller.reporting.step_report import PHASES, StepReport

REPORT_FILE = "report.png"
_MAX_BARS = 160

Floats = NDArray[np.float64]

_INK = "#1f2430"
_MUTED = "#6b7280"
_GRID = "#e5e7eb"
_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _TEAL = "#2563eb", "#e07b1a", "#15935a", "#7c4dce", "#d03a3a", "#0e8c9b"
_PHASE_COLORS = {
    "evaluate": _TEAL,
    "wait_rollouts": "#c3c9d4",
    "logprobs": _PURPLE,
    "train": _BLUE,
    "clear": _RED,
    "weight_sync": _ORANGE,
    "checkpoint": _GREEN,
    "other": "#eceef2",
}


class NoReport(Exception):
    """The report could not be made; the text says why."""


async def make_report(run_dir: Path, *, timeout_s: float = 120.0) -> Path:
    """`write_report` in a process of its own, because drawing holds the interpreter lock for long. Raises `NoReport`,
    `TimeoutError`. Cancellation ends the process."""
    with fail_after(timeout_s):
        command = [sys.executable, "-m", "controller.reporting.report", str(run_dir)]
        done = await run_process(command, check=False, stdout=PIPE, stderr=STDOUT)
    if done.returncode != 0:
        raise NoReport(done.stdout.decode(errors="replace").strip()[-2000:])
    return run_dir / REPORT_FILE


def write_report(run_dir: Path) -> Path:
    """Draws report.png beside metrics.jsonl and returns its path. Blocks for seconds. Raises `NoReport`, `OSError`."""
    try:
        reports, evaluations = read_reports(run_dir), read_evaluations(run_dir)
    except BadMetrics as error:
        raise NoReport(str(error)) from error
    if not reports:
        raise NoReport(f"{run_dir / METRICS_FILE} holds no finished step")
    figure = _draw(reports, evaluations, run_dir.resolve().name)
    path = run_dir / REPORT_FILE
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=130)
    temporary.replace(path)
    return path


def _draw(reports: Sequence[StepReport], evaluations: Sequence[EvaluationReport], name: str) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    mpl: Any = matplotlib
    style = {
        "font.size": 9.5,
        "text.color": _INK,
        "axes.labelcolor": _MUTED,
        "axes.edgecolor": _GRID,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.8,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }
    with mpl.rc_context(style):
        figure: Any = Figure(figsize=(14, 10), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.03)
        figure.suptitle(_title(reports, name), x=0.012, ha="left", fontsize=14, fontweight="bold")
        unproven = sum(report.unproven for report in reports)
        if unproven:
            text = f"UNPROVEN: the environment returned the tokens of {unproven:,} rollouts itself"
            figure.text(0.988, 0.988, text, ha="right", va="top", color=_RED, fontsize=11, fontweight="bold")
        grid = figure.add_gridspec(3, 12)
        wide = (grid[0, :8], grid[0, 8:], grid[1, :8], grid[1, 8:])
        spots = (*wide, *(grid[2, at : at + 3] for at in range(0, 12, 3)))
        reward = partial(_reward, evaluations=evaluations)
        panels = (reward, _staleness, _phases, _throughput, _length, _entropy, _agreement, _stability)
        steps = np.array([report.step for report in reports])
        for spot, panel in zip(spots, panels, strict=True):
            axes = figure.add_subplot(spot)
            panel(axes, steps, reports)
            axes.set_xlim((0 if evaluations else steps[0]) - 0.5, steps[-1] + 0.5)
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axes.tick_params(length=0)
        for axes in figure.axes[-4:]:
            axes.set_xlabel("optimizer step")
    return figure


def _title(reports: Sequence[StepReport], name: str) -> str:
    last = reports[-1]
    trained = last.counts.get("trained")
    rollouts = f", {trained:,} rollouts trained" if trained is not None else ""
    return f"{name}: {last.step} step{'s' * (last.step != 1)}{rollouts}"


def _reward(
    axes: Any, steps: Floats, reports: Sequence[StepReport], *, evaluations: Sequence[EvaluationReport]
) -> None:
    mean = _series(reports, lambda r: r.reward_mean)
    std = _series(reports, lambda r: r.reward_std)
    axes.fill_between(steps, mean - std, mean + std, color=_BLUE, alpha=0.08, linewidth=0, label="± std of rollouts")
    _curve(axes, steps, mean, _BLUE, raw="mean", smooth="smoothed")
    if evaluations:
        at = [evaluation.step for evaluation in evaluations]
        errors = [evaluation.reward_error or 0.0 for evaluation in evaluations]
        held_out = [evaluation.reward_mean for evaluation in evaluations]
        style = {"fmt": "o-", "color": _ORANGE, "linewidth": 1.5, "markersize": 6, "capsize": 4}
        axes.errorbar(at, held_out, yerr=errors, label="held out ± standard error", zorder=3, **style)
    _headroom(axes)
    axes.legend(loc="upper left", ncols=4)
    axes.set_title("Reward")


def _staleness(axes: Any, steps: Floats, reports: Sequence[StepReport]) -> None:
    worst = _series(reports, lambda r: r.staleness_max)
    axes.plot(steps, worst, color=_MUTED, linestyle="", marker=".", markersize=4, alpha=0.6, label="max")
    _curve(axes, steps, _series(reports, lambda r: r.staleness_mean), _ORANGE, smooth="mean")
    axes.set_ylim(bottom=0)
    _headroom(axes)
    axes.legend(loc="upper left", ncols=2)
    axes.set_title("Staleness (optimizer steps)")


def _phases(axes: Any, steps: Floats, reports: Sequence[StepReport]) -> None:
    total = _series(reports, lambda r: r.seconds)
    stacked: dict[str, Floats] = {
        phase: np.nan_to_num(_series(reports, lambda r, phase=phase: r.phases.get(phase))) for phase in PHASES
    }
    stacked["other"] = np.clip(total - sum(stacked.values()), 0, None)
    # A bar of less than a few pixels would show one step in many at random: long runs get the mean over several steps.
    starts = np.arange(0, len(steps), -(-len(steps) // _MAX_BARS))
    sizes = np.diff(starts, append=len(steps))
    edges = np.append(steps[starts], steps[-1] + 1) - 0.5
    bottom = np.zeros(len(starts))
    for phase, seconds in stacked.items():
        share = seconds.sum() / max(total.sum(), 1e-9)
        if share > 0.002:
            top = bottom + np.add.reduceat(seconds, starts) / sizes
            label = f"{phase.replace('_', ' ')} {100 * share:.0f}%"
            axes.stairs(top, edges, baseline=bottom, fill=True, color=_PHASE_COLORS[phase], label=label, linewidth=0)
            bottom = top
    axes.set_ylim(bottom=0)
    _headroom(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", ncols=7, handlelength=1, columnspacing=1.2)
    axes.set_title("Step time (s)")


def _throughput(axes: Any, steps: Floats, reports: Sequence[StepReport]) -> None:
    _curve(axes, steps, _series(reports, lambda r: r.tokens_per_s), _GREEN)
    axes.set_ylim(bottom=0)
    taken_out = np.diff(np.nan_to_num(_series(reports, lambda r: r.fleet.get("quarantined"))), prepend=0.0) > 0
    for index, step in enumerate(steps[taken_out]):
        label = None if index else "a generation worker was taken out"
        axes.axvline(step, color=_RED, linewidth=1, linestyle=":", label=label)
    if taken_out.any():
        _headroom(axes)
        axes.legend(loc="upper left")
    axes.set_title("Trained tokens per second")


def _length(axes: Any, steps: Floats, reports: Sequence[StepReport]) -> None:
    _curve(axes, steps, _series(reports, lambda r: r.completion_length_mean), _TEAL)
    axes.set_ylim(bottom=0)
    axes.set_title("Completion length (tokens)")
    shortest, longest = (reports[-1].losses.get(name) or 0.0 for name in ("tenth_01", "tenth_10"))
    if shortest or longest:
        text = f"not trained: {shortest:.1%} of the shortest\ntenth, {longest:.1%} of the longest"
        biased = max(shortest, longest) > 2 * min(shortest, longest) + 0.01
        axes.text(0.03, 0.05, text, transform=axes.transAxes, fontsize=8.5, color=_RED if biased else _MUTED)


def _entropy(axes: Any, steps: Floats, reports: Sequence[StepReport]) -> None:
    _curve(axes, steps, _series(reports, lambda r: r.trainer.get("entropy")), _PURPLE)
    axes.set_title("Token entropy (nats)")


def _agreement(axes: Any, steps: Floats, reports: Sequence[StepReport]) -> None:
    names = {name for report in reports for name in report.agreement if name.startswith("age_")}
    ages = sorted({int(name.split("_")[1]) for name in names})
    colors = (_BLUE, _ORANGE, _GREEN, _PURPLE)
    for age, color in zip(ages, colors, strict=False):
        values = _series(reports, lambda r, age=age: r.agreement.get(f"age_{age}_difference_mean") or None)
        label = f"{age} step{'s' * (age != 1)} old"
        axes.plot(steps, values, color=color, linewidth=1.2, marker="o", markersize=_marker(steps) or 2, label=label)
    if ages:
        _log_scale(axes)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.3)  # Room for the legend.
        axes.legend(loc="upper left", ncols=2)
    axes.set_title("Trainer vs. engine, |Δ log p|")


def _stability(axes: Any, steps: Floats, reports: Sequence[StepReport]) -> None:
    norm = _series(reports, lambda r: r.trainer.get("grad_norm"))
    axes.plot(steps, norm, color=_RED, linewidth=1.2, marker="o", markersize=_marker(steps))
    lowest, highest = np.nanmin(norm, initial=np.inf), np.nanmax(norm, initial=0.0)
    if 0 < 8 * lowest < highest:
        _log_scale(axes)
    else:
        axes.set_ylim(bottom=0)
    diverged = [report.step for report in reports if report.not_finite]
    for index, step in enumerate(diverged):
        axes.axvline(step, color=_INK, linewidth=1, linestyle=":", label=None if index else "not finite")
    if diverged:
        axes.legend(loc="upper right")
    axes.set_title("Gradient norm")


def _curve(axes: Any, steps: Floats, values: Floats, color: str, *, raw: str = "", smooth: str = "") -> None:
    marker = _marker(steps)
    axes.plot(steps, values, color=color, alpha=0.35, linewidth=1, marker="o", markersize=marker, label=raw)
    axes.plot(steps, _smooth(values), color=color, linewidth=2.2, label=smooth)


def _marker(steps: Floats) -> float:
    """Points that stand alone must be seen; hundreds of them hide the curve."""
    return 4.0 if len(steps) < 20 else 2.5 if len(steps) < 150 else 0.0


def _headroom(axes: Any) -> None:
    """Room for the legend above the data."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.16 * (high - low))


def _log_scale(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _series(reports: Sequence[StepReport], number: Callable[[StepReport], float | None]) -> Floats:
    """NaN where there is no number, so that the curve has a gap."""
    return np.array([np.nan if (value := number(report)) is None else value for report in reports], dtype=np.float64)


def _smooth(values: Floats) -> Floats:
    """Centred moving average over about a tenth of the run, NaNs left out."""
    width = max(1, len(values) // 10) | 1
    weights = np.ones(width)
    valid = np.isfinite(values)
    sums = np.convolve(np.where(valid, values, 0.0), weights, mode="same")
    counts = np.convolve(valid.astype(np.float64), weights, mode="same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m controller.reporting.report RUN_DIR\n")
        return 2
    try:
        path = write_report(Path(arguments[0]))
    except (NoReport, OSError) as error:
        sys.stderr.write(f"no report: {error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
