"""metrics.jsonl and TensorBoard hold each step once, also across crashes and resumes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from anyio import fail_after, run_process
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from controller.reporting.metrics_log import BadMetrics, MetricsLog, read_reports
from controller.reporting.writer import ReportWriter, WriteFailed
from tests.controller.reporting.reports import step_report

pytestmark = pytest.mark.anyio


async def log_steps(run_dir: Path, first: int, last: int) -> None:
    async with ReportWriter().running() as writer:
        log = await MetricsLog.open(writer, run_dir, resume_at=first - 1)
        for step in range(first, last + 1):
            log.write(step_report(step))


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 5)) for event in events.Scalars(tag)]


async def test_each_step_is_one_line(tmp_path):
    await log_steps(tmp_path, 1, 3)
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 3
    assert read_reports(tmp_path) == [step_report(step) for step in (1, 2, 3)]


async def test_tensorboard_reads_what_was_logged(tmp_path):
    await log_steps(tmp_path, 1, 3)
    assert scalars(tmp_path, "reward/mean") == [(1, 0.01), (2, 0.02), (3, 0.03)]
    assert scalars(tmp_path, "trainer/loss") == [(1, 0.01), (2, 0.01), (3, 0.01)]


async def test_a_number_that_is_not_finite_is_null_in_the_file_and_a_gap_in_tensorboard(tmp_path):
    async with ReportWriter().running() as writer:
        log = await MetricsLog.open(writer, tmp_path)
        log.write(step_report(1, trainer={"loss": float("nan")}))
        log.write(step_report(2, trainer={"loss": 0.5}))
    assert msgspec.json.decode((tmp_path / "metrics.jsonl").read_bytes().splitlines()[0])["trainer"] == {"loss": None}
    assert scalars(tmp_path, "trainer/loss") == [(2, 0.5)]


async def test_a_resume_forgets_the_steps_after_its_checkpoint(tmp_path):
    await log_steps(tmp_path, 1, 5)
    await log_steps(tmp_path, 4, 6)
    assert [report.step for report in read_reports(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in scalars(tmp_path, "reward/mean")] == [1, 2, 3, 4, 5, 6]


async def test_a_fresh_run_keeps_no_earlier_step(tmp_path):
    await log_steps(tmp_path, 1, 5)
    await log_steps(tmp_path, 1, 2)
    assert [report.step for report in read_reports(tmp_path)] == [1, 2]


async def test_a_line_cut_short_by_a_crash_is_dropped_on_resume(tmp_path):
    await log_steps(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [report.step for report in read_reports(tmp_path)] == [1, 2]
    await log_steps(tmp_path, 3, 3)
    assert [report.step for report in read_reports(tmp_path)] == [1, 2, 3]


async def test_a_broken_line_is_named_and_the_file_left_as_it_is(tmp_path):
    await log_steps(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": "two"}\n' + lines[2])
    with pytest.raises(BadMetrics, match=r"metrics.jsonl, line 2: Expected `int`, got `str` - at `\$.step`"):
        await log_steps(tmp_path, 3, 4)
    with pytest.raises(BadMetrics, match="line 2"):
        read_reports(tmp_path)
    assert path.read_bytes().splitlines(keepends=True)[0] == lines[0]


def test_no_file_means_no_steps(tmp_path):
    assert read_reports(tmp_path) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
import anyio
from controller.reporting.metrics_log import MetricsLog
from controller.reporting.writer import ReportWriter
from tests.controller.reporting.reports import step_report

async def main():
    async with ReportWriter(linger_s=0).running() as writer:
        log = await MetricsLog.open(writer, Path(sys.argv[1]))
        log.write(step_report(1))
        await writer.flush()
        size = (Path(sys.argv[1]) / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        log.write(step_report(2))
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_when_the_disk_fills_up_the_run_ends_and_can_be_resumed(tmp_path):
    with fail_after(60):
        done = await run_process([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=False)
    assert done.returncode == 1
    last_line = done.stderr.decode().strip().splitlines()[-1]
    assert "WriteFailed: cannot write" in last_line
    assert "metrics.jsonl" in last_line
    assert "record(s) lost" in last_line
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    await log_steps(tmp_path, 2, 2)
    assert read_reports(tmp_path) == [step_report(1), step_report(2)]


async def test_tensorboard_is_written_without_torch(tmp_path):
    code = FULL_DISK.split("        size =")[0] + "\nanyio.run(main)\nprint('torch' in sys.modules)"
    with fail_after(60):
        done = await run_process([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.stdout.decode().strip() == "False", done.stderr
    assert scalars(tmp_path, "reward/mean") == [(1, 0.01)]


async def test_a_run_folder_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(WriteFailed, match=r"run/metrics.jsonl"):
        await log_steps(tmp_path / "run", 1, 1)
