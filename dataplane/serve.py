"""One TransferQueue server as a plain process: `python -m dataplane.serve controller|storage --host HOST`.

It prints one line of JSON, its `ServerAddress`, when it serves, and ends when its stdin does: the process that started it
holds the other end, so not even a killed parent leaves a server behind.
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any, NoReturn

import msgspec

from dataplane import software, tq_settings
from dataplane.spec import ServerAddress

BALLAST = 20_000
"""TransferQueue gives the number of a cleared row to the next one, so a late request for the old row would hit the new.
Its free numbers form a first-in first-out queue; filled once, it keeps every released number idle for so many rows."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["controller", "storage"])
    parser.add_argument("--host", required=True)
    arguments = parser.parse_args()

    channel = handshake_channel()
    tq_settings.apply()
    server = _controller(arguments.host) if arguments.role == "controller" else _storage(arguments.host)
    info = server.get_zmq_server_info()
    address = ServerAddress(arguments.role, info.id, info.ip, info.ports, software.running(software.TRANSFER_QUEUE))
    serve_until_stdin_ends(channel, address)


def handshake_channel() -> int:
    """A descriptor of stdout, which is stderr from now on: what libraries print must not mix with the handshake."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def serve_until_stdin_ends(channel: int, address: ServerAddress) -> NoReturn:
    """Print the address on the channel, and end this process when the one that holds its stdin lets go."""
    gc.freeze()  # a collection over all that was imported would stop every request for some 150 ms
    os.write(channel, msgspec.json.encode(address) + b"\n")
    os.close(channel)
    while os.read(0, 4096):
        pass
    os._exit(0)  # there is nothing to save, and TransferQueue's own exit waits for its threads


def _controller(host: str) -> Any:
    import transfer_queue.controller as module

    # TransferQueue asks Ray for this machine's address and listens there; it also unpickles what it is sent.
    module.get_node_ip_address = lambda: host
    # With polling mode off, a request for rows that are not there stops all others for seconds.
    controller = _plain(module.TransferQueueController)(polling_mode=True)
    controller.index_manager.allocate_indexes("ballast", BALLAST)
    controller.index_manager.release_partition("ballast")
    return controller


def _storage(host: str) -> Any:
    import transfer_queue.storage.simple_storage as module

    module.get_node_ip_address = lambda: host
    return _plain(module.SimpleStorageUnit)({})


def _plain(actor_class: Any) -> Any:
    """The class inside a Ray actor class."""
    return actor_class.__ray_metadata__.modified_class


if __name__ == "__main__":
    main()
