"""`python -m dataplane doctor`: exit code 0 when the data plane is well, 1 when not, 2 for a bad command line."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial

import anyio

from dataplane.address import KINDS, resolve
from dataplane.doctor import examine, examine_own, say_software
from dataplane.errors import DataPlaneDown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dataplane")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check a data plane, and say what is wrong with it")
    doctor.add_argument("--address", help=f"{KINDS}; without it, servers are started here and stopped again")
    doctor.add_argument("--token-file", help="the token of a Ray cluster that asks for one")
    doctor.add_argument(
        "--backend", choices=["simple", "mooncake"], default="simple", help="of the servers started here"
    )
    doctor.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="of each put, get and clear")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.timeout < math.inf:
        parser.error("--timeout must be > 0, and finite")

    say_software(_say)
    try:
        if arguments.address is None:
            problems = anyio.run(partial(examine_own, arguments.backend, _say, timeout_s=arguments.timeout))
        else:
            spec = resolve(arguments.address, token_file=arguments.token_file)
            problems = anyio.run(partial(examine, spec, _say, timeout_s=arguments.timeout))
    except DataPlaneDown as error:
        problems = [str(error)]
    for problem in problems:
        _say("WRONG", problem)
    if not problems:
        _say("well", "nothing is wrong")
    return bool(problems)


def _say(what: str, text: str) -> None:
    sys.stdout.write(f"{what:<12} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
