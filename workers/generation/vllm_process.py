"""Makes this process ready for vLLM: its environment, before vLLM is imported, and what a core is to be forked with."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import msgspec

from workers.generation.vllm_names import vllm
from workers.host import StartupError


def prepare_process(*, on_cpu: bool, gpus: tuple[int, ...]) -> None:
    """Set what vLLM reads from the environment, before it is imported. What the user has set stays."""
    values = {
        # On a CPU it warns of much that is done here on purpose.
        "VLLM_LOGGING_LEVEL": "ERROR" if on_cpu else "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Outputs handled in one turn of the event loop.
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "32",
    }
    if on_cpu:
        # Compiling takes ten seconds at the first request, for a function that computes a rank nobody asks for.
        values |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # As above: of binding memory to the only node, in C++, and of names that its stand-in for Triton looks through.
        values["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils")
    for name, value in values.items():
        os.environ.setdefault(name, value)
    # Until vLLM has set up its loggers, they are the process's. And of a core's death the engine tells itself.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(max(gpus) + 1)] if visible is None else visible.split(",")
        if max(gpus) >= len(names):
            raise StartupError(
                "no_device",
                f"this worker is to run on GPU {max(gpus)}, and CUDA_VISIBLE_DEVICES shows {len(names)}: {visible}",
                "lower generation.workers or tensor_parallel_size, or show more GPUs",
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)


def preload(model_path: Path, device: str) -> None:
    """Import what a core needs, so that it is forked with it: vLLM, its worker, and the model's code. Takes seconds.

    Raises StartupError when vLLM cannot be imported, or is built for another kind of device.
    """
    try:
        for module in ("v1.engine.async_llm:AsyncLLM", "v1.engine.core:EngineCoreProc"):
            vllm(module)
        on_cpu = vllm("platforms:current_platform").is_cpu()
        if on_cpu:
            vllm("v1.worker.cpu_worker:CPUWorker")
        registry = vllm(":ModelRegistry")
    except Exception as error:
        raise StartupError(
            "no_vllm",
            f"generation.engine is vllm, and vLLM cannot be imported: {error!r}",
            "install it as the README says under 'With vLLM', or set generation.engine: torch",
        ) from error
    if on_cpu != (device == "cpu"):
        raise StartupError(
            "no_device",
            f"generation.device is {device}, and this vLLM {'runs on CPUs only' if on_cpu else 'does not run on CPUs'}",
            "set generation.device to what it runs on, or install the other build",
        )
    for name in _architectures(model_path):
        model = registry.models.get(name)
        if model is not None:
            # Registered as a class: of one known by name only, vLLM would start a process to find out what it can do.
            registry.register_model(name, model.load_model_cls())


class _ModelConfig(msgspec.Struct):
    architectures: list[str] = []


def _architectures(model_path: Path) -> list[str]:
    try:
        return msgspec.json.decode((model_path / "config.json").read_bytes(), type=_ModelConfig).architectures
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError("bad_model", f"{model_path}: config.json cannot be read: {error}") from error
