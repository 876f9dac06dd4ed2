"""What every `DataPlane` must do, as tests to be run on one of your own. Needs pytest, and hypothesis for the model.

    from dataplane.conformance.cases import CASES
    from dataplane.conformance.faults import FAULTS
    from dataplane.conformance.model import check_against_model

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_my_plane(case, my_plane):
        await case(my_plane, "a partition that is empty")

    @pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
    async def test_my_plane_when_a_server_stands_still(fault, my_plane):
        await fault(my_plane, "another one", freeze)  # a context manager that stops one of its servers, and lets it go on

    def test_my_plane_against_the_model():
        check_against_model(my_plane)  # an async function that makes one

A plane that passes can take the place of TransferQueue under a run.
"""
