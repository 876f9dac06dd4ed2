"""How a run ended: summary.json for machines, and a short table for the person who waited for it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
from anyio import CancelScope, fail_after
from msgspec import Struct

from controller.losses import LossReport, bias
from controller.reporting.daemon import DaemonThread
from controller.reporting.evaluation_report import EvaluationReport
from controller.reporting.files import replace_file
from controller.reporting.plain_view import with_error
from controller.reporting.step_report import StepReport
from controller.reporting.text import clean_line, duration, number

SUMMARY_FILE = "summary.json"
PACKAGES = ("monoloop", "torch", "transformers", "vllm", "TransferQueue", "renderers", "anyio", "uvloop", "msgspec")
_EDGE_STEPS = 5


class Accounts(Struct, frozen=True, kw_only=True):
    """Where everything that was dispatched went. `lost` and `duplicated` are the ledger's own finding."""

    dispatched: int
    trained: int
    evicted: int
    dropped: int
    aborted: int
    lost: int = 0
    duplicated: int = 0

    @property
    def unaccounted(self) -> int:
        """Dispatched less all ends; 0 in a run that has ended as it should."""
        return self.dispatched - self.trained - self.evicted - self.dropped - self.aborted

    @property
    def balanced(self) -> bool:
        return self.unaccounted == 0 and self.lost == 0 and self.duplicated == 0


class RunSummary(Accounts, frozen=True, kw_only=True):
    """The account of the run's rollouts (also those before a resume), and what else is to be known of its end."""

    name: str
    status: Literal["finished", "interrupted", "failed", "stalled"]
    reason: str | None
    """Why it is not `finished`."""
    steps: int
    """Finished optimizer steps."""
    planned_steps: int
    seconds: float
    """Wall time of this process."""
    groups: Accounts
    """Prompt groups likewise."""
    drop_reasons: dict[str, int]
    """Rollouts of this process that could not be trained, by reason code."""
    losses: LossReport | None = None
    """Which rollouts of this process were played and not trained, by length."""
    unproven: int = 0
    """Trained rollouts whose tokens the environment returned itself, which nothing proves."""
    rows_left: dict[str, int]
    """Rows still in the data plane at the end, by partition; all 0 in a run that ended as it should."""
    children_left: int
    """Worker processes that outlived their stop."""
    weight_version: int
    reward_first: float | None
    """Mean reward of the first steps (`reward_edges`)."""
    reward_last: float | None
    evaluation_first: EvaluationReport | None = None
    evaluation_last: EvaluationReport | None = None
    """None also when there was only one."""
    versions: dict[str, str]
    """Of the packages that matter (`package_versions`)."""

    @property
    def clean(self) -> bool:
        """Nothing lost, nothing twice, nothing left behind."""
        return self.balanced and self.groups.balanced and not any(self.rows_left.values()) and self.children_left == 0


def reward_edges(reports: Sequence[StepReport]) -> tuple[float | None, float | None]:
    """Mean reward of the first and of the last `edge_steps`."""
    rewards = [report.reward_mean for report in reports if report.reward_mean is not None]
    if not rewards:
        return None, None
    edge = edge_steps(len(rewards))
    return fmean(rewards[:edge]), fmean(rewards[-edge:])


def edge_steps(steps: int) -> int:
    """Five, or half of fewer than ten: the first and the last must not be the same."""
    return min(_EDGE_STEPS, max(steps // 2, 1))


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of the installed ones. Blocks (reads package metadata)."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


async def write_summary(run_dir: Path, summary: RunSummary, *, timeout_s: float = 10.0) -> Path:
    """Writes summary.json whole or not at all, out of reach of cancellation. Raises `OSError`, `TimeoutError`."""
    path = run_dir / SUMMARY_FILE
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
    thread = DaemonThread("summary writer")
    try:
        with CancelScope(shield=True), fail_after(timeout_s):
            await thread.call(lambda: replace_file(path, [data]))
    finally:
        thread.close()
    return path


def first_line(reason: str) -> str:
    """The headline: a stall's reason goes on with who waited for what."""
    return reason.partition("\n")[0]


def format_summary(summary: RunSummary, run_dir: Path) -> str:
    """The table printed at the end of a run, in plain ASCII, without a final newline."""
    head = f"{summary.status}: {summary.steps} of {summary.planned_steps} steps in {duration(summary.seconds)}"
    rows = [("reason", clean_line(first_line(summary.reason)))] if summary.reason else []
    if summary.reward_first is not None:
        edges = f"{number(summary.reward_first)} -> {number(summary.reward_last)}"
        steps = edge_steps(summary.steps)
        rows.append(("reward", f"{edges}  (first and last {f'{steps} steps' if steps > 1 else 'step'})"))
    if summary.evaluation_first is not None:
        rows.append(("held out", _evaluations(summary.evaluation_first, summary.evaluation_last)))
    rows.append(("rollouts", _accounting(summary)))
    rows.append(("groups", _accounting(summary.groups)))
    if summary.drop_reasons:
        by_count = sorted(summary.drop_reasons.items(), key=lambda item: (-item[1], item[0]))
        rows.append(("dropped", ", ".join(f"{reason} {count}" for reason, count in by_count)))
    if summary.losses is not None and summary.losses.lost:
        rows.append(("untrained", bias(summary.losses.shares)))
    if summary.unproven:
        rows.append(("UNPROVEN", f"{summary.unproven} trained rollouts: the environment returned their tokens itself"))
    left = [f"{count} {name} rows" for name, count in summary.rows_left.items()]
    rows.append(("left", ", ".join([*left, f"{summary.children_left} processes"])))
    rows.append(("weights", f"version {summary.weight_version}"))
    rows.append(("files", str(run_dir)))
    return "\n".join([head, *(f"  {label:<9} {value}" for label, value in rows)])


def _evaluations(first: EvaluationReport, last: EvaluationReport | None) -> str:
    asked = f"{first.questions} questions x {first.samples}"
    if last is None:
        return f"{with_error(first)}  (reward after step {first.step}, {asked})"
    return f"{with_error(first)} -> {with_error(last)}  (reward after steps {first.step} and {last.step}, {asked})"


def _accounting(accounts: Accounts) -> str:
    ends = ("trained", "evicted", "dropped", "aborted")
    total = " + ".join(f"{end} {getattr(accounts, end)}" for end in ends)
    sign = "=" if accounts.unaccounted == 0 else "!="
    verdict = f"lost={accounts.lost} duplicated={accounts.duplicated}"
    if accounts.unaccounted:
        verdict += f" unaccounted={accounts.unaccounted}"
    return f"dispatched {accounts.dispatched} {sign} {total}   {verdict}"
