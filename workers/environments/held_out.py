"""Which questions are set aside for evaluation: a share of all, chosen by their text, so that no seed trains on them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

MAX_SKIPPED = 10_000
"""Candidates in a row that may be passed over before the side that is asked for counts as empty."""


class Split:
    """`share` of all questions, at least 0 and below 1, is held out: those whose hash is small."""

    def __init__(self, share: float) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"held_out_share: a number >= 0 and < 1; got {share}")
        self._share = share

    def holds_out(self, question: str) -> bool:
        digest = hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") < self._share * 2**64

    def trained(self, items: Iterable[Item], question: Callable[[Item], str]) -> Iterator[Item]:
        """Those that are not held out. Raises ValueError when there seem to be none."""
        skipped = 0
        for item in items:
            skipped = skipped + 1 if self.holds_out(question(item)) else 0
            if skipped == 0:
                yield item
            elif skipped == MAX_SKIPPED:
                raise ValueError(f"held_out_share: {self._share:g} leaves no question to train on")

    def held_out(self, items: Iterable[Item], question: Callable[[Item], str]) -> Iterator[Item]:
        """Those that are held out, each question once; ends when no new one comes. Raises ValueError for a share of 0."""
        if self._share == 0:
            raise ValueError("held_out_share: is 0, so that no questions are set aside; set it, to 0.1 for example")
        seen: set[str] = set()
        skipped = 0
        for item in items:
            text = question(item)
            if self.holds_out(text) and text not in seen:
                seen.add(text)
                skipped = 0
                yield item
                continue
            skipped += 1
            if skipped == MAX_SKIPPED:
                return
