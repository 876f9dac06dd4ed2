"""What is wrong with a configuration, as data: where, what stands there, what is allowed, how to mend it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from msgspec import Struct

_LONGEST_VALUE = 80


class Problem(Struct, frozen=True, kw_only=True):
    path: str
    """The key, as in `rollout.group_size`; "" when it is the file as a whole."""
    what: str
    """What is wrong, with the value in it."""
    allowed: str = ""
    """What may stand there; of a rule between keys: the rule, and why it holds."""
    nearest: str | None = None
    """The valid name or word that comes closest to an unknown one."""
    remedy: str = ""
    """What to write or do."""
    warning: bool = False
    """The run can go on, but probably not as meant."""
    source: str = ""
    """Where the value came from: `run.yaml line 12`, or the `--set` argument. "" when no place wrote it."""

    def __str__(self) -> str:
        if self.path:
            lines = [f"{self.path}: {self.what}" + (f"  ({self.source})" if self.source else "")]
        else:
            lines = [f"{self.source}: {self.what}"]
        if self.nearest is not None:
            lines.append(f"did you mean: {self.nearest}")
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"fix: {self.remedy}")
        return "\n     ".join(lines)


class ConfigError(Exception):
    """The configuration cannot be used. `problems` has all that were found; str() lists them, numbered."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(numbered(self.problems))


def numbered(problems: Sequence[Problem]) -> str:
    """The problems as text under a heading that counts them."""
    heading = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{heading} in the configuration", *(f"{i:3}. {p}" for i, p in enumerate(problems, 1))])


def shown(value: object) -> str:
    """A value as JSON, shortened when it is long."""
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # an integer of more digits than Python will print
        return "a value too large to show"
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
