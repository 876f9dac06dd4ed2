"""A tokenizer under which a message cannot spell control tokens: what looks like one in a message is ordinary text.

Tokenizers turn `<|im_end|>` into the token that ends a turn wherever it stands, so a tool's output could end its own turn
and speak for others. Here a message's spelling of a control token is broken by a mark that the tokenizer never sees: the
text is encoded in parts, none of which spells a control token. The model reads the same characters.
"""

from __future__ import annotations

import copy
import re
from typing import Any, cast

from workers.generation.text_bound import TextBound

BREAK = "\ufdd0"
"""A noncharacter of Unicode, which no text has a use for; one that a message holds is dropped."""
_THINK = frozenset({"<think>", "</think>"})
"""Templates look for these in the assistant's own words; they end no turn."""


class LiteralTokenizer:
    """A Hugging Face tokenizer that encodes `guarded` text literally; everything else is the tokenizer's own."""

    def __init__(self, tokenizer: Any) -> None:
        self._inner = tokenizer
        self.bound = TextBound(tokenizer)
        """Of each text that is encoded; raises TextTooLong."""
        control = {str(t) for t in tokenizer.all_special_tokens}
        control |= {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._control = [
            re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")
            for words in (control, control - _THINK)
        ]

    def guarded(self, value: Any) -> Any:
        """A message, a tool specification or any JSON-like value, with every control token in its texts broken."""
        own_words = isinstance(value, dict) and cast("dict[str, Any]", value).get("role") == "assistant"
        return self._guarded(value, self._control[own_words])

    def _guarded(self, value: Any, control: re.Pattern[str]) -> Any:
        match value:
            case str():
                return control.sub(lambda found: f"{found[0][:1]}{BREAK}{found[0][1:]}", value.replace(BREAK, ""))
            case list() | tuple():
                return [self._guarded(item, control) for item in cast("list[Any]", value)]
            case dict():
                return {key: self._guarded(item, control) for key, item in cast("dict[str, Any]", value).items()}
            case _:
                return value

    def plain(self) -> Any:
        """A copy of the tokenizer itself, for use beside this one: to it, what spells a control token is one."""
        return copy.deepcopy(self._inner)

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(self(text, **options)["input_ids"])

    def __call__(self, text: str, *, return_offsets_mapping: bool = False, **options: Any) -> dict[str, Any]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        parts = text.split(BREAK)
        self.bound.check(*parts)
        for part in parts:
            encoded = self._inner(part, return_offsets_mapping=return_offsets_mapping, **options)
            ids += encoded["input_ids"]
            if return_offsets_mapping:
                offsets += [(start + first, start + last) for first, last in encoded["offset_mapping"]]
            start += len(part) + len(BREAK)
        return {"input_ids": ids, "offset_mapping": offsets} if return_offsets_mapping else {"input_ids": ids}

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        text = self._inner.apply_chat_template(messages, **(options | {"tokenize": False}))
        return self.encode(text, add_special_tokens=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
