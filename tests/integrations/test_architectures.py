"""Every architecture of transformers with attn_implementation="decayattn", as results/architectures.json has it."""

import json
import os

import pytest
from repository_files import ROOT

pytest.importorskip("transformers")

import transformers
from tools import sweep_architectures

PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_architecture_is_wrong(part):
    names = sweep_architectures.architectures()[part::PARTS]
    found = dict(sweep_architectures.sweep(names, os.cpu_count() or 1))
    assert not {name: outcome for name, outcome in found.items() if outcome["outcome"] == "wrong"}
    recorded = json.loads((ROOT / "results/architectures.json").read_text())
    if recorded["transformers"] == transformers.__version__:
        kinds = {name: outcome["outcome"] for name, outcome in found.items()}
        assert kinds == {name: recorded["architectures"].get(name, {}).get("outcome") for name in names}
