"""vLLM against plain transformers: what it samples, with which logprobs, and how a request ends."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import numpy as np
import pytest

from ledger.records import Sampling, WeightSpan
from tests.models import tiny_tokenizer
from tests.needs import needs_vllm
from tests.workers.generation.helpers import load, worst_error
from tests.workers.generation.vllm.engines import TOLERANCE, generate_all, tokens_generated
from workers.generation.engine import Generation
from workers.generation.vllm_engine import VLLMEngine

pytestmark = [pytest.mark.anyio, needs_vllm]

SAMPLINGS = [
    Sampling(max_tokens=60, seed=0),
    Sampling(max_tokens=9, seed=1, temperature=0.7),
    Sampling(max_tokens=17, seed=2, top_k=5),
    Sampling(max_tokens=40, seed=3, top_p=0.8),
    Sampling(max_tokens=25, seed=4, temperature=0.7, top_k=20, top_p=0.9),
    Sampling(max_tokens=13, temperature=0),
    Sampling(max_tokens=1, seed=-5, temperature=1.3),
    Sampling(max_tokens=20, temperature=1.5, top_k=1000),
]


def requests(n: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of different lengths, every third one a repetition of the one before."""
    rng = random.Random(0)
    made: list[list[int]] = []
    for i in range(n):
        made.append(made[-1] if i % 3 == 2 else [rng.randrange(103) for _ in range(rng.randint(1, 80))])
    return [(prompt, SAMPLINGS[i % len(SAMPLINGS)]) for i, prompt in enumerate(made)]


async def test_logprobs_are_those_of_the_distribution_sampled_from(engine: VLLMEngine, model_dir: Path) -> None:
    asked = requests(48)
    results = await generate_all(engine, asked)
    models = {0: load(model_dir)}
    worst = max(worst_error(models, p, got, s) for (p, s), got in zip(asked, results, strict=True))
    print(f"largest logprob error: {worst:.2e}")
    assert worst <= TOLERANCE
    for (_, sampling), got in zip(asked, results, strict=True):
        assert (len(got.token_ids), got.finish_reason) == (sampling.max_tokens, "length")
        assert got.weight_spans == (WeightSpan(0, 0, sampling.max_tokens),)


async def test_a_seed_says_what_is_sampled(engine: VLLMEngine) -> None:
    asked = [(prompt, s) for prompt, s in requests(24) if s.seed is not None]
    together = await generate_all(engine, asked)
    alone = [await engine.generate("alone", *request) for request in asked]
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)
    unseeded = [await engine.generate("u", [5], Sampling(max_tokens=20)) for _ in range(2)]
    assert unseeded[0].token_ids != unseeded[1].token_ids


async def test_a_stop_token_ends_the_request_and_is_kept(engine: VLLMEngine) -> None:
    free = await engine.generate("free", [5, 9], Sampling(max_tokens=30, seed=3))
    stop = free.token_ids[11]
    cut = free.token_ids.index(stop) + 1
    got = await engine.generate("own", [5, 9], Sampling(max_tokens=30, seed=3, stop_token_ids=(stop,)))
    assert got == Generation(free.token_ids[:cut], free.logprobs[:cut], "stop", (WeightSpan(0, 0, cut),))


async def test_a_stop_string_ends_it_at_the_token_that_completes_it(engine: VLLMEngine) -> None:
    decode = tiny_tokenizer().decode
    free = await engine.generate("free", [5, 9], Sampling(max_tokens=400, seed=8))
    text = decode(free.token_ids)
    for at, length in ((10, 2), (300, 3), (0, 1)):
        stop = text[at : at + length]
        end = text.find(stop) + length
        got = await engine.generate("s", [5, 9], Sampling(max_tokens=400, seed=8, stop=("never seen", stop)))
        tokens = next(n for n in range(1, 401) if len(decode(free.token_ids[:n])) >= end)
        assert got == Generation(
            free.token_ids[:tokens], free.logprobs[:tokens], "stop", (WeightSpan(0, 0, tokens),)
        ), stop
    assert (await engine.generate("s", [5, 9], Sampling(max_tokens=400, seed=8, stop=("never seen",)))) == free


