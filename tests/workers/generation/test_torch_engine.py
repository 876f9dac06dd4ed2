"""The torch engine against plain transformers: the same distributions, whatever joins, leaves or changes meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from ledger.records import Sampling, WeightSpan
from tests.models import END, tiny_lm, tiny_model
from tests.workers.generation.helpers import (
    distribution,
    freeze_after,
    frozen,
    load,
    reference_logprobs,
    running_engine,
    worst_error,
)
from workers.generation.engine import EngineDead, Generation
from workers.generation.torch_engine import TorchEngine
from workers.host import StartupError
from workers.weights import save_weights

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", seed=1)


def prompts(n: int, *, seed: int = 0, longest: int = 20) -> list[list[int]]:
    """Prompts of different lengths, every third one a repetition of the one before."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for i in range(n):
        made.append(made[-1] if i % 3 == 2 else [rng.randrange(103) for _ in range(rng.randint(1, longest))])
    return made


async def generate_all(
    engine: TorchEngine, requests: Sequence[tuple[list[int], Sampling]], *, stagger: bool = False
) -> list[Generation]:
    """Run requests together; with `stagger` each starts after one more token has been generated."""
    results: dict[int, Generation] = {}

    async def one(i: int, prompt: list[int], sampling: Sampling) -> None:
        if stagger:
            await tokens_generated(engine, i)
        results[i] = await engine.generate(f"r{i}", prompt, sampling)

    async with anyio.create_task_group() as group:
        for i, (prompt, sampling) in enumerate(requests):
            group.start_soon(one, i, prompt, sampling)
    return [results[i] for i in range(len(requests))]


async def tokens_generated(engine: TorchEngine, n: int) -> None:
    while engine.stats().generated_tokens < n:
        await anyio.sleep(0.0005)


SAMPLINGS = [
    Sampling(max_tokens=40, seed=0),
    Sampling(max_tokens=9, seed=1, temperature=0.7),
    Sampling(max_tokens=17, seed=2, top_k=5),
    Sampling(max_tokens=4, seed=3, top_p=0.8),
    Sampling(max_tokens=25, seed=4, temperature=0.7, top_k=20, top_p=0.9),
    Sampling(max_tokens=13, temperature=0),
    Sampling(max_tokens=1, seed=5, temperature=1.3),
]


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("llama", {"tie_word_embeddings": False}, id="llama-untied"),
        pytest.param("qwen2", {}, id="qwen2"),
        pytest.param("qwen3", {}, id="qwen3"),
        pytest.param("smollm3", {}, id="smollm3"),
        pytest.param("mistral", {"sliding_window": 6}, id="sliding-window"),
        pytest.param(
            "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, id="mixed-windows"
        ),
    ],
)
async def test_logprobs_are_those_of_a_plain_forward_pass(tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    path = tiny_model(tmp_path, arch=arch, seed=1, **overrides)
    requests = [(prompt, SAMPLINGS[i % len(SAMPLINGS)]) for i, prompt in enumerate(prompts(21))]
    async with running_engine(path, max_batch=6) as engine:
        results = await generate_all(engine, requests, stagger=True)
    models = {0: load(path)}
    worst = max(worst_error(models, p, got, s) for (p, s), got in zip(requests, results, strict=True))
    print(f"largest logprob error, {arch} {overrides}: {worst:.2e}")
    assert worst <= TOLERANCE
    for (_, sampling), got in zip(requests, results, strict=True):
        assert (len(got.token_ids), got.finish_reason) == (sampling.max_tokens, "length")


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [("llama", {}), ("llama", {"tie_word_embeddings": False}), ("qwen3", {})],
    ids=["tied", "untied", "qwen3"],
)
async def test_weights_change_in_mid_generation(tmp_path: Path, arch: str, overrides: dict[str, Any]) -> None:
    path = tiny_model(tmp_path / "0", arch=arch, seed=1, **overrides)
    models = {0: load(path)}
    for version, seed in ((7, 2), (9, 3)):
        models[version] = tiny_lm(arch, seed=seed, **overrides)
        save_weights(models[version], tmp_path / str(version))
    requests = [(p, Sampling(max_tokens=120, seed=i, temperature=(1, 0.7)[i % 2])) for i, p in enumerate(prompts(10))]
    late = (prompts(1, seed=9)[0], Sampling(max_tokens=5, seed=1))
    results: list[Generation] = []

    async with running_engine(path, max_batch=8) as engine:
        async with anyio.create_task_group() as group:

            async def run() -> None:
                results.extend(await generate_all(engine, requests))

            freeze_after(engine, 80)
            group.start_soon(run)
            await frozen(engine)
            await engine.load_weights(tmp_path / "7", 7)
            assert engine.weight_version == engine.stats().weight_version == 7
            freeze_after(engine, 80)
            await engine.resume()
            await frozen(engine)
            await engine.load_weights(tmp_path / "9", 9)
            await engine.resume()
        requests.append(late)
        results.append(await engine.generate("late", *late))

    worst = max(worst_error(models, p, got, s) for (p, s), got in zip(requests, results, strict=True))
    print(f"largest logprob error across weight changes, {arch} {overrides}: {worst:.2e}")
    assert worst <= TOLERANCE
    assert [s.version for s in results[0].weight_spans] == [0, 7, 9], "it ran through both changes"
    assert results[-1].weight_spans == (WeightSpan(9, 0, 5),)
    for (prompt, sampling), got in zip(requests, results, strict=True):
        for before, after in zip(got.weight_spans, got.weight_spans[1:], strict=False):
            by_version = {
                v: reference_logprobs(models[v], prompt, got.token_ids, sampling)
                for v in (before.version, after.version)
            }
            flip = after.start
            assert abs(by_version[after.version][flip - 1] - got.logprobs[flip - 1]) > TOLERANCE
            assert abs(by_version[before.version][flip] - got.logprobs[flip]) > TOLERANCE


