"""The ledger is light to import and knows none of its users."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ledger

FORBIDDEN = {"torch", "transformers", "ray", "vllm", "controller", "workers", "dataplane"}


def test_importing_all_of_the_ledger_brings_in_nothing_heavy_and_none_of_its_users():
    modules = [f"ledger.{path.stem}" for path in Path(ledger.__path__[0]).glob("*.py") if path.stem != "__init__"]
    assert len(modules) > 10
    code = f"import sys, {', '.join(modules)}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "msgspec" in loaded
    assert not FORBIDDEN & set(loaded)
