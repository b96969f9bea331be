"""The device of kernels is chosen once for all tests of a run: nothing that they import or call changes it."""

import copy
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from repository_files import ROOT, TESTS

COLLECT = """
import os, sys
import pytest, torch

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *device: (9, 0)
assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", sys.argv[1]]) == 0

import test_hopper_on_cpu, test_visibility
import triton
from decayattn.backends.planning import prefix

assert not triton.knobs.runtime.interpret
for module in (test_visibility, prefix):
    kernels = [x for x in vars(module).values() if type(x).__module__.startswith("triton.runtime")]
    assert kernels
    assert {type(x) for x in kernels} == {triton.runtime.JITFunction}
print("compiled")
"""


@pytest.mark.slow
def test_on_a_gpu_the_whole_suite_is_collected_for_the_compiler():
    """On one that is only said to be there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COLLECT, str(TESTS)], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )
    assert run.stdout.endswith("compiled\n"), run.stdout + run.stderr


@pytest.mark.xdist_group("alone")
def test_groups_of_xdist_reach_its_scheduler(request):
    """The scheduler reads groups at the end of a test's name."""
    remote = pytest.importorskip("xdist.remote")
    item, loadgroup = copy.copy(request.node), SimpleNamespace(getvalue=lambda _: True)
    remote.WorkerInteractor.pytest_collection_modifyitems(None, loadgroup, [item])
    request.config.hook.pytest_collection_modifyitems(session=request.session, config=request.config, items=[item])
    assert item.nodeid.endswith("@alone")