async def test_a_seeded_request_samples_the_same_alone_and_in_a_crowd(model_dir: Path) -> None:
    requests = [(prompt, SAMPLINGS[i % len(SAMPLINGS)]) for i, prompt in enumerate(prompts(24))]
    async with running_engine(model_dir, max_batch=5) as engine:
        together = await generate_all(engine, requests)
        alone = [await engine.generate("alone", *request) for request in requests]
    for a, b in zip(together, alone, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


async def test_requests_without_a_seed_follow_the_engine_seed(model_dir: Path) -> None:
    async def two(seed: int) -> list[list[int]]:
        async with running_engine(model_dir, seed=seed) as engine:
            return [(await engine.generate("r", [5], Sampling(max_tokens=20))).token_ids for _ in range(2)]

    first, again, other = await two(3), await two(3), await two(4)
    assert first == again
    assert first[0] != first[1]
    assert first != other


async def test_greedy_is_what_transformers_generates(model_dir: Path) -> None:
    model = load(model_dir)
    async with running_engine(model_dir, stop=[END]) as engine:
        results = await generate_all(engine, [(p, Sampling(max_tokens=30, temperature=0)) for p in prompts(9)])
    for prompt, got in zip(prompts(9), results, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=30,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=0,
        )
        assert got.token_ids == whole[0, len(prompt) :].tolist()


async def test_sampled_frequencies_are_the_probabilities(model_dir: Path) -> None:
    n, prompt = 4000, [5, 40, 41]
    with torch.no_grad():
        logits = load(model_dir)(torch.tensor([prompt])).logits[0, -1].double().numpy()
    for sampling in (Sampling(max_tokens=1), Sampling(max_tokens=1, temperature=0.7, top_k=30, top_p=0.95)):
        async with running_engine(model_dir, max_batch=512, seed=11) as engine:
            results = await generate_all(engine, [(prompt, sampling)] * n)
        counts = Counter(got.token_ids[0] for got in results)
        expected = n * np.exp(distribution(logits / sampling.temperature, sampling))
        assert all(expected[token] > 0 for token in counts), "no token outside top-k and top-p"
        common = [t for t in range(103) if expected[t] >= 5]
        chi2 = sum((counts[t] - expected[t]) ** 2 / expected[t] for t in common)
        degrees = len(common) - 1
        assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


async def test_a_stop_token_ends_the_request_and_is_kept(model_dir: Path) -> None:
    async with running_engine(model_dir) as engine:
        free = await engine.generate("free", [5, 9], Sampling(max_tokens=30, seed=3))
        stop = free.token_ids[11]
        cut = free.token_ids.index(stop) + 1
        own = await engine.generate("own", [5, 9], Sampling(max_tokens=30, seed=3, stop_token_ids=(stop,)))
    async with running_engine(model_dir, stop=[stop]) as engine:
        models = await engine.generate("models", [5, 9], Sampling(max_tokens=30, seed=3))
    for got in (own, models):
        assert got.finish_reason == "stop"
        assert got.token_ids == free.token_ids[:cut]
        assert len(got.logprobs) == cut
        assert got.weight_spans == (WeightSpan(0, 0, cut),)


async def test_a_completion_is_cut_at_max_model_len(model_dir: Path) -> None:
    async with running_engine(model_dir, max_model_len=90) as engine:
        assert engine.max_model_len == 90
        got = await engine.generate("r", [5] * 20, Sampling(max_tokens=500, seed=0))
        assert (len(got.token_ids), got.finish_reason) == (70, "length")
        assert worst_error({0: load(model_dir)}, [5] * 20, got, Sampling(max_tokens=1)) <= TOLERANCE
        got = await engine.generate("r", [5] * 89, Sampling(max_tokens=500, seed=0))
        assert (len(got.token_ids), got.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(max_tokens=1), "has 0 tokens; allowed are 1 to 511"),
        ([5] * 512, Sampling(max_tokens=1), "has 512 tokens"),
        ([5, 103], Sampling(max_tokens=1), "token 103 is not in the vocabulary"),
        ([-1, 5], Sampling(max_tokens=1), "token -1 is not in the vocabulary"),
        ([5], Sampling(max_tokens=0), "max_tokens is 0"),
        ([5], Sampling(max_tokens=1, temperature=-1), "temperature is -1"),
        ([5], Sampling(max_tokens=1, temperature=float("nan")), "temperature is nan"),
        ([5], Sampling(max_tokens=1, top_p=0), "top_p is 0"),
        ([5], Sampling(max_tokens=1, top_k=-1), "top_k is -1"),
        ([5], Sampling(max_tokens=1, stop_token_ids=(103,)), "stop_token_ids"),
    ],
)
async def test_a_request_that_cannot_run_is_refused(
    model_dir: Path, prompt: list[int], sampling: Sampling, message: str
) -> None:
    async with running_engine(model_dir) as engine:
        with pytest.raises(ValueError, match=message):
            await engine.generate("r", prompt, sampling)
        assert len((await engine.generate("r", [5], Sampling(max_tokens=3))).token_ids) == 3


