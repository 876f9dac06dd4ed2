"""Every code has a test that makes it come about, and its line in docs/custody.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.codes import TABLES, with_tables
from ledger.reasons import CallFailure, Reason
from tests.custody import test_faults
from tests.ledger import test_reasons

PAGE = Path(__file__).parents[2] / "docs" / "custody.md"

ELSEWHERE = {
    Reason.ROWS_UNAVAILABLE: "test_finalizer: test_a_plane_that_never_answers_costs_the_group_and_not_the_run",
    Reason.NOT_PUBLISHED: "test_finalizer: test_rows_that_are_never_taken_make_placeholders",
    Reason.NO_TOKENS: "test_echo: test_what_is_impossible_is_rejected",
    Reason.BAD_TOKENS: "test_echo: test_what_is_impossible_is_rejected",
    CallFailure.TIMEOUT: "test_faults: test_a_call_that_takes_too_long_fails_and_its_late_row_is_cleared",
    CallFailure.CANCELLED: "test_faults: test_a_cancelled_call_fails_and_its_rollout_is_a_placeholder",
}


def test_every_reason_has_a_test():
    assert set(test_reasons.SCENARIOS) == set(Reason) - set(ELSEWHERE)
    assert set(Reason) & set(ELSEWHERE) == test_reasons.OF_THE_CONTROLLER


def test_every_call_failure_has_a_test():
    assert {failure for _, failure, _ in test_faults.FAULTS} == set(CallFailure) - set(ELSEWHERE)


@pytest.mark.parametrize("place", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_are_named_here_exist(place: str):
    module, test = place.split(": ")
    assert f"def {test}(" in (Path(__file__).parent / f"{module}.py").read_text()


def test_the_page_has_the_tables_that_the_enums_make():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run python -m ledger.codes docs/custody.md"
    for codes in TABLES.values():
        assert all(f"\n| `{code}` | {code.meaning} |\n" in page for code in codes)


def test_only_known_tables_are_made():
    with pytest.raises(KeyError):
        with_tables("<!-- codes: colours -->\n\n<!-- end -->")
