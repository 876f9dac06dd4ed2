"""A step report holds finite numbers or None, in memory, in its file and in TensorBoard's tags."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from controller.reporting.step_report import StepReport
from tests.controller.reporting.reports import step_report

any_number = st.none() | st.floats() | st.integers(-(10**6), 10**6)


@given(reward=any_number, loss=any_number, wait=any_number)
def test_what_is_written_is_what_is_read(reward, loss, wait):
    report = step_report(7, reward_mean=reward, trainer={"loss": loss}, phases={"wait_rollouts": wait})
    line = msgspec.json.encode(report)
    assert b"NaN" not in line
    assert b"Infinity" not in line
    assert msgspec.json.decode(line, type=StepReport) == report


@given(loss=any_number)
def test_flat_metrics_are_finite(loss):
    metrics = step_report(1, trainer={"loss": loss}, reward_mean=math.nan).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert "reward/mean" not in metrics
    assert ("trainer/loss" in metrics) == (loss is not None and math.isfinite(loss))


def test_flat_metrics_name_every_section():
    sections = {tag.split("/")[0] for tag in step_report(1).metrics}
    assert {"reward", "staleness", "time", "rollouts", "buffer", "trainer", "environment", "data_plane"} <= sections


def test_numbers_that_are_not_finite_are_named_and_those_not_measured_are_not():
    report = step_report(
        1, reward_mean=math.nan, trainer={"loss": math.nan, "lr": 1e-5, "grad_norm": math.inf, "kl_reference": None}
    )
    assert report.not_finite == ("reward_mean", "trainer/loss", "trainer/grad_norm")
    assert msgspec.json.decode(msgspec.json.encode(report), type=StepReport).not_finite == report.not_finite
    assert step_report(1).not_finite == ()


def test_array_scalars_become_plain_numbers():
    report = step_report(
        1, reward_mean=np.float32(0.5), environment={"accuracy": np.float64(0.25), "turns": np.int64(3)}
    )
    assert report.reward_mean == 0.5
    assert msgspec.json.decode(msgspec.json.encode(report))["environment"] == {"accuracy": 0.25, "turns": 3.0}


def test_importing_the_parts_loads_nothing_heavy():
    parts = "step_report metrics_log trace progress summary report log writer"
    imports = "; ".join(f"import controller.reporting.{part}" for part in parts.split())
    heavy = "{'torch', 'matplotlib', 'tensorboard', 'rich', 'ray', 'vllm', 'transformers'}"
    code = f"{imports}; import sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
