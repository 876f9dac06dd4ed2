"""How a call over HTTP is sampled: as the run's configuration says, unless that lets requests decide.

What is trained is weighted by how probable it was under the run's sampling. A request that samples otherwise would be
trained on as if it had not, so with `fixed` it is refused instead of being answered in another way than asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from ledger.http.bodies import ChatBody, CompletionBody
from ledger.http.errors import refused
from ledger.records import Sampling

SamplingMode = Literal["fixed", "request"]


class SamplingRules:
    """`run` is the run's own sampling; its `max_tokens` bounds every call, and a request may only lower it.

    `own(rollout_id)` is that of a rollout which is sampled otherwise, and None for all others.
    """

    def __init__(
        self, run: Sampling, mode: SamplingMode, own: Callable[[str], Sampling | None] = lambda _: None
    ) -> None:
        self._run = run
        self._mode: SamplingMode = mode
        self._own = own

    def of(self, rollout_id: str, body: ChatBody | CompletionBody) -> Sampling:
        """The sampling of a request. Raises ApiError 400 for one that the run does not allow."""
        run = self._own(rollout_id) or self._run
        top_k = None if body.top_k is None else max(body.top_k, 0)
        asked = {"temperature": body.temperature, "top_p": body.top_p, "top_k": top_k}
        if self._mode == "fixed":
            for name, value in asked.items():
                fixed = getattr(run, name)
                if value is not None and value != fixed:
                    raise refused(
                        f"{name} is {value:g}, but this run samples with {name} {fixed:g}, for which its training corrects: "
                        f"leave {name} out, change rollout.{name}, or set gate.sampling: request in its configuration",
                        param=name,
                        code="fixed_by_the_run",
                    )
            asked = {}
        limit = run.max_tokens if body.limit is None else min(body.limit, run.max_tokens)
        changes = {name: value for name, value in asked.items() if value is not None}
        return replace(run, max_tokens=limit, stop=body.stops, seed=body.seed, **changes)
