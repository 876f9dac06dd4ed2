"""Published weights reach running engines by any transport, and what does not fit, or does not come, changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch
from torch import Tensor

from ledger.records import Sampling
from tests.models import tiny_lm, tiny_model
from tests.workers.generation.helpers import running_engine, worst_error
from tests.workers.weight_sync.own import FolderTransport
from workers.generation.intake import TransportIntake, WeightsUnavailable
from workers.generation.updates import UpdatingEngine
from workers.host import StartupError
from workers.weight_sync.spec import WeightSyncSpec
from workers.weight_sync.transport import make_publisher, make_transport
from workers.weights import named_tensors

pytestmark = pytest.mark.anyio

OWN = "tests.workers.weight_sync.own"
GREEDY = Sampling(max_tokens=8, temperature=0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", seed=1)


def spec_of(transport: str, folder: Path) -> WeightSyncSpec:
    args = {"folder": str(folder)} if ":" in transport else {}
    return WeightSyncSpec(transport=transport, folder=str(folder), engines=2, timeout_s=20, args=args)


@pytest.mark.parametrize("name", ["file", "gloo", f"{OWN}:FolderTransport"])
async def test_two_engines_take_in_what_fits_and_refuse_what_does_not(
    model_dir: Path, tmp_path: Path, name: str
) -> None:
    spec = spec_of(name, tmp_path)
    publisher = make_publisher(spec)
    model = tiny_lm("llama", seed=2)
    good = named_tensors(model)
    first, *_, last = good
    wrong: dict[str, dict[str, Tensor]] = {
        f"missing {last}": {key: value for key, value in good.items() if key != last},
        "not in the model extra": good | {"extra": torch.zeros(3)},
        f"{first} is F32": good | {first: torch.zeros(3, 5)},
        f"{first} is BF16": good | {first: good[first].bfloat16()},
    }
    try:
        async with running_engine(model_dir) as one, running_engine(model_dir) as two:
            intakes = [
                TransportIntake(UpdatingEngine(engine, "abort", drain_timeout_s=1), make_transport(spec), timeout_s=20)
                for engine in (one, two)
            ]

            async def load(version: int, weights: dict[str, Tensor], problem: str | None = None) -> None:
                address = await anyio.to_thread.run_sync(publisher.publish, weights, version)

                async def into(intake: TransportIntake) -> None:
                    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
                        await intake.load(address, version)

                async with anyio.create_task_group() as group:
                    for intake in intakes:
                        group.start_soon(into, intake)

            await load(3, good)
            for version, (problem, weights) in enumerate(wrong.items(), 4):
                await load(version, weights, problem)
            for engine in (one, two):
                assert engine.weight_version == 3
                got = await engine.generate("r", [1, 2, 3], GREEDY)
                assert worst_error({3: model}, [1, 2, 3], got, GREEDY) < 1e-4
    finally:
        await anyio.to_thread.run_sync(publisher.close)


async def test_weights_that_do_not_come_leave_the_engine_as_it_was(model_dir: Path, tmp_path: Path) -> None:
    async with running_engine(model_dir) as engine:
        intake = TransportIntake(engine, FolderTransport(str(tmp_path)), timeout_s=5)
        with pytest.raises(WeightsUnavailable, match="weight version 1 did not arrive: step 1 has not come"):
            await intake.load("step-1", 1)
        assert engine.weight_version == 0
        assert (await engine.generate("r", [1], GREEDY)).weight_spans[0].version == 0


async def test_a_receiver_whose_caller_left_is_left_too(model_dir: Path, tmp_path: Path) -> None:
    transport = FolderTransport(str(tmp_path), delay_s=0.2)
    address = transport.publish(named_tensors(tiny_lm("llama", seed=2)), 1)
    async with running_engine(model_dir) as engine:
        intake = TransportIntake(engine, transport, timeout_s=5)
        with anyio.move_on_after(0.05) as scope:
            await intake.load(address, 1)
        assert scope.cancelled_caught
        await anyio.sleep(0.3)
        assert (engine.weight_version, transport.open) == (0, 0)
        await intake.load(address, 1)
        assert (engine.weight_version, transport.open) == (1, 0)


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("no_such_module:Class", {}, "No module named 'no_such_module'"),
        (f"{OWN}:FolderTransport", {}, "missing 1 required positional argument: 'folder'"),
        (f"{OWN}:HalfTransport", {}, "has no method receive"),
    ],
)
async def test_a_transport_that_cannot_be_made_is_named(name: str, args: dict[str, str], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        make_transport(WeightSyncSpec(transport=name, args=args))


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"weight_sync\.dir: .*Not a directory"):
        make_publisher(WeightSyncSpec(folder=str(tmp_path / "file" / "weights")))


async def test_a_missing_trainer_file_is_named(model_dir: Path, tmp_path: Path) -> None:
    async with running_engine(model_dir) as engine:
        intake = TransportIntake(engine, make_transport(WeightSyncSpec()), timeout_s=5)
        with pytest.raises(ValueError, match="nothing"):
            await intake.load(str(tmp_path / "nothing"), 1)
