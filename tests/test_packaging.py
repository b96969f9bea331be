"""What is installed and shipped: the version, the source distribution, the types that a checker sees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import decayattn

ROOT = Path(__file__).parents[1]

CALLS = """
import torch
from decayattn import decay_attention, decay_attention_varlen

q = torch.randn(1, 3, 2, 4)
cu = torch.tensor([0, 3])
asked = bool(cu[1] > 2)

decay_attention(q, q, q).transpose(1, 2)
out, lse = decay_attention(q, q, q, -0.1, return_lse=True, window_size=(3, 0), seqused_k=cu[1:])
reveal_type(decay_attention(q, q, q, return_lse=asked))
decay_attention_varlen(
    q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=3, max_seqlen_k=3
).transpose(0, 1)
decay_attention(q, q, q, softmax_scale=0.1)  # refused
decay_attention_varlen(q[0], q[0], q[0])  # refused
"""


def test_the_version_is_a_literal():
    """pyproject.toml has it read from there, without an import of the package."""
    package = (ROOT / "decayattn/__init__.py").read_text(encoding="utf-8")
    assert f'\n__version__ = "{decayattn.__version__}"\n' in package
    assert 'version = { attr = "decayattn.__version__" }' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_source_distribution_has_every_folder():
    """setuptools itself takes the package and files called test*.py."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=False)
    if not listed.stdout:
        pytest.skip("not a clone")
    folders = {path.split("/")[0] for path in listed.stdout.splitlines() if "/" in path}
    lines = (ROOT / "MANIFEST.in").read_text().splitlines()
    assert folders == {"decayattn", *(line.removeprefix("graft ") for line in lines if line.startswith("graft"))}


@pytest.mark.slow  # mypy reads all of torch
def test_types_as_mypy_sees_them(tmp_path):
    """Of the package as it is installed, editable or not."""
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(CALLS)
    environment = os.environ | {"MYPY_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--hide-error-context", "calls.py"], cwd=tmp_path, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = CALLS.splitlines()
    refused = {number for number, line in enumerate(lines, start=1) if "# refused" in line}
    errors = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error: " in line}
    assert errors == refused, run.stdout + run.stderr
    assert "Tensor | tuple[" in next(line for line in run.stdout.splitlines() if "Revealed type" in line)
