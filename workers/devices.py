"""Whether the configured device is there, before a model is loaded onto it."""

from __future__ import annotations

from workers.host import StartupError


def require_device(device: str, key: str) -> None:
    """Raise StartupError naming the configuration's `key` when torch has no such device. Imports torch."""
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise StartupError("no_device", f"{key} is {device!r}, which torch does not know", f"set {key}: cpu") from error
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            raise StartupError(
                "no_device",
                f"{key} is {device!r}, and this torch ({torch.__version__}) sees {count} CUDA devices",
                f"set {key}: cpu, or install a CUDA build of torch",
            )
