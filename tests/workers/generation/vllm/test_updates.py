"""Weights that change under vLLM's running requests in the modes that take them out, or let them end, first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from ledger.records import Sampling, WeightSpan
from tests.models import tiny_lm, tiny_tokenizer
from tests.needs import needs_vllm
from tests.workers.generation.helpers import load, worst_error
from tests.workers.generation.vllm.engines import HEAD, TOLERANCE, tokens_generated
from workers.generation.engine import Generation
from workers.generation.intake import TransportIntake
from workers.generation.updates import UpdatingEngine
from workers.generation.vllm_engine import VLLMEngine
from workers.generation.vllm_request import Request, complete, sampling_params
from workers.weight_sync.spec import UpdateMode, WeightSyncSpec
from workers.weight_sync.transport import make_publisher, make_transport
from workers.weights import named_tensors, save_weights

pytestmark = [pytest.mark.anyio, needs_vllm]

LONG = 300


@pytest.fixture
async def at_zero(engine: VLLMEngine, model_dir: Path, tmp_path: Path) -> VLLMEngine:
    """The module's engine, with the weights that it began with."""
    save_weights(load(model_dir), tmp_path / "0")
    await engine.load_weights(tmp_path / "0", 0)
    return engine


@pytest.mark.parametrize("mode", ["drain", "abort"])
async def test_sixteen_running_requests_and_a_late_one(
    at_zero: VLLMEngine, model_dir: Path, tmp_path: Path, mode: UpdateMode
) -> None:
    models: dict[int, Any] = {0: load(model_dir), 7: tiny_lm("llama", seed=2, **HEAD)}
    save_weights(models[7], tmp_path / "7")
    engine = UpdatingEngine(at_zero, mode, drain_timeout_s=60)
    asked = {
        f"r{i}": (
            [(7 * i + 3 * j) % 103 for j in range(i % 5 + 1)],
            Sampling(
                max_tokens=LONG, temperature=(1.0, 0.7)[i % 2], seed=(None, i)[i % 2], stop=("never said",) * (i % 3)
            ),
        )
        for i in range(16)
    }
    done: dict[str, Generation] = {}

    async def one(name: str, prompt: list[int], sampling: Sampling) -> None:
        done[name] = await engine.generate(name, prompt, sampling)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as group:
            for name, (prompt, sampling) in asked.items():
                group.start_soon(one, name, prompt, sampling)
            await tokens_generated(at_zero, 16 * 20)
            async with anyio.create_task_group() as update:
                update.start_soon(engine.load_weights, tmp_path / "7", 7)
                await anyio.lowlevel.checkpoint()
                group.start_soon(one, "late", [5, 6], Sampling(max_tokens=8))
    assert done["late"].weight_spans == (WeightSpan(7, 0, 8),)
    for name, (prompt, sampling) in asked.items():
        got = done[name]
        assert (len(got.token_ids), got.finish_reason) == (LONG, "length")
        assert [s.version for s in got.weight_spans] == ([0] if mode == "drain" else [0, 7])
        assert worst_error(models, prompt, got, sampling) < TOLERANCE
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)


async def test_an_abort_that_comes_while_a_request_is_being_added_is_heard(engine: VLLMEngine) -> None:
    params = sampling_params(Sampling(max_tokens=LONG), stop_token_ids=(), vocab_size=engine.vocab_size)
    request = Request("r")
    await request.abort()
    got = await complete(engine._core, request, [1, 2], params)
    assert got.finish_reason == "abort"
    assert len(got.token_ids) < LONG


async def test_weights_come_by_broadcast_and_misfits_change_nothing(at_zero: VLLMEngine, tmp_path: Path) -> None:
    spec = WeightSyncSpec(transport="gloo", folder=str(tmp_path / "weights"), timeout_s=30)
    publisher = make_publisher(spec)
    intake = TransportIntake(UpdatingEngine(at_zero, "keep", drain_timeout_s=1), make_transport(spec), timeout_s=30)
    model = tiny_lm("llama", seed=4, **HEAD)
    weights = named_tensors(model)
    try:
        await intake.load(await anyio.to_thread.run_sync(publisher.publish, weights, 3), 3)
        got = await at_zero.generate("r", [1, 2], Sampling(max_tokens=8))
        assert got.weight_spans == (WeightSpan(3, 0, 8),)
        assert worst_error({3: model}, [1, 2], got, Sampling(max_tokens=8)) < TOLERANCE
        first = next(iter(weights))
        less = {name: tensor for name, tensor in weights.items() if name != first}
        address = await anyio.to_thread.run_sync(publisher.publish, less, 4)
        with pytest.raises(ValueError, match=f"missing {first}"):
            await intake.load(address, 4)
        assert at_zero.weight_version == 3
    finally:
        await anyio.to_thread.run_sync(publisher.close)


async def test_a_stop_string_may_begin_before_an_update_and_end_after_it(at_zero: VLLMEngine) -> None:
    decode = tiny_tokenizer().decode
    greedy = Sampling(max_tokens=24, temperature=0)
    tokens = (await at_zero.generate("r", [1, 2, 3], greedy)).token_ids
    at = next(i for i in range(4, 23) if decode(tokens[i : i + 2]) not in decode(tokens[: i + 1]))
    stop = Sampling(max_tokens=24, temperature=0, stop=(decode(tokens[at : at + 2]),))
    got = await at_zero.generate("s", [1, 2, 3], stop, begun=tokens[: at + 1])
    assert (got.token_ids, got.finish_reason) == ([tokens[at + 1]], "stop")