async def test_an_abort_returns_what_was_sampled(model_dir: Path) -> None:
    sampling = Sampling(max_tokens=400, seed=1)
    results: dict[str, Generation] = {}

    async with running_engine(model_dir, max_batch=1) as engine, anyio.create_task_group() as group:

        async def run(name: str) -> None:
            results[name] = await engine.generate(name, [5, 6], sampling)

        group.start_soon(run, "running")
        await tokens_generated(engine, 30)
        group.start_soon(run, "waiting")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ValueError, match="running already"):
            await engine.generate("waiting", [5], sampling)
        assert (engine.stats().running, engine.stats().waiting) == (1, 1)
        await engine.abort("unknown")
        await engine.abort("waiting")
        await engine.abort("running")

    waiting, running = results["waiting"], results["running"]
    assert waiting == Generation([], [], "abort", ())
    assert running.finish_reason == "abort"
    assert 30 <= len(running.token_ids) < 400
    assert worst_error({0: load(model_dir)}, [5, 6], running, sampling) <= TOLERANCE


async def test_cancelled_callers_leave_nothing_in_the_engine(model_dir: Path) -> None:
    rng = random.Random(5)
    async with running_engine(model_dir, max_batch=4) as engine:

        async def impatient(i: int) -> None:
            with anyio.move_on_after(rng.choice([0, rng.uniform(0, 0.02), rng.uniform(0, 0.2)])):
                await engine.generate(f"r{i}", [5] * rng.randint(1, 40), Sampling(max_tokens=rng.randint(1, 200)))

        async with anyio.create_task_group() as group:
            for i in range(200):
                group.start_soon(impatient, i)
                if i % 20 == 0:
                    await anyio.sleep(0.005)
        await engine.pause()  # between two steps
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
        await engine.resume()
        requests = [(p, Sampling(max_tokens=10, seed=i)) for i, p in enumerate(prompts(8))]
        results = await generate_all(engine, requests)
        models = {0: load(model_dir)}
        assert max(worst_error(models, p, g, s) for (p, s), g in zip(requests, results, strict=True)) <= TOLERANCE


