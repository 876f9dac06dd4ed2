"""Takes part in a broadcast when told to, and sends itself a signal after the first chunk.

Reads "ADDRESS VERSION SIGNAL" from a line of its input, having said that it is ready.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import cast

import torch

from workers.weight_sync.gloo import broadcast
from workers.weight_sync.rounds import Member


def main() -> None:
    print("ready", flush=True)
    address, version, signal = sys.stdin.readline().split()
    member = Member(address, timeout_s=20)
    place, store = member.join(int(version))

    class Content:
        """In the place of what is received: the group is open when the signal comes."""

        def split(self, size: int) -> Iterator[torch.Tensor]:
            yield torch.zeros(size, dtype=torch.uint8)
            print(f"received a chunk, one of {place.size}", flush=True)
            os.kill(os.getpid(), int(signal))

    broadcast(cast(torch.Tensor, Content()), place, store, interface=member.interface, patience_s=20)


main()
