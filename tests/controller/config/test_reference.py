"""The documentation is what the structs say, and the structs' defaults are what they allow."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import msgspec

from controller.config.checks import check_config
from controller.config.describe import keys
from controller.config.plan import plan
from controller.config.reference import reference
from controller.config.schema import Config
from tests.controller.config.files import valid_config

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    """If this fails: python -m controller.config.reference > docs/configuration.md"""
    assert DOCS.read_text(encoding="utf-8") == reference()


def test_the_page_has_every_key() -> None:
    page = reference()
    for key in keys(Config):
        assert f"| `{key.name}` |" in page.split(f"## {key.path.rpartition('.')[0]}\n")[1].split("\n## ")[0]


def test_every_default_is_allowed() -> None:
    for key in keys(Config):
        if not key.required:
            assert msgspec.convert(key.default, key.type) == key.default


def test_the_plan_shows_every_value_and_the_numbers_that_follow(tmp_path: Path) -> None:
    config = valid_config(tmp_path)
    model = check_config(config).model
    assert model is not None
    text = plan(config, model)
    for key in keys(Config):
        value = msgspec.json.encode(reduce(getattr, key.path.split("."), config)).decode()
        mark = (
            "*" if key.path in ("run.dir", "run.steps", "model.path", "environment.name", "rollout.max_tokens") else " "
        )
        assert [line for line in text.splitlines() if line.split() == [*mark.split(), key.path, value]], key.path
    assert "groups live            32 = 16 per step x (1 stale + 1), windowed" in text
    assert "32: 256 rollouts, 128 decode together, 128 of them waiting for a place" in text
    assert "generated     131,072 tokens = 128 rollouts x 64 calls x 16" in text
    assert "trained       65,536 tokens = 128 rows x 512" in text