async def test_a_pause_freezes_requests_and_a_resume_continues_them(model_dir: Path, tmp_path: Path) -> None:
    save_weights(tiny_lm(seed=2), tmp_path / "w")
    results: dict[str, Generation] = {}

    async with running_engine(model_dir, max_batch=4) as engine, anyio.create_task_group() as group:

        async def run(name: str) -> None:
            results[name] = await engine.generate(name, [5, 6], Sampling(max_tokens=100, seed=1))

        freeze_after(engine, 20)
        group.start_soon(run, "kept")
        group.start_soon(run, "aborted")
        await frozen(engine)
        await engine.pause()
        done = engine.stats().generated_tokens
        group.start_soon(run, "queued")
        await anyio.sleep(0.05)
        assert engine.stats().generated_tokens == done
        assert (engine.stats().running, engine.stats().waiting) == (2, 1)
        await engine.abort("aborted")
        await engine.load_weights(tmp_path / "w", 1)
        assert engine.stats().generated_tokens == done
        await engine.resume()
    assert results["aborted"].finish_reason == "abort"
    assert [s.version for s in results["aborted"].weight_spans] == [0]
    assert [s.version for s in results["kept"].weight_spans] == [0, 1]
    assert [s.version for s in results["queued"].weight_spans] == [1]


async def test_a_cancelled_pause_is_taken_back(model_dir: Path) -> None:
    async with running_engine(model_dir) as engine:
        with anyio.move_on_after(0) as scope:
            await engine.pause()
        assert scope.cancelled_caught
        assert len((await engine.generate("r", [5], Sampling(max_tokens=5))).token_ids) == 5


async def test_a_weights_file_that_does_not_fit_changes_nothing(model_dir: Path, tmp_path: Path) -> None:
    save_weights(tiny_lm(seed=2, tie_word_embeddings=False), tmp_path / "untied")
    save_weights(tiny_lm(seed=2), tmp_path / "half", dtype=torch.bfloat16)
    sampling = Sampling(max_tokens=50, seed=0)
    got: list[Generation] = []

    async with running_engine(model_dir) as engine, anyio.create_task_group() as group:

        async def run() -> None:
            got.append(await engine.generate("r", [5, 6, 7], sampling))

        freeze_after(engine, 5)
        group.start_soon(run)
        await frozen(engine)
        for name, message in (
            ("untied", "not in the model lm_head.weight"),
            ("half", "BF16"),
            ("none", "No such file"),
        ):
            with pytest.raises(ValueError, match=message):
                await engine.load_weights(tmp_path / name, 1)
            assert engine.weight_version == 0
        await engine.resume()
    assert got[0].weight_spans == (WeightSpan(0, 0, 50),)
    assert worst_error({0: load(model_dir)}, [5, 6, 7], got[0], sampling) <= TOLERANCE


