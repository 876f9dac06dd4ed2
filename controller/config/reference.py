"""Writes docs/configuration.md from the structs: `python -m controller.config.reference > docs/configuration.md`."""

from __future__ import annotations

import ast
import inspect
import sys
from itertools import groupby

import msgspec
from msgspec import Struct

from controller.config.describe import Key, allowed, keys
from controller.config.schema import Config
from controller.exits import Exit

_INTRODUCTION = """\
# Configuration

Written by `python -m controller.config.reference` from `controller/config/schema.py`; do not edit it by hand.

A run is described by one file, YAML or TOML, with a section for each part. `run`, `model` and `environment` are needed,
everything else has a default:

```yaml
run:
  dir: runs/first
  steps: 100
model:
  path: models/Qwen2.5-0.5B-Instruct
environment:
  name: reverse_text
```

- `python -m controller --config FILE --check` checks the file, prints the effective plan and starts nothing.
- `--set rollout.group_size=16` overrides a key. The value is YAML or JSON and replaces what the file has at that path.
- Unknown keys are errors. Everything that is wrong is reported at once, with its place, what is allowed and what to do.
- YAML is read by the 1.2 core schema: `1e-6` is a number, `yes` and `on` are text. Anchors, tags and keys given twice are
  refused.
- Paths are relative to the folder that the run is started from.
"""


def reference() -> str:
    """The whole page, as Markdown."""
    parts = [_INTRODUCTION]
    for section, members in groupby(keys(Config), lambda key: key.path.rpartition(".")[0]):
        listed = list(members)
        owner = listed[0].owner
        parts.append(f"## {section}\n")
        if owner.__doc__:
            parts.append(f"{owner.__doc__}\n")
        parts += ["| key | allowed | default | meaning |", "|---|---|---|---|"]
        meanings = _docstrings(owner)
        parts += [_row(key, meanings[key.name]) for key in listed]
        parts.append("")
    parts += ["## Exit codes\n", "| code | meaning |", "|---|---|"]
    parts += [f"| {code.value} | {code.meaning} |" for code in Exit]
    return "\n".join(parts) + "\n"


def _row(key: Key, meaning: str) -> str:
    default = "required" if key.required else f"`{msgspec.json.encode(key.default).decode()}`"
    return f"| `{key.name}` | {allowed(key.type)} | {default} | {meaning} |"


def _docstrings(struct: type[Struct]) -> dict[str, str]:
    """The text below each field of a struct. Raises KeyError for a field without one when it is looked up."""
    body = ast.parse(inspect.getsource(struct)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            texts[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return texts


if __name__ == "__main__":
    sys.stdout.write(reference())
