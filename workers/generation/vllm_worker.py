"""What runs inside vLLM's own worker processes: a weights file loaded in place, between two steps.

Imported there by name (`worker_extension_cls`). vLLM 0.32 reloads a model layer by layer, and on CPUs gets two things wrong
without a word: a tied output head keeps the old weights, and experts are left in a layout that their kernel does not
expect. Both are mended here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workers.generation.vllm_names import vllm
from workers.weight_sync.ipc_handles import rebuilt

if TYPE_CHECKING:
    import torch
    from torch import nn


class WorkerExtension:
    """Becomes a base class of vLLM's worker: `model_runner` and `vllm_config` are the worker's."""

    model_runner: Any
    vllm_config: Any
    distributed_init_method: str
    update_weights: Any

    def unlink_meeting_places(self) -> None:
        """Remove the files by whose names the engine's processes found each other. On a CPU vLLM would leave them behind:
        one in the temp folder, and 4 MB of shared memory for each worker of several."""
        if _on_cpu():
            Path(self.distributed_init_method.removeprefix("file://")).unlink(missing_ok=True)
            for memory in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):  # noqa: S108
                memory.unlink(missing_ok=True)

    def load_weights_file(self, path: str) -> None:
        """Load a safetensors file of all the model's tensors. An error leaves a mixed model: do not use it any more."""
        from safetensors import safe_open

        file: Any = safe_open(os.fspath(path), framework="pt", device="cpu")
        model: nn.Module = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        reload = "model_executor.model_loader.reload.layerwise"
        # It warns of the tied head at every load.
        logging.getLogger(f"vllm.{reload}").setLevel(logging.ERROR)
        with file, vllm("config:set_current_vllm_config")(self.vllm_config):
            _forget_packed_experts(model)
            vllm(f"{reload}:initialize_layerwise_reload")(model)
            load: Any = model.load_weights
            tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            loaded: set[str] | None = load(_as_saved(tensors, self.model_runner.model_config.model))
            vllm(f"{reload}:finalize_layerwise_reload")(model, self.model_runner.model_config)
            _pack_tied_head(model)
        left = expected - (loaded or expected)
        if left and self.model_runner.model_config.quantization is None:
            raise RuntimeError(f"{len(left)} parameters were not loaded, e.g. {min(left)}")

    def update_weights_plainly(self, info: dict[str, Any]) -> None:
        """The worker's own `update_weights`, whose IPC handles came as `workers.weight_sync.ipc_handles.plain` lists."""
        if "ipc_handles" in info:
            handles = [{gpu: rebuilt(handle) for gpu, handle in each.items()} for each in info["ipc_handles"]]
            info = info | {"ipc_handles": handles}
        self.update_weights(info)


def _as_saved(tensors: Iterable[tuple[str, torch.Tensor]], model_path: str) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of transformers' model as its directory has them, which is what vLLM knows: some models it holds otherwise
    than it saves them, the experts of a layer as one tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    model = _held_otherwise(model_path)
    return tensors if model is None else cast(Any, revert_weight_conversion)(model, dict(tensors)).items()


@cache
def _held_otherwise(model_path: str) -> Any:
    """The model without data, if transformers holds it otherwise than it saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    config: Any = cast(Any, AutoConfig).from_pretrained(model_path, local_files_only=True)
    with torch.device("meta"):
        model: Any = cast(Any, AutoModelForCausalLM).from_config(config)
    return model if get_model_conversion_mapping(model, add_legacy=False) else None


def _forget_packed_experts(model: nn.Module) -> None:
    """Experts are packed for their kernel when it is first built, and unpacked by a reload: have it built anew."""
    if _on_cpu():
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # type: ignore[union-attr]


def _pack_tied_head(model: nn.Module) -> None:
    """The output head computes with a packed copy of its weights, which a reload renews only if they have a name."""
    if _on_cpu():
        head = vllm("model_executor.layers.vocab_parallel_embedding:ParallelLMHead")
        for module in model.modules():
            if isinstance(module, head):
                method: Any = module.quant_method
                method.process_weights_after_loading(module)


def _on_cpu() -> bool:
    return vllm("platforms:current_platform").is_cpu()
