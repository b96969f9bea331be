"""DERIVATION.md names a function for every section, and the functions exist.

The formulas are those of decayattn/testing/formulas.py, which testing/test_budget.py compares with autograd.
"""

import ast
import re
from pathlib import Path

import pytest

import decayattn

PACKAGE = Path(decayattn.__file__).parent
TEXT = (PACKAGE / "DERIVATION.md").read_text(encoding="utf-8")


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
