"""vLLM's engine arguments: which a configuration may set, and what this project sets itself.

Arguments are checked against the source of the installed vLLM, without importing it: that takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_OTHER_KEYS = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "max_model_len": "generation.max_model_len",
    "max_num_seqs": "generation.max_batch",
    "device_ids": "generation.device",
    "weight_transfer_config": "weight_sync.transport",
}
"""Arguments that other keys of the configuration say."""
_FIXED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
    "enable_log_requests": False,
    "worker_extension_cls": "workers.generation.vllm_worker.WorkerExtension",
}
"""Tokens go in and out, with the logprobs of the distribution they were sampled from."""
LOWEST_TEMPERATURE = 0.01
"""vLLM samples with no lower one, but greedily at 0."""


class ArgumentProblem(NamedTuple):
    name: str
    what: str
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f"did you mean {self.nearest}?" if self.nearest else self.allowed
        return f"generation.vllm.{self.name} {self.what}" + (f"; {hint}" if hint else "")


def argument_problems(arguments: Mapping[str, Any]) -> list[ArgumentProblem]:
    """What is wrong with `arguments`, as far as vLLM itself does not say. Without vLLM not all names are known."""
    known = _known_arguments()
    problems: list[ArgumentProblem] = []
    for name in arguments:
        if name in _OTHER_KEYS:
            problems.append(ArgumentProblem(name, f"is what {_OTHER_KEYS[name]} says", f"set {_OTHER_KEYS[name]}"))
        elif name in _FIXED:
            problems.append(
                ArgumentProblem(name, "cannot be changed", f"{_FIXED[name]!r}: token capture depends on it")
            )
        elif name == "load_format" and arguments[name] == "dummy":
            problems.append(
                ArgumentProblem(name, "dummy generates with random weights", "how the files of model.path are loaded")
            )
        elif known and name not in known:
            nearest = next(iter(get_close_matches(name, known, n=1)), None)
            problems.append(ArgumentProblem(name, "is not an engine argument of the installed vLLM", "", nearest))
    return problems


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def gpus_per_engine(arguments: Mapping[str, Any]) -> int:
    """How many GPUs one generation worker takes."""
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
    count = 1
    for name in sizes:
        value = arguments.get(name, 1)
        count *= value if isinstance(value, int) and value > 0 else 1
    return count


def engine_arguments(
    arguments: Mapping[str, Any],
    *,
    model_path: Path,
    dtype: str,
    max_batch: int,
    max_model_len: int | None,
    on_cpu: bool,
    weight_transfer: str | None = None,
) -> dict[str, Any]:
    """All arguments of `AsyncEngineArgs`: the configuration's, this project's, and where both say nothing vLLM's own."""
    defaults: dict[str, Any] = {"use_tqdm_on_load": False}
    if on_cpu:
        defaults["enforce_eager"] = True
        # vLLM's own 128 wastes half of the cache on conversations of a few hundred tokens.
        defaults["block_size"] = 32
        # A request with a seed, its prompt computed in pieces, ends vLLM 0.32's core: "CPU Generator does not use offset".
        defaults["enable_chunked_prefill"] = False
        if gpus_per_engine(arguments) == 1:
            # As a class: "uni" is turned into "mp" on a CPU, which costs a second process and its imports.
            defaults["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return {
        **defaults,
        **arguments,
        **_FIXED,
        "model": str(model_path),
        "dtype": dtype,
        "max_num_seqs": max_batch,
        **({} if max_model_len is None else {"max_model_len": max_model_len}),
        **({} if weight_transfer is None else {"weight_transfer_config": {"backend": weight_transfer}}),
    }


@cache
def _known_arguments() -> tuple[str, ...]:
    """The fields of vLLM's AsyncEngineArgs, in order; none when vLLM is not installed or does not have them there."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        try:
            tree = ast.parse((Path(folder) / "engine" / "arg_utils.py").read_bytes())
        except (OSError, SyntaxError, ValueError):
            return ()
        return tuple(
            field.target.id
            for owner in tree.body
            if isinstance(owner, ast.ClassDef) and owner.name in ("EngineArgs", "AsyncEngineArgs")
            for field in owner.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
        )
    return ()
