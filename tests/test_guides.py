"""DERIVATION.md names the code of every section, and every recipe of RECIPES.md runs after the lines that all share.
Every example of MIGRATION.md computes the same by the formula of the other library and by ours.

The formulas are those of decayattn/testing/formulas.py, which testing/test_budget.py compares with autograd.
"""

import ast
import re
import sys
from pathlib import Path
from unittest import mock

import other_libraries
import pytest
import torch
from repository_files import code_blocks

import decayattn

PACKAGE = Path(decayattn.__file__).parent
TEXT = (PACKAGE / "DERIVATION.md").read_text(encoding="utf-8")
MIGRATION = PACKAGE / "MIGRATION.md"
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


def test_before_and_after_compute_the_same(monkeypatch, torch_settings):
    torch.set_default_dtype(torch.float64)
    for name, module in other_libraries.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    torch.manual_seed(0)
    setup, *examples = code_blocks("python", MIGRATION)
    names = {"__name__": "guide"}
    exec(compile(setup, "MIGRATION.md, setup", "exec"), names)
    inputs = {name: x.requires_grad_() for name, x in names.items() if isinstance(x, torch.Tensor)}
    assert len(examples) > 10
    for number, example in enumerate(examples, start=1):
        names.pop("before", None), names.pop("after", None)
        try:
            exec(compile(example, f"MIGRATION.md, example {number}", "exec"), names)
        except Exception as error:
            pytest.fail(f"MIGRATION.md, example {number}: {error!r}\n{example}")
        before, after = names["before"], names["after"]
        torch.testing.assert_close(after, before, msg=lambda text: f"{text}\n{example}")  # noqa: B023
        weights = torch.randn_like(before)
        options = {"allow_unused": True, "retain_graph": True}
        wanted, found = (torch.autograd.grad((y * weights).sum(), inputs.values(), **options) for y in (before, after))
        assert any(x is not None for x in wanted), example
        for name, want, got in zip(inputs, wanted, found, strict=True):
            if want is not None:
                torch.testing.assert_close(got, want, msg=lambda text: f"{name}: {text}\n{example}")  # noqa: B023


def test_errors_translate_names_of_the_table():
    table = re.findall(r"^\| (`.*?) \|", MIGRATION.read_text(encoding="utf-8"), re.MULTILINE)
    names = set(re.findall(r"`(\w+)", " ".join(table))) - {"scale", "window_size"}
    assert len(names) > 15
    q = torch.zeros(1, 1, 1, 1)
    for name in sorted(names):
        with pytest.raises(TypeError, match=f"{name}: unexpected keyword") as caught:
            decayattn.decay_attention(q, q, q, **{name: None})
        assert not re.search("it takes|did you mean", str(caught.value)), name
