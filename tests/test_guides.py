"""DERIVATION.md names the code of every section, and every recipe of RECIPES.md runs after the lines that all share.

The formulas are those of decayattn/testing/formulas.py, which testing/test_budget.py compares with autograd.
"""

import ast
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
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


@pytest.mark.parametrize("reference", sorted(set(re.findall(r"`([a-z_]+\.[A-Za-z_]+)`", TEXT))))
def test_every_named_definition_exists(reference):
    """Found by reading the modules of this name: importing the kernels needs Triton."""
    module, name = reference.split(".")
    files = list(PACKAGE.rglob(f"{module}.py"))
    assert files, f"DERIVATION.md names a module {module} that decayattn does not have"
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def name_of(block: str) -> str:
    """Its first line, in a few letters."""
    return block.strip().splitlines()[0][:40]


def run(block: str) -> None:
    names = {"__name__": "recipes"}
    exec(compile(SHARED, "RECIPES.md, shared lines", "exec"), names)
    exec(compile(block, f"RECIPES.md, {name_of(block)}", "exec"), names)


def run_on_rank(block: str) -> None:
    with mock.patch.multiple(torch.distributed, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        run(block)


@pytest.mark.parametrize("block", [block for block in RECIPES if "torchrun" not in block], ids=name_of)
def test_every_recipe_runs(block, device):
    if "transformers" in block:
        pytest.importorskip("transformers")
    if "testing" in block:
        pytest.importorskip("triton")
    with device:
        run(block)


@pytest.mark.xdist_group("distributed")
def test_recipe_of_torchrun_runs(cpu_ranks):
    [block] = [block for block in RECIPES if "torchrun" in block]
    cpu_ranks(run_on_rank, block)
