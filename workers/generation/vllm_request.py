"""One completion in a vLLM core: added, its outputs gathered, and taken out again if that is interrupted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from ledger.records import FinishReason, Sampling, WeightSpan
from workers.generation.engine import Generation
from workers.generation.stop_text import StopText
from workers.generation.vllm_core import ASK_S, Core, CoreDied
from workers.generation.vllm_names import vllm

_SEEDS = 1 << 63


def sampling_params(sampling: Sampling, *, stop_token_ids: Iterable[int], vocab_size: int) -> Any:
    """vLLM's SamplingParams. Stop strings are looked for here, not by vLLM: it would have to know the tokenizer."""
    kind = vllm("sampling_params:RequestOutputKind")
    return vllm(":SamplingParams")(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, vocab_size),
        seed=None if sampling.seed is None else sampling.seed % _SEEDS,
        stop_token_ids=sorted({*stop_token_ids, *sampling.stop_token_ids}),
        ignore_eos=True,  # the model's end tokens are among the stop tokens
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=kind.DELTA if sampling.stop else kind.FINAL_ONLY,
        skip_clone=True,
    )


@dataclass(eq=False)
class Request:
    """A completion in the making."""

    request_id: str
    core: Core | None = None
    """What it is in."""
    aborted: bool = False

    async def abort(self) -> None:
        """Have it return what it has, also when it is being added. Raises CoreDied."""
        self.aborted = True
        if self.core is not None:
            await self.core.ask(self.core.llm.abort(self.request_id))


async def complete(
    core: Core,
    request: Request,
    prompt: Sequence[int],
    params: Any,
    stop_text: StopText | None = None,
    *,
    begun: Sequence[int] = (),
) -> Generation:
    """Run one request, its completion having `begun`. Raises CoreDied, and vLLM's own error for a request that it refuses.

    A cancellation leaves nothing of it in the core.
    """
    add = core.llm.add_request(request.request_id, vllm("inputs:tokens_input")([*prompt, *begun]), params)
    # Shielded: vLLM remembers a request before it has sent it, and one that is half-added could not be taken out.
    with anyio.fail_after(ASK_S, shield=True):
        collector = await core.ask(add)
    try:
        request.core = core
        if request.aborted:
            await request.abort()
        return await _gather(core, request.request_id, collector, stop_text, begun)
    except CoreDied:
        raise
    except BaseException:
        with anyio.fail_after(ASK_S, shield=True):
            await core.ask(core.llm.abort(collector.request_id, internal=True))
        raise


async def _gather(
    core: Core, request_id: str, collector: Any, stop_text: StopText | None, begun: Sequence[int]
) -> Generation:
    tokens: list[int] = []
    logprobs: list[float] = []
    end: int | None = None
    while True:
        output = collector.get_nowait() or await core.ask(collector.get(), within_s=math.inf)
        completion = output.outputs[0]
        known = len(tokens)
        tokens += completion.token_ids
        if completion.logprobs is not None:
            flat = completion.logprobs
            logprobs += [flat.logprobs[start] for start in flat.start_indices]
        if stop_text is not None and end is None:
            # In a thread: decoding waits for the tokenizer's lock. What comes meanwhile is merged into the next output.
            end = await anyio.to_thread.run_sync(partial(_spelled_at, stop_text, [*begun, *tokens], len(begun) + known))
            end = None if end is None else end - len(begun)
            if end is not None and not output.finished:
                await core.ask(core.llm.abort(request_id))
        if output.finished:
            break
    reason: FinishReason = completion.finish_reason if end is None else "stop"
    end = len(tokens) if end is None else end
    spans = tuple(
        WeightSpan(int(span.version), span.start, min(span.end, end))
        for span in completion.weight_versions or ()
        if span.start < end
    )
    return Generation(tokens[:end], logprobs[:end], reason, spans)


def _spelled_at(stop_text: StopText, tokens: list[int], known: int) -> int | None:
    """How many tokens it takes to spell a stop string, if the first `known` do not and all together do."""
    return next((n for n in range(known + 1, len(tokens) + 1) if stop_text.reached(tokens[:n], 0)), None)
