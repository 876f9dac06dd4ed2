"""Text and tokens without a chat template: for raw prompts, stop strings, and tokens that an agent wants to see."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

import anyio.to_thread

from ledger.records import TokenLogprob
from workers.generation.engine import Generation
from workers.generation.text_bound import TextBound


class PlainText:
    """Holds a tokenizer of its own, for any thread: tokenizers are not safe to share without a lock."""

    def __init__(self, tokenizer: Any, bound: TextBound) -> None:
        self._tokenizer = tokenizer
        self._bound = bound
        self._lock = Lock()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out. Blocks for as long as it takes, some microseconds per token."""
        with self._lock:
            return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    async def tokens(self, text: str) -> list[int]:
        """Token ids of a raw prompt; what spells a control token in it is one. A beginning-of-text token comes first if the
        tokenizer puts one. Raises TextTooLong."""
        self._bound.check(text)
        return await anyio.to_thread.run_sync(self._encode, text)

    async def text(self, tokens: Sequence[int]) -> str:
        return await anyio.to_thread.run_sync(self.decode, tokens)

    async def logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...]:
        """The generated tokens, each with its own text (special ones are shown) and logprob."""
        return await anyio.to_thread.run_sync(self._logprobs, generation)

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text)["input_ids"])

    def _logprobs(self, generation: Generation) -> tuple[TokenLogprob, ...]:
        with self._lock:
            texts: list[str] = [self._tokenizer.decode([token]) for token in generation.token_ids]
        return tuple(map(TokenLogprob, texts, generation.logprobs))