async def test_a_failure_in_the_compute_thread_fails_every_caller_at_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(model_dir, max_batch=2) as engine:
        decode = engine._runner.decode
        monkeypatch.setattr(
            engine._runner,
            "decode",
            lambda t, p: decode(t, p) if max(p) < 20 else 1 / 0,  # fails after some steps
        )
        causes: list[BaseException | None] = []

        async def run(name: str) -> None:
            with pytest.raises(EngineDead, match="ZeroDivisionError") as failure:
                await engine.generate(name, [5], Sampling(max_tokens=100))
            causes.append(failure.value.__cause__)

        async with anyio.create_task_group() as group:
            for i in range(5):
                group.start_soon(run, f"r{i}")
        assert [type(cause) for cause in causes] == [ZeroDivisionError] * 5
        for late in (engine.generate("late", [5], Sampling(max_tokens=1)), engine.pause(), engine.resume()):
            with pytest.raises(EngineDead):
                await late


async def test_closing_ends_requests_and_is_idempotent(model_dir: Path) -> None:
    results: list[Generation] = []
    async with running_engine(model_dir, max_batch=1) as engine:
        async with anyio.create_task_group() as group:

            async def run(name: str) -> None:
                results.append(await engine.generate(name, [5], Sampling(max_tokens=500)))

            group.start_soon(run, "running")
            group.start_soon(run, "waiting")
            await tokens_generated(engine, 10)
            await engine.aclose()
        await engine.aclose()
        with pytest.raises(EngineDead, match="closed"):
            await engine.generate("late", [5], Sampling(max_tokens=1))
    assert [got.finish_reason for got in results] == ["abort", "abort"]


async def test_half_precision_models_are_served_in_their_dtype(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, seed=1)
    async with running_engine(path, dtype="bfloat16") as engine:
        got = await engine.generate("r", [5, 6], Sampling(max_tokens=20, seed=0))
        save_weights(tiny_lm(seed=2), tmp_path / "w", dtype=torch.bfloat16)
        await engine.load_weights(tmp_path / "w", 1)
    assert worst_error({0: load(path)}, [5, 6], got, Sampling(max_tokens=1)) < 0.5


def without(name: str) -> Any:
    def change(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(path / "model.safetensors")
        del tensors[name]
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return change


def garbled(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x00" * 100)


def pickled(path: Path) -> None:
    torch.save(load(path).state_dict(), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("overrides", "change", "spec", "message"),
    [
        ({}, lambda path: (path / "config.json").unlink(), {}, "has no config.json"),
        ({}, lambda path: (path / "model.safetensors").unlink(), {}, "cannot be loaded"),
        ({}, garbled, {}, "cannot be loaded"),
        ({}, pickled, {}, "cannot be loaded"),
        ({}, without("model.layers.0.mlp.up_proj.weight"), {}, "missing or misshapen, e.g. model.layers.0.mlp.up_proj"),
        ({}, None, {"max_model_len": 513}, "max_model_len is 513; the model allows 2 to 512"),
        ({}, None, {"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, None, {}, "dynamic rotary"),
    ],
)
async def test_a_model_that_cannot_be_served_is_refused_at_start(
    tmp_path: Path, overrides: dict[str, Any], change: Any, spec: dict[str, Any], message: str
) -> None:
    path = tiny_model(tmp_path, **overrides)
    if change is not None:
        change(path)
    with anyio.fail_after(60), pytest.raises(StartupError, match=message):
        async with running_engine(path, **spec):
            pass


async def test_a_model_that_ignores_our_cache_is_refused_at_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.generation.model_runner import ModelRunner

    mask = ModelRunner._decode_mask
    monkeypatch.setattr(ModelRunner, "_decode_mask", lambda self, at, length: mask(self, at - 1, length))
    with pytest.raises(StartupError, match="off by"):
        async with running_engine(model_dir):
            pass
