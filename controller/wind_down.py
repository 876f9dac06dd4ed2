"""The end of a run, however it came: checkpoint, end of what is live, stop of the workers, sweep of the rows, summary.

Every part is bounded, and a failing part does not keep the next one from being done. To be called shielded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import anyio.to_thread
import msgspec

from controller.config.schema import Config
from controller.first_error import first_error
from controller.machinery import Machinery
from controller.observer import Observer
from controller.reporting.metrics_log import read_reports
from controller.reporting.report import make_report
from controller.reporting.summary import (
    RunSummary,
    format_summary,
    package_versions,
    reward_edges,
    write_summary,
)
from controller.run import Run
from dataplane.schema import STAGING, TRAIN

Status: TypeAlias = Literal["finished", "interrupted", "failed", "stalled"]

logger = logging.getLogger(__name__)


class WindDown:
    """`failure` is the first error of a part that the user must know of: the final checkpoint's."""

    def __init__(self, config: Config, run: Run, machinery: Machinery, observer: Observer, run_dir: Path) -> None:
        self._config = config
        self._run = run
        self._machinery = machinery
        self._observer = observer
        self._run_dir = run_dir
        self.failure: Exception | None = None
        self._reason: str | None = None

    async def finish(self, status: Status, reason: str | None, *, began: float) -> RunSummary:
        """`began`: `time.monotonic()` when the run's process took it up."""
        self._reason = reason
        trained = self._run.state.step > self._run.first_step
        pending = self._run.pending()
        with self._part("ending live groups"):
            await self._run.end_live_groups(reason or "the run ended")
        if status in ("finished", "interrupted") and trained:
            with self._part("writing the last checkpoint"):
                try:
                    await self._run.checkpoint(pending)
                except Exception as e:
                    self.failure = e
                    status, reason = "failed", f"the last checkpoint could not be written: {e}"
                    raise
        with self._part("writing the metrics"):
            await self._observer.writer.flush()
        reports = await anyio.to_thread.run_sync(read_reports, self._run_dir)
        rows_left: dict[str, int] = {}
        async with anyio.create_task_group() as tg:
            # Another process draws, for about as long as the workers take to stop.
            if reports:
                tg.start_soon(self._draw)
            with self._part("stopping the workers"):
                await self._machinery.fleet.stop()
            rows_left = await self._sweep(status)
            if reports:
                self._observer.doing("drawing the report")
        rollouts, groups = self._run.accounts()
        first, last = reward_edges(reports)
        evaluations = self._observer.evaluations
        summary = RunSummary(
            name=self._run_dir.name,
            status=status,
            reason=reason,
            steps=self._run.state.step,
            planned_steps=self._config.run.steps,
            seconds=time.monotonic() - began,
            **msgspec.structs.asdict(rollouts),
            groups=groups,
            drop_reasons=dict(self._run.finalizers.rejections),
            losses=self._run.losses.report(),
            unproven=sum(report.unproven for report in reports),
            rows_left=rows_left,
            children_left=sum(_alive(pid) for pid in self._machinery.fleet.pids),
            weight_version=self._run.state.version,
            reward_first=first,
            reward_last=last,
            evaluation_first=evaluations[0] if evaluations else None,
            evaluation_last=evaluations[-1] if len(evaluations) > 1 else None,
            versions=await anyio.to_thread.run_sync(package_versions),
        )
        with self._part("writing the summary"):
            await write_summary(self._run_dir, summary)
        self._observer.progress.farewell(format_summary(summary, self._run_dir))
        return summary

    async def _sweep(self, status: Status) -> dict[str, int]:
        """Rows left after the sweep, by partition; empty when the data plane no longer answers."""
        with self._part("sweeping the data plane"):
            found = await self._machinery.sweep()
            if status == "finished" and any(found.values()):
                logger.warning("rows that nobody had cleared were swept: %s", found)
            plane = self._machinery.plane
            return {partition: len(await plane.keys(partition)) for partition in (STAGING, TRAIN)}
        return {}

    async def _draw(self) -> None:
        with self._noted("drawing the report"):
            await make_report(self._run_dir)

    @contextmanager
    def _part(self, what: str) -> Generator[None]:
        self._observer.doing(what)
        with self._noted(what):
            yield

    @contextmanager
    def _noted(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as e:
            first = first_error(e)
            # What ended the run is told in the end.
            level = logging.INFO if str(first) and str(first) in (self._reason or "") else logging.WARNING
            logger.log(level, "%s failed: %s: %s", what, type(first).__name__, first, exc_info=e)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
