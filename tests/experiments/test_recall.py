"""Associative recall: the task and a dictionary, the model, the grid that goes on, the report."""

import json
import re
from argparse import Namespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from benchmarks import harness
from studies import recall
from studies.recall import FILLER, Run, Shape, Task

TINY = [
    "--shapes", "16,2,2", "16,4,2", "--widths", "8", "--vocabulary", "16", "--steps", "4",
    "--queries", "8", "--backend", "reference", "--seeds", "2", "--learning-rates", "0.01", "0.1",
]
SETUP = Namespace(
    shapes=[Shape(16, 2, 2), Shape(16, 4, 2)], heads=2, vocabulary=16, learning_rates=[1e-2, 2e-2],
    seeds=[0, 1], steps=4, queries=8, weight_decay=0.1, backend="reference", graph=False,
)


def setup_with(**changes) -> Namespace:
    return Namespace(**vars(SETUP) | changes)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", ["recall", "forgetting"])
def test_answers_equal_a_dictionary(name, count):
    """Written independently: read the pairs from the left into a dictionary, the later ones over the earlier ones."""
    batch = Task(name, 40, count, rows=20, vocabulary=50, device="cpu").draw(generator())
    answers = dict(zip(batch.positions.tolist(), batch.answers.tolist(), strict=True))
    for row, tokens in enumerate(batch.tokens.tolist()):
        last = {}
        for key, value in zip(tokens[: 2 * count : 2], tokens[1 : 2 * count : 2], strict=True):
            assert 1 <= key < 25 <= value < 50
            last[key] = value
        assert len(last) == (count if name == "recall" else count // 2)
        behind = {place: token for place, token in enumerate(tokens) if place >= 2 * count and token != FILLER}
        assert sorted(behind.values()) == sorted(last)  # every key is asked for once
        for place, key in behind.items():
            assert answers.pop(40 * row + place) == last[key]
    assert not answers


def test_a_run_learns():
    """Two pairs of keys and values: better than one of the values at random, and the loss falls."""
    shapes = (Shape(8, 2, 32),)
    setup = setup_with(steps=150, queries=100, shapes=shapes, seeds=(0,), vocabulary=8)
    row = recall.train(("recall", "alibi-learned", 16), setup, "cpu")
    losses = row["loss"][1][0]
    assert losses[-1] < 0.7 * losses[0]
    assert max(x[0][0] for x in row["test"]) > 0.45  # of 4 values, 2 were seen


def test_rates_rise_and_fall_and_spare_norms():
    run = Run(("recall", "scalar", 8), setup_with(steps=30), 0.5, 0, "cpu")
    names = {id(p): name for name, p in run.model.named_parameters()}
    decayed, spared = ({names[id(p)].split(".")[-2] for p in group["params"] if "." in names[id(p)]}
                       for group in run.optimizer.param_groups)
    assert decayed == {"in_proj", "out_proj"}
    assert not decayed & spared
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]
    rates = []
    for _ in range(30):
        run.step()
        rates.append(run.optimizer.param_groups[1]["lr"])
    assert rates == pytest.approx([0.5 * min((n + 1) / 3, (30 - n) / 28) for n in range(30)])
    assert run.losses.isfinite().all()


def test_the_rate_is_chosen_by_validation():
    row = {"learning_rates": [0.1, 0.2], "shapes": [[8, 2, 1], [16, 4, 1]],
           "validation": [[[0.5, 0.1], [0.7, 0.1]], [[0.3, 0.3]] * 2],
           "test": [[[0.4, 0.2], [0.6, 0.1]], [[1.0, 1.0]] * 2]}
    chosen = recall.selected(row)
    assert (chosen.rate, chosen.shapes) == (0.1, [(8, 2, 1), (16, 4, 1)])
    assert chosen.mean == pytest.approx([0.5, 0.15])
    assert (chosen.least, chosen.most) == ([0.4, 0.1], [0.6, 0.2])


