"""MIGRATION.md: every example computes the same by the formula of the other library and by ours."""

import re
import sys
from pathlib import Path

import other_libraries
import pytest
import torch
from repository_files import code_blocks

import decayattn

GUIDE = Path(decayattn.__file__).parent / "MIGRATION.md"


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_before_and_after_compute_the_same(monkeypatch, float64):
    for name, module in other_libraries.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    torch.manual_seed(0)
    setup, *examples = code_blocks("python", GUIDE)
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
    table = re.findall(r"^\| (`.*?) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    names = set(re.findall(r"`(\w+)", " ".join(table))) - {"scale", "window_size"}
    assert len(names) > 15
    q = torch.zeros(1, 1, 1, 1)
    for name in sorted(names):
        with pytest.raises(TypeError, match=f"{name}: unexpected keyword") as caught:
            decayattn.decay_attention(q, q, q, **{name: None})
        assert not re.search("it takes|did you mean", str(caught.value)), name
