"""DERIVATION.md names a function for every section, and every recipe of RECIPES.md runs after the lines that all share.

The formulas are those of decayattn/testing/formulas.py, which testing/test_budget.py compares with autograd.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository_files import code_blocks

import decayattn

PACKAGE = Path(decayattn.__file__).parent
TEXT = (PACKAGE / "DERIVATION.md").read_text(encoding="utf-8")
SHARED, *RECIPES = code_blocks("python", PACKAGE / "RECIPES.md")


def test_every_section_names_its_functions():
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert [section.partition(".")[0] for section in sections] == [str(n + 1) for n in range(len(sections))]
    for section in sections:
        assert re.search(r"^Implemented by `", section, re.MULTILINE), section.splitlines()[0]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_]+\.[A-Za-z_]+)`", TEXT))))
def test_every_named_function_exists(name):
    """Found by reading the modules of this name: importing the kernels needs Triton."""
    module, function = name.split(".")
    files = list(PACKAGE.rglob(f"{module}.py"))
    assert files, f"DERIVATION.md names a module {module} that decayattn does not have"
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    assert function in {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def name_of(block: str) -> str:
    """Its first line, in a few letters."""
    return block.strip().splitlines()[0][:40]


@pytest.mark.parametrize("block", RECIPES, ids=name_of)
def test_every_recipe_runs(block, device, tmp_path):
    if "transformers" in block:
        pytest.importorskip("transformers")
    if "testing" in block:
        pytest.importorskip("triton")
    if "torchrun" not in block:
        names = {"__name__": "recipes"}
        with device:
            exec(compile(SHARED, "RECIPES.md, shared lines", "exec"), names)
            exec(compile(block, f"RECIPES.md, {name_of(block)}", "exec"), names)
        return
    file = tmp_path / "this_file.py"
    file.write_text(SHARED + block)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", file]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
