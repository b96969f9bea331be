"""RECIPES.md: every recipe runs after the lines that all share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository_files import code_blocks

import decayattn

SHARED, *RECIPES = code_blocks("python", Path(decayattn.__file__).parent / "RECIPES.md")


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
