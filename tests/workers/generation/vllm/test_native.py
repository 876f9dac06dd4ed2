"""vLLM's own weight transfer without a GPU for it: everything up to the first tensor, and what its failure costs."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch

from ledger.records import Sampling, WeightSpan
from tests.models import tiny_lm
from tests.needs import needs_vllm
from tests.workers.generation.vllm.engines import HEAD, running_vllm
from workers.generation.engine import EngineRestarting
from workers.generation.intake import WeightsUnavailable
from workers.generation.updates import UpdatingEngine
from workers.generation.vllm_native import NativeIntake
from workers.weight_sync.spec import WeightSyncSpec
from workers.weight_sync.transport import make_publisher
from workers.weights import named_tensors

pytestmark = [pytest.mark.anyio, needs_vllm]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="it would go on")
async def test_a_transfer_that_breaks_off_costs_the_core_and_a_misfit_costs_nothing(model_dir: Path) -> None:
    publisher = make_publisher(WeightSyncSpec(transport="ipc", timeout_s=30))
    weights = named_tensors(tiny_lm("llama", seed=2, **HEAD))
    first, *_ = weights
    try:
        async with running_vllm(model_dir, weight_transfer="ipc") as engine:
            intake = NativeIntake(engine, UpdatingEngine(engine, "keep", drain_timeout_s=1), timeout_s=30)

            async def publish(version: int, *, whole: bool = True) -> str:
                sent = {name: tensor for name, tensor in weights.items() if whole or name != first}
                return await anyio.to_thread.run_sync(publisher.publish, sent, version)

            address = await publish(1, whole=False)
            with pytest.raises(ValueError, match=f"missing {first}"):
                await intake.load(address, 1)
            with pytest.raises(WeightsUnavailable, match="weight version 2 is not offered, 1 is"):
                await intake.load(address, 2)
            assert engine.stats().restarts == 0
            await publish(2)
            with pytest.raises(EngineRestarting, match="the trainer failed"):
                await intake.load(address, 2)
            with anyio.fail_after(120):
                got = await engine.generate("r", [1, 2], Sampling(max_tokens=4))
            assert got.weight_spans == (WeightSpan(0, 0, 4),)
            assert engine.stats().restarts == 1
        await anyio.to_thread.run_sync(publisher.close)
        with pytest.raises(WeightsUnavailable, match="no answer from the trainer"):
            await intake.load(address, 2)
    finally:
        await anyio.to_thread.run_sync(publisher.close)
