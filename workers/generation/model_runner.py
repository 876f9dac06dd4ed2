"""Runs the model: prompts into KV rows, and one token for every running row at a time. Synchronous; used by one thread."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from workers.generation.api import EngineSpec
from workers.generation.kv_cache import KVCache
from workers.host import StartupError
from workers.weights import load_into

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PADDED_TOKENS = 8192
"""Bound of one pass over prompts, padding included, unless a single prompt is longer."""


class ModelRunner:
    """A causal LM from a local directory, and its KV cache."""

    def __init__(self, path: Path, spec: EngineSpec) -> None:
        """Load the model. Raises StartupError: no such model, broken, or of a kind that this engine cannot serve."""
        self.device = torch.device(spec.device)
        self._model = _load_model(path, spec.dtype, self.device)
        config: Any = self._model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_model_len = _max_model_len(config, spec.max_model_len)
        self._layer_types = _layer_types(config)
        self._window: int | None = getattr(config, "sliding_window", None)
        self._cache = KVCache(
            layers=config.num_hidden_layers,
            max_rows=max(spec.max_batch, 2),
            max_tokens=self.max_model_len,
            device=self.device,
        )
        # Older and newer transformers name the argument differently.
        forward = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in forward else "past_key_values"
        self._check_cached_decoding(path)

    def prefill(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Compute the KV of each (row, tokens), from position 0. Equal token sequences are computed once and copied."""
        row_count = max((row for row, _ in rows), default=-1) + 1
        first: dict[tuple[int, ...], int] = {}
        copies: dict[int, list[tuple[int, int]]] = {}
        for row, tokens in rows:
            if tokens:
                source = first.setdefault(tuple(tokens), row)
                if source != row:
                    copies.setdefault(len(tokens), []).append((source, row))
        for prompts in _batches(sorted(first.items(), key=lambda item: len(item[0])), _PADDED_TOKENS):
            width = len(prompts[-1][0])
            ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in prompts], device=self.device)
            self._cache.write_prompts([row for _, row in prompts], width, row_count=row_count)
            # Causal and padded on the right, so no real token sees the padding; what padding leaves in the cache lies
            # beyond the row's length, where decoding masks it until it is overwritten.
            self._forward(self._model.base_model, ids, torch.arange(width, device=self.device).expand_as(ids), None)
        for length, moves in copies.items():
            self._cache.copy_rows(moves, length)

    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Feed `tokens[r]` at `positions[r]` to each row r; returns the next token's logits [rows, vocab]."""
        at = torch.tensor(positions, device=self.device)
        length = max(positions) + 1
        self._cache.write_tokens(at, length)
        ids = torch.tensor(tokens, device=self.device)[:, None]
        return self._forward(self._model, ids, at[:, None], self._decode_mask(at, length)).logits[:, -1]

    def copy_rows(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the KV of each (source, target) pair of rows, up to `length` tokens."""
        self._cache.copy_rows(moves, length)

    def load_weights(self, path: Path) -> None:
        """Replace the weights; the KV cache is stale then. ValueError when the file does not fit: nothing has changed."""
        load_into(self._model, path)

    def _forward(self, model: Any, ids: Tensor, positions: Tensor, mask: Any) -> Any:
        cache = {self._cache_argument: self._cache}
        return model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, **cache)

    def _decode_mask(self, positions: Tensor, length: int) -> Any:
        """Additive masks [rows, 1, 1, length] by layer type, or the only one: each row sees its own past and itself."""
        key = torch.arange(length, device=self.device)
        seen = key <= positions[:, None]
        masks: dict[str, Tensor] = {}
        for kind in self._layer_types:
            visible = seen
            if kind == "sliding_attention" and self._window is not None:
                visible = seen & (key > positions[:, None] - self._window)
            mask = torch.zeros_like(visible, dtype=self._model.dtype).masked_fill_(~visible, -math.inf)
            masks[kind] = mask[:, None, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _check_cached_decoding(self, path: Path) -> None:
        """Refuse a model whose forward does not do with our cache and masks what it does alone."""
        ids = [(7 * i + 3) % self.vocab_size for i in range(min(9, self.max_model_len))]
        whole = self._model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0]
        self.prefill([(0, ids[:-1]), (1, ids[:-3])])
        cached = self.decode([ids[-1], ids[-3]], [len(ids) - 1, len(ids) - 3])
        error = (cached.log_softmax(-1) - whole[[-1, -3]].log_softmax(-1)).abs().max().item()
        allowed = 1e-3 if self._model.dtype == torch.float32 else 0.5
        if not error <= allowed:
            raise StartupError(
                "unsupported_model",
                f"{path}: cached decoding of this {self._model.config.model_type} model is off by {error:.3g} in logprob "
                f"(allowed {allowed:g}), so the torch engine cannot serve it",
                "use a model of another family, or the vllm engine",
            )


def _load_model(path: Path, dtype: str, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if dtype not in _DTYPES:
        raise StartupError("bad_spec", f"dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
    if not (path / "config.json").is_file():
        raise StartupError(
            "bad_model", f"{path} is no model directory: it has no config.json", "set model.path to a local directory"
        )
    try:
        model, report = cast(Any, AutoModelForCausalLM).from_pretrained(
            path,
            dtype=_DTYPES[dtype],
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise StartupError("bad_model", f"{path} cannot be loaded: {error}") from error
    wrong = sorted({*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])})
    if wrong:
        raise StartupError("bad_model", f"{path}: {len(wrong)} tensors are missing or misshapen, e.g. {wrong[0]}")
    return model.to(device).eval().requires_grad_(False)


def _max_model_len(config: Any, wanted: int | None) -> int:
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if wanted is None and limit is None:
        raise StartupError("bad_spec", "the model states no context length", "set generation.max_model_len")
    if wanted is not None and not 2 <= wanted <= (limit or wanted):
        raise StartupError("bad_spec", f"max_model_len is {wanted}; the model allows 2 to {limit or 'any'}")
    return cast(int, wanted or limit)


def _layer_types(config: Any) -> frozenset[str]:
    """The attention kinds of the model's layers. Raises StartupError for what the row cache or the masks cannot do."""
    windowed = getattr(config, "sliding_window", None) is not None
    types = frozenset[str](
        getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"]
    )
    for what in types - {"full_attention", "sliding_attention"}:
        raise StartupError("unsupported_model", f"the torch engine has no cache for layers of type {what}")
    # These change with the longest sequence of the batch, so one request's logprobs would depend on its neighbours.
    for rope in ("dynamic", "longrope"):
        if f"'{rope}'" in str(getattr(config, "rope_parameters", None)):
            raise StartupError("unsupported_model", f"the torch engine does not do {rope} rotary embeddings")
    return types


def _batches(prompts: Sequence[tuple[tuple[int, ...], int]], bound: int) -> list[list[tuple[tuple[int, ...], int]]]:
    """Split prompts, sorted by length, into runs of at most `bound` tokens when padded to their longest."""
    batches: list[list[tuple[tuple[int, ...], int]]] = []
    for prompt in prompts:
        if batches and (len(batches[-1]) + 1) * len(prompt[0]) <= bound:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches
