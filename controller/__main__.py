"""`python -m controller`: see `controller.cli`."""

from controller.cli import program

program()
