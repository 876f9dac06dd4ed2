"""`python -m workers.training`: the training worker's process."""

from __future__ import annotations

from workers.host import run_worker
from workers.training.api import TrainingSpec
from workers.training.service import serve


def main() -> None:
    run_worker(TrainingSpec, serve)


if __name__ == "__main__":
    main()
