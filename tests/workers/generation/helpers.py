"""What the engine's tests compare with: a plain forward pass of transformers, and the textbook sampling filters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ledger.records import Sampling
from workers.generation.api import EngineSpec
from workers.generation.engine import Generation
from workers.generation.stop_text import Decode
from workers.generation.torch_engine import TorchEngine


@asynccontextmanager
async def running_engine(
    path: Path, *, stop: Sequence[int] = (), seed: int = 0, decode: Decode | None = None, **spec: Any
) -> AsyncIterator[TorchEngine]:
    engine = await TorchEngine.start(path, EngineSpec(**spec), stop_token_ids=stop, seed=seed, decode=decode)
    try:
        with anyio.fail_after(60):
            yield engine
    finally:
        await engine.aclose()


def freeze_after(engine: TorchEngine, tokens: int) -> None:
    """Have the engine stand still once it has generated `tokens` more tokens, as if paused just then; see `frozen`."""
    target = engine.stats().generated_tokens + tokens

    def step() -> None:
        TorchEngine._step(engine)
        if engine._generated >= target:
            engine._paused = True
            del engine._step

    engine._step = step


async def frozen(engine: TorchEngine) -> None:
    """Wait for the standstill, which `engine.resume` ends."""
    while not engine._paused:
        await anyio.sleep(0.001)


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reference_logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> list[float]:
    """Each token's logprob under the distribution it should have been drawn from, one unbatched forward pass, no cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].double().numpy()
    rows = logits[len(prompt) - 1 : -1] / (sampling.temperature or 1.0)
    return [float(distribution(row, sampling)[token]) for row, token in zip(rows, tokens, strict=True)]


def distribution(scaled: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Logprobs [vocab] after top-k and top-p, from logits that were divided by the temperature already."""
    order = sorted(range(len(scaled)), key=lambda t: (-scaled[t], t))
    if sampling.temperature and sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.temperature and sampling.top_p < 1:
        probs, kept, mass = softmax(scaled[order]), 0, 0.0
        while mass < sampling.top_p and kept < len(order):
            mass += probs[kept]
            kept += 1
        order = order[:kept]
    out = np.full(len(scaled), -np.inf)
    out[order] = np.log(softmax(scaled[order]))
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def worst_error(models: dict[int, Any], prompt: Sequence[int], got: Generation, sampling: Sampling) -> float:
    """Largest logprob error of a generation, each token held against the model of its own weight version."""
    assert len(got.logprobs) == len(got.token_ids)
    assert [span.start for span in got.weight_spans] == [0, *[span.end for span in got.weight_spans]][:-1]
    assert [span.end for span in got.weight_spans][-1:] == ([len(got.token_ids)] if got.token_ids else [])
    worst = 0.0
    for version, start, end in ((s.version, s.start, s.end) for s in got.weight_spans):
        reference = reference_logprobs(models[version], prompt, got.token_ids, sampling)
        worst = max(worst, *(abs(a - b) for a, b in zip(reference[start:end], got.logprobs[start:end], strict=True)))
    return worst