def test_a_run_is_resumed_cell_by_cell(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DECAYATTN_COMMIT", "abc")
    output = tmp_path / "recall.json"
    arguments = [*TINY, "--tasks", "forgetting", "--output", str(output)]
    assert harness.main(recall, [*arguments, "--modes", "scalar"]) == 0
    first = json.loads(output.read_text())
    assert (first["commit"], [row["mode"] for row in first["rows"]]) == ("abc", ["scalar"])
    row = first["rows"][0]
    assert [len(row["test"]), len(row["test"][0]), len(row["test"][0][0])] == [2, 2, 2]
    assert harness.main(recall, [*arguments, "--modes", "scalar", "none", "--minutes", "1e-9"]) == 0
    assert "1 of 1 are left" in capsys.readouterr().out
    assert harness.main(recall, [*arguments, "--modes", "scalar", "none"]) == 0
    second = json.loads(output.read_text())
    assert [row["mode"] for row in second["rows"]] == ["scalar", "none"]
    assert second["rows"][0] == row
    with pytest.raises(SystemExit, match="has setup"):
        harness.main(recall, [*arguments, "--steps", "5"])
    monkeypatch.setenv("DECAYATTN_COMMIT", "other")
    with pytest.raises(SystemExit, match="has commit abc, expected other"):
        harness.main(recall, arguments)


def test_a_cell_that_fails_fails_the_run_and_no_other(tmp_path, capsys, monkeypatch):
    real = recall.train

    def fails(cell, setup, device):
        if cell[1] == "retnet":
            raise RuntimeError("no such rates")
        return real(cell, setup, device)

    monkeypatch.setattr(recall, "train", fails)
    output = tmp_path / "recall.json"
    modes = ["--tasks", "recall", "--modes", "retnet", "none"]
    assert harness.main(recall, [*TINY, *modes, "--output", str(output)]) == 1
    assert "no such rates" in capsys.readouterr().out
    assert [row["mode"] for row in json.loads(output.read_text())["rows"]] == ["none"]


def test_bad_options_are_refused(capsys):
    for name, wrong in (("--widths", "10"), ("--shapes", "16,5,1"), ("--shapes", "12,4,1"), ("--shapes", "16,4"),
                        ("--minutes", "0"), ("--vocabulary", "8"), ("--learning-rates", "-1")):
        with pytest.raises(SystemExit):
            harness.parse(recall, [*TINY, name, wrong])
        assert re.search(f"error: (argument )?{name}: expected", capsys.readouterr().err)


def test_every_sequence_counts_the_same_in_the_loss():
    """The mean over sequences of the mean over their queries."""
    run = Run(("recall", "none", 8), setup_with(shapes=(Shape(8, 2, 3), Shape(16, 4, 1))), 1e-2, 0, "cpu")
    state, expected = run.generator.get_state(), 0.0
    for task in run.tasks:
        batch = task.draw(run.generator)
        losses = F.cross_entropy(run.model(batch.tokens, batch.positions), batch.answers, reduction="none")
        expected += losses.view(task.rows, task.keys).mean(1).sum().detach() / 4
    run.generator.set_state(state)
    run.step()
    torch.testing.assert_close(run.losses[0], expected)


@pytest.mark.parametrize(("count", "taken", "replayed"), [(2, 2, 0), (7, 4, 4)])
def test_graphs_take_as_many_steps(count, taken, replayed, monkeypatch):
    """Three steps are launched, one is captured, which does not run, and the rest is replayed."""
    run, steps, cuda = Run(("recall", "none", 8), setup_with(steps=7), 1e-2, 0, "cpu"), [], mock.MagicMock()
    run.setup.graph = True
    monkeypatch.setattr(recall.torch, "cuda", cuda)
    monkeypatch.setattr(Run, "step", lambda run: steps.append(run))
    run.steps(count)
    assert (len(steps), cuda.CUDAGraph().replay.call_count) == (taken, replayed)
    assert cuda.CUDAGraph().register_generator_state.called == (replayed > 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_graphs_and_launches_learn_alike():
    """Over 8 steps: sums of gradients in another order grow apart, by 3 % of one loss after 20."""
    found = []
    for graph in (False, True):
        setup = setup_with(graph=graph, steps=8, backend="auto")
        found.append(recall.train(("recall", "scalar", 64), setup, "cuda"))
    losses = [torch.tensor(row["loss"]) for row in found]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
