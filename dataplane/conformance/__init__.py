"""What every `DataPlane` must do, as tests to be run on one of your own. Needs pytest, and hypothesis for the model.

    from uuid import uuid4

    import pytest
    from my_package import connect_mine, freeze_mine

    from dataplane.conformance.cases import CASES
    from dataplane.conformance.faults import FAULTS
    from dataplane.conformance.model import check_against_model

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def anyio_backend():
        return "asyncio"

    @pytest.fixture
    async def plane():
        plane = await connect_mine()
        yield plane
        await plane.aclose()

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_a_case(case, plane):
        await case(plane, f"partition {uuid4()}")

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
    async def test_a_fault(fault, plane):
        await fault(plane, f"partition {uuid4()}", freeze_mine)

    def test_the_model():
        check_against_model(connect_mine)

`connect_mine` is an async function that makes a plane. `freeze_mine()` is a context manager that stops one of its servers,
and lets it go on: run the faults for each of them. A plane that passes can take the place of TransferQueue under a run.
"""
