"""Changes that conftest.py makes to pytest's plugins."""

import copy
from types import SimpleNamespace

import pytest


@pytest.mark.xdist_group("alone")
def test_groups_of_xdist_reach_its_scheduler(request):
    """The scheduler reads groups at the end of a test's name."""
    remote = pytest.importorskip("xdist.remote")
    item, loadgroup = copy.copy(request.node), SimpleNamespace(getvalue=lambda _: True)
    remote.WorkerInteractor.pytest_collection_modifyitems(None, loadgroup, [item])
    request.config.hook.pytest_collection_modifyitems(session=request.session, config=request.config, items=[item])
    assert item.nodeid.endswith("@alone")
