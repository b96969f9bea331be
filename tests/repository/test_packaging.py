"""Installed and shipped files: the version, the source distribution, the types that a checker sees."""

import os
import re
import shutil
import subprocess
import sys
import tarfile

import pytest
from processes import run_python
from repository_files import ROOT

import decayattn

CALLS = """
import torch
from decayattn import DecayFlashAttention, decay_attention, decay_attention_varlen, visited_fraction
from decayattn.nn import ScalarDecay
from decayattn.testing import assert_within_budget, verify_attention

q = torch.randn(1, 3, 2, 4)
cu = torch.tensor([0, 3])
asked = bool(cu[1] > 2)

decay_attention(q, q, q).transpose(1, 2)
out, lse = decay_attention(q, q, q, -0.1, return_lse=True, window_size=(3, 0), seqused_k=cu[1:])
out.transpose(1, 2), lse.exp()
reveal_type(decay_attention(q, q, q, return_lse=asked))  # Tensor | tuple[Tensor, Tensor]
decay_attention_varlen(
    q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3
).transpose(0, 1)
visited_fraction(q, q, -0.1).mean()
decay_attention(q, q, q, softmax_scale=0.1)  # refused
decay_attention(q, q, q, backend="cuda")  # refused
decay_attention(q, q, q, return_lse=True).transpose(1, 2)  # refused
decay_attention_varlen(q[0], q[0], q[0])  # refused

layer = DecayFlashAttention(8, 2, decay=ScalarDecay(8, 2), window_size=(3, 0), backend="triton")
x = torch.randn(1, 3, 8)
layer.forward(x, cu_seqlens=cu).transpose(0, 1)
cache = layer.make_cache(1, 5)
layer(x, cache=cache)
reveal_type(cache.evict(1e-3, layer.score_bound()))  # Tensor
DecayFlashAttention(8, 2, decay="fox")  # refused
DecayFlashAttention(8, 2, backend="cuda")  # refused

found = verify_attention(q, q, q, -0.1, backend="reference")
assert_within_budget(found)
reveal_type(found[0].relative_error)  # float
verify_attention(q, q, q, backend="cuda")  # refused
"""


def test_pyproject_reads_version_and_oldest_python():
    """The version is a literal, which setuptools reads without an import of the package."""
    package = (ROOT / "decayattn/__init__.py").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\n__version__ = "{decayattn.__version__}"\n' in package
    assert 'version = { attr = "decayattn.__version__" }' in project
    versions = [int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', project)]
    assert versions == list(range(versions[0], versions[-1] + 1))
    for line in ('requires-python = ">=3.{}"', 'target-version = "py3{}"', 'python_version = "3.{}"'):
        assert line.format(versions[0]) in project


IN_A_WHEEL = """
import re
import sys
from pathlib import Path

import torch

import decayattn
from decayattn import DecayFlashAttention, decay_attention
from decayattn.integrations.checkpoints import from_fla

package = Path(decayattn.__file__).parent
assert package.parent == Path(sys.argv[1]), package
assert {"DERIVATION.md", "MIGRATION.md", "RECIPES.md", "py.typed"} <= {file.name for file in package.iterdir()}
for page in package.glob("*.md"):
    for target in re.findall(r"\\]\\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (package / target).exists(), target
x = torch.randn(1, 9, 8, requires_grad=True)
DecayFlashAttention(8, 2)(x).sum().backward()
assert x.grad.isfinite().all()
q = torch.randn(1, 9, 2, 4)
assert torch.equal(decay_attention(q, q, q, -0.1), decay_attention(q, q, q, -0.1, backend="reference"))
"""


@pytest.mark.slow  # two builds and a process that imports torch
def test_distributions_work_without_the_repository(tmp_path):
    """All that git tracks is in the source distribution, and a wheel made of that runs elsewhere."""
    pytest.importorskip("setuptools", minversion="77")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    files = [file for file in listed.stdout.splitlines() if (ROOT / file).exists()]
    if not files:
        pytest.skip("not a clone")
    copy, built, installed = (tmp_path / name for name in ("copy", "built", "installed"))
    for file in files:  # building leaves folders behind, which are not to be in the clone
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file)

    def build(what, source):
        program = f"from setuptools import build_meta; print(build_meta.build_{what}({str(built)!r}))"
        return built / run_python("-c", program, cwd=source).splitlines()[-1]

    built.mkdir()
    with tarfile.open(build("sdist", copy)) as archive:
        # data: what becomes the default later. Pythons before 3.10.12 and 3.11.4 have no filters
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {file for file in files if not (unpacked / file).exists()} == set()
    shutil.unpack_archive(build("wheel", unpacked), installed, "zip")
    run_python("-c", IN_A_WHEEL, installed, cwd=built, PYTHONPATH=str(installed))


def test_citation_and_changelog_name_this_version():
    citation = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == decayattn.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (heading,) = re.findall(rf"^## \[{re.escape(decayattn.__version__)}\] - (.*)", changes, re.MULTILINE)
    assert str(citation.get("date-released", "unreleased")) == heading


@pytest.mark.slow  # mypy reads all of torch
def test_mypy_reveals_documented_types(tmp_path):
    """Types of the installed package, editable or not."""
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(CALLS)
    environment = os.environ | {"MYPY_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--hide-error-context", "calls.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=False,
    )
    lines = CALLS.splitlines()
    refused = {number for number, line in enumerate(lines, start=1) if "# refused" in line}
    errors = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error: " in line}
    assert errors == refused, run.stdout + run.stderr
    revealed = re.findall(r'Revealed type is "(.*)"', run.stdout.replace("torch._tensor.", "").replace("builtins.", ""))
    assert revealed == re.findall(r"reveal_type.*# (.*)", CALLS), run.stdout
