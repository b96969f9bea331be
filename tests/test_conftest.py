"""The device of kernels is chosen once for all tests of a run: nothing that they import or call changes it."""

import ast
import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from repository_files import EXPERIMENTS, ROOT, TESTS

NOT_THEN = ("__name__ == '__main__'", "not torch.cuda.is_available()")


def run_when_imported(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module that its import runs on a GPU, blocks opened."""
    for statement in statements:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test) in NOT_THEN:
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        if not any(blocks):
            yield statement
        for block in blocks:
            yield from run_when_imported(block)


@pytest.mark.parametrize("folder", [TESTS, EXPERIMENTS], ids=lambda folder: folder.name)
def test_no_module_sets_triton_s_environment_when_it_is_imported(folder):
    paths = set(folder.rglob("*.py")) - {TESTS / "conftest.py"}
    assert len(paths) > 20
    for path in paths:
        for statement in run_when_imported(ast.parse(path.read_text(encoding="utf-8")).body):
            text = ast.unparse(statement)
            assert not ("environ" in text and "TRITON_" in text), f"{path.name}:{statement.lineno}: {text}"


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
