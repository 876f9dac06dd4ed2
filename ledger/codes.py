"""The tables of all codes in docs/custody.md, made from the enums: `python -m ledger.codes docs/custody.md` renews them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from ledger.reasons import CallFailure, Reason

TABLES = {"reasons": Reason, "call failures": CallFailure}


def with_tables(page: str) -> str:
    """The page with every table between `<!-- codes: NAME -->` and `<!-- end -->` as the enums have it now.

    Raises KeyError for a name that there is no table of.
    """

    def table(found: re.Match[str]) -> str:
        return f"<!-- codes: {found[1]} -->\n\n{_rows(TABLES[found[1]])}\n\n<!-- end -->"

    return re.sub(r"<!-- codes: ([a-z ]+) -->\n.*?\n<!-- end -->", table, page, flags=re.DOTALL)


def _rows(codes: Iterable[Reason | CallFailure]) -> str:
    return "\n".join(["| code | meaning |", "|---|---|", *(f"| `{code}` | {code.meaning} |" for code in codes)])


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