async def test_a_completion_is_cut_at_the_model_s_length(engine: VLLMEngine) -> None:
    got = await engine.generate("r", [5] * 500, Sampling(max_tokens=500, seed=0))
    assert (engine.max_model_len, len(got.token_ids), got.finish_reason) == (512, 12, "length")
    got = await engine.generate("r", [5] * 511, Sampling(max_tokens=500, seed=0))
    assert (len(got.token_ids), got.finish_reason) == (1, "length")


async def test_a_request_that_cannot_run_is_refused(engine: VLLMEngine) -> None:
    one = Sampling(max_tokens=1)
    for prompt, sampling, message in (
        ([], one, "has 0 tokens; allowed are 1 to 511"),
        ([5] * 512, one, "has 512 tokens"),
        ([5, 103], one, "token 103 is not in the vocabulary"),
        ([-1, 5], one, "token -1 is not in the vocabulary"),
        ([5], Sampling(max_tokens=0), "max_tokens is 0"),
        ([5], Sampling(max_tokens=1, temperature=0.001), "temperature is 0.001; allowed: 0"),
        ([5], Sampling(max_tokens=1, stop=("",)), "stop"),
        ([5], Sampling(max_tokens=1, stop_token_ids=(103,)), "stop_token_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            await engine.generate("r", prompt, sampling)
    assert len((await engine.generate("r", [5], Sampling(max_tokens=3))).token_ids) == 3


async def test_an_abort_returns_what_was_sampled(engine: VLLMEngine, model_dir: Path) -> None:
    sampling = Sampling(max_tokens=480, seed=1)
    results: dict[str, Generation] = {}

    async def run(name: str) -> None:
        results[name] = await engine.generate(name, [5, 6], sampling)

    with anyio.fail_after(60):
        await engine.pause()
        async with anyio.create_task_group() as group:
            group.start_soon(run, "waiting")
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(ValueError, match="running already"):
                await engine.generate("waiting", [5], sampling)
            await engine.abort("unknown")
            await engine.abort("waiting")
        async with anyio.create_task_group() as group:
            group.start_soon(run, "running")
            await engine.resume()
            await tokens_generated(engine, 30)
            await engine.abort("running")

    assert results["waiting"] == Generation([], [], "abort", ())
    running = results["running"]
    assert running.finish_reason == "abort"
    assert 0 < len(running.token_ids) < 480
    assert worst_error({0: load(model_dir)}, [5, 6], running, sampling) <= TOLERANCE


async def test_a_pause_freezes_requests_and_a_cancelled_one_is_taken_back(engine: VLLMEngine) -> None:
    results: list[Generation] = []

    async def run() -> None:
        results.append(await engine.generate("r", [5, 6], Sampling(max_tokens=400, seed=1)))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await tokens_generated(engine, 20)
            await engine.pause()
            done = engine.stats().generated_tokens
            await anyio.sleep(0.1)
            assert engine.stats().generated_tokens - done <= 1, "one step's tokens may have been on their way"
            assert not results
            await engine.resume()
        with anyio.move_on_after(0):
            await engine.pause()
        assert len((await engine.generate("r", [5], Sampling(max_tokens=5))).token_ids) == 5
    assert len(results[0].token_ids) == 400


async def test_cancelled_callers_leave_nothing_in_the_engine(engine: VLLMEngine, model_dir: Path) -> None:
    rng = random.Random(5)

    async def impatient(i: int) -> None:
        sampling = Sampling(max_tokens=rng.randint(1, 400), stop=("zz",) if i % 4 == 0 else ())
        with anyio.move_on_after(rng.choice([0, rng.uniform(0, 0.02), rng.uniform(0, 0.4)])):
            await engine.generate(f"r{i}", [5] * rng.randint(1, 40), sampling)

    async with anyio.create_task_group() as group:
        for i in range(300):
            group.start_soon(impatient, i)
            if i % 20 == 0:
                await anyio.sleep(0.01)
    llm = engine._core.llm
    assert (llm.get_num_unfinished_requests(), engine.stats().running, engine.stats().waiting) == (0, 0, 0)
    with anyio.fail_after(60):
        # The core says after a step what it holds; this one takes the last step there is.
        await engine.generate("last", [5], Sampling(max_tokens=2))
        while engine._stats.running or engine._stats.kv_usage:
            await anyio.sleep(0.01)
    asked = requests(8)
    results = await generate_all(engine, asked)
    models = {0: load(model_dir)}
    assert max(worst_error(models, p, g, s) for (p, s), g in zip(asked, results, strict=True)) <= TOLERANCE
