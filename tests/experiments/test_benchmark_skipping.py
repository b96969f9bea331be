"""The benchmark of skipping: right before fast, ratios, rows."""

import pytest
import torch
from benchmark_runs import count_milliseconds, run
from benchmarks import skipping
from benchmarks.harness import DIRECTIONS, Case
from benchmarks.skipping import PRUNED, SKIPPING, WHOLE

from decayattn import decay_attention

SMALL, PLANNED = (Case(1, 2, length, 16, "float32", "scalar", -0.5) for length in (300, 640))
ARGUMENTS = ["--dtype", "float32", "--backend", "reference", "--heads", "2", "--head-dims", "8", "--rounds", "2"]


def test_plans_are_timed(device):
    first_block = skipping.plan(PLANNED, PLANNED.inputs(device, 0))()
    assert first_block.shape[:2] == (1, 2)
    assert (first_block[..., :10] > 0).any()
    assert skipping.plan(SMALL, SMALL.inputs(device, 0)) is None  # too short to be planned
    timings = {(peer, way): [2.0] for peer in (WHOLE, SKIPPING) for way in DIRECTIONS}
    found = skipping.rows("planning", PLANNED, timings, torch.ones(1, 2), 20.0)
    assert [row["plan_us"] for row in found] == [None, None, 20.0, None]


@pytest.fixture
def timed(monkeypatch):
    """The eager reference in place of the kernels, by a counting clock: it skips nothing."""
    count_milliseconds(monkeypatch)
    monkeypatch.setattr(skipping, "visited_fraction", lambda q, *_: torch.full((1, 2), 0.25))


@pytest.mark.usefixtures("timed")
def test_a_run_leaves_rows_and_json(tmp_path):
    sizes = ["--planning", "20", "--tokens", "40", "--pruning", "30", "--constant", "30", "--lengths", "16", "32"]
    status, read = run(skipping, tmp_path, *ARGUMENTS, *sizes, "--whole-up-to", "30")
    assert status == 0
    assert {row["study"] for row in read["rows"]} == set(skipping.STUDIES)
    assert {row["peer"] for row in read["rows"] if row["length"] == 32} == {SKIPPING}
    for row in (row for row in read["rows"] if row["peer"] == SKIPPING):
        assert (row["visited"], row["ideal"]) == ([0.25, 0.25], 4.0)
        alike = ("study", "rates", "deviation", "length", "direction")
        whole = [r for r in read["rows"] if r["peer"] == WHOLE and all(r[key] == row[key] for key in alike)]
        assert row["speed_over_whole"] == (whole[0]["ms"] / row["ms"] if whole else None)
    # cuDNN and the official kernel do not run on a CPU, which fails nothing of ours
    assert {entry["peer"] for entry in read["missing"]} == {"cudnn", PRUNED}


@pytest.mark.usefixtures("timed")
def test_wrong_results_get_no_speed(tmp_path, monkeypatch):
    monkeypatch.setattr(skipping, "compared", lambda *_: (["dk"], ["a table"]))
    status, read = run(skipping, tmp_path, *ARGUMENTS, "--studies", "lengths", "--lengths", "16")
    assert (status, read["rows"]) == (1, [])
    assert read["missing"][0]["reason"] == "dk outside the error budget: no speed is reported"


@pytest.mark.parametrize("whole_heads", [10**6, 0])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_skipping_too_much_shows(factor, whole_heads, monkeypatch):
    """Checked in whole heads, and in the last rows alone."""

    def planted(*tensors, skip_tolerance=None, **rest):
        result = decay_attention(*tensors, skip_tolerance=None, **rest)
        if skip_tolerance is None:
            return result
        return (result[0] * factor, result[1]) if isinstance(result, tuple) else result * factor

    monkeypatch.setattr(skipping, "WHOLE_HEADS", whole_heads)
    monkeypatch.setattr(skipping, "decay_attention", planted)
    monkeypatch.setattr("decayattn.testing.call.decay_attention", planted)
    outside, table = skipping.compared(SMALL, SMALL.inputs("cpu", 0), "reference")
    assert (not outside) == (factor == 1.0)
    assert any("out" in line for line in table)
