"""Associative recall: the task and a dictionary, models side by side and alone, the grid that goes on, the report."""

import contextlib
import json
import re
import types

import pytest
import torch
import torch.nn.functional as F
from studies import grid, recall
from studies.recall import FILLER, MODES, AdamW, Gates, Run, Setup, Shape, SideBySide, Task

from decayattn.nn import ScalarDecay

TINY = [
    "--shapes", "16,2,2", "16,4,2", "--widths", "8", "--vocabulary", "16", "--steps", "4",
    "--queries", "8", "--backend", "reference", "--seeds", "2", "--learning-rates", "0.01", "0.1",
]
SETUP = Setup(
    shapes=(Shape(16, 2, 2), Shape(16, 4, 2)), heads=2, vocabulary=16, learning_rates=(1e-2, 2e-2),
    seeds=(0, 1), steps=4, queries=8, weight_decay=0.1, backend="reference", graph=False,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", ["recall", "forgetting"])
def test_answers_are_what_a_dictionary_holds(name, count):
    """Written anew: read the pairs from the left into a dictionary, the later ones over the earlier ones."""
    task = Task(name, 40, count, rows=7, vocabulary=50, device="cpu")
    batch = task.draw(3, generator())
    for draw in range(3):
        answers = dict(zip(batch.positions[draw].tolist(), batch.answers[draw].tolist(), strict=True))
        for row in range(7):
            tokens = batch.tokens[draw, row].tolist()
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


def test_sequences_come_from_the_seed_alone():
    task = Task("recall", 32, 8, rows=4, vocabulary=64, device="cpu")
    one, same, other = (task.draw(2, generator(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.tokens, other.tokens)
    assert not torch.equal(one.tokens[0], one.tokens[1])


def test_keys_pairs_and_distances_are_random():
    """Each slot for a query is taken at least once in many, the near ones most; so is each key and each value."""
    task = Task("recall", 32, 2, rows=2000, vocabulary=12, device="cpu")
    batch = task.draw(1, generator())
    slots = torch.bincount(batch.positions[0] % 32 // 2, minlength=16)
    assert not slots[:2].any()
    assert (slots[2:] > 0).all()
    assert slots[2] > slots[4] > slots[8]
    assert (torch.bincount(batch.answers[0])[6:] > 400).all()  # 4000 among 6 values


@pytest.mark.parametrize(
    ("change", "message"),
    [({"name": "other"}, "name: "), ({"pairs": 5}, "pairs: "), ({"vocabulary": 8}, "vocabulary: "),
     ({"name": "forgetting", "pairs": 3}, "pairs: ")],
)
def test_a_task_that_cannot_be_is_refused(change, message):
    options = {"name": "recall", "length": 16, "pairs": 4, "rows": 2, "vocabulary": 32, "device": "cpu"} | change
    with pytest.raises(ValueError, match=f"^{message}"):
        Task(**options)


@pytest.mark.parametrize("mode", MODES)
def test_models_side_by_side_are_models_alone(mode):
    """The same logits and gradients as each model by itself, and none of one model for the weights of another."""
    options = {"mode": mode, "width": 8, "heads": 2, "vocabulary": 16, "backend": "reference"}
    many = SideBySide([3, 4, 3], **options).double()
    with torch.no_grad():  # larger than they start, so that every part matters
        for parameter in many.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=parameter.dtype))
    batch = Task("recall", 16, 4, rows=3, vocabulary=16, device="cpu").draw(2, generator())
    draw_of = torch.tensor([0, 1, 1])
    logits = many(batch.tokens, batch.positions, draw_of)
    weights = torch.randn(logits[0].shape, dtype=torch.float64)
    for model in range(3):
        one = SideBySide([3], **options).double()
        for own, shared in zip(one.parameters(), many.parameters(), strict=True):
            own.data.copy_(shared.data.reshape(3, -1)[model].view(own.shape))
        alone = one(batch.tokens, batch.positions, draw_of[model : model + 1])[0]
        torch.testing.assert_close(logits[model], alone)
        shared = torch.autograd.grad((logits[model] * weights).sum(), list(many.parameters()), retain_graph=True)
        own = torch.autograd.grad((alone * weights).sum(), list(one.parameters()))
        for x, y in zip(shared, own, strict=True):
            rows = x.reshape(3, -1)
            torch.testing.assert_close(rows[model], y.flatten())
            assert not rows[[m for m in range(3) if m != model]].any()


def test_gates_are_those_of_the_library():
    one, gates = ScalarDecay(6, 2), Gates(3, 6, 2)
    with torch.no_grad():
        one.weight.normal_()
        gates.weight[1] = one.weight
    x = torch.randn(2, 5, 18)
    torch.testing.assert_close(gates(x)[..., 2:4], one(x[..., 6:12]))


def test_gates_take_any_strides_from_einsum(monkeypatch):
    """A GPU's einsum puts the models first, and its logsigmoid keeps them there; on a CPU both are contiguous."""
    gates, x = Gates(3, 6, 2), torch.randn(2, 5, 18)
    expected, logsigmoid = gates(x), F.logsigmoid
    monkeypatch.setattr(F, "logsigmoid", lambda y: logsigmoid(y.transpose(0, 1)).transpose(0, 1))
    assert torch.equal(gates(x), expected)


def test_the_same_seed_starts_alike_in_every_mode():
    models = [SideBySide([5, 6], mode=m, width=8, heads=2, vocabulary=16, backend="reference") for m in MODES]
    for model in models[1:]:
        assert torch.equal(model.layers[1].in_proj.weight, models[0].layers[1].in_proj.weight)
        assert torch.equal(model.embedding, models[0].embedding)
    assert not torch.equal(models[0].embedding[0], models[0].embedding[1])


def test_the_optimiser_is_adamw_for_every_row():
    """The same as torch's own, with its clipping and the same schedule."""
    steps, rates = 25, [0.1, 0.01]
    start, targets = torch.randn(2, 6), torch.randn(2, 6) * 3
    decayed = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
    values = start.clone()
    ours = AdamW(values, torch.tensor(rates), steps, decayed)
    for _ in range(steps):
        ours.step(values - targets)
    for row, rate in enumerate(rates):
        parts = [start[row, :2].clone().requires_grad_(), start[row, 2:].clone().requires_grad_()]
        groups = [{"params": [parts[0]], "weight_decay": 0.5}, {"params": [parts[1]], "weight_decay": 0.0}]
        theirs = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(theirs, lambda n: min((n + 1) / 2, (steps - n) / (steps - 1)))
        for _ in range(steps):
            gradient = torch.cat(parts).detach() - targets[row]
            parts[0].grad, parts[1].grad = gradient[:2].clone(), gradient[2:].clone()
            torch.nn.utils.clip_grad_norm_(parts, 1.0)
            theirs.step()
            schedule.step()
        torch.testing.assert_close(values[row], torch.cat(parts).detach(), rtol=1e-4, atol=1e-5)


def test_a_run_learns():
    """Two pairs of keys and values: better than one of the values at random, and the loss falls."""
    shapes = (Shape(8, 2, 32),)
    setup = SETUP._replace(steps=150, queries=100, shapes=shapes, seeds=(0,), vocabulary=8)
    row = recall.train(("recall", "alibi-learned", 16), setup, "cpu")
    losses = row["loss"][1][0]
    assert losses[-1] < 0.7 * losses[0]
    assert max(x[0][0] for x in row["test"]) > 0.45  # 4 values; 2 of them were seen


def test_a_model_that_diverges_does_not_touch_the_others():
    setup = SETUP._replace(learning_rates=(1e-2, 1e30))
    with_it = recall.train(("recall", "scalar", 8), setup, "cpu")
    setup = SETUP._replace(learning_rates=(1e-2,))
    without = recall.train(("recall", "scalar", 8), setup, "cpu")
    torch.testing.assert_close(torch.tensor(with_it["loss"][0]), torch.tensor(without["loss"][0]))
    assert not torch.tensor(with_it["loss"][1]).isfinite().all()


def test_the_rate_is_chosen_by_validation():
    row = {"learning_rates": [0.1, 0.2], "shapes": [[8, 2, 1], [16, 4, 1]],
           "validation": [[[0.5, 0.1], [0.7, 0.1]], [[0.3, 0.3]] * 2],
           "test": [[[0.4, 0.2], [0.6, 0.1]], [[1.0, 1.0]] * 2]}
    chosen = recall.selected(row)
    assert (chosen.rate, chosen.shapes) == (0.1, [(8, 2, 1), (16, 4, 1)])
    assert chosen.mean == pytest.approx([0.5, 0.15])
    assert (chosen.least, chosen.most) == ([0.4, 0.1], [0.6, 0.2])


def test_a_run_is_resumed_cell_by_cell(tmp_path, capsys, monkeypatch):
    output = tmp_path / "recall.json"
    arguments = [*TINY, "--tasks", "forgetting", "--commit", "abc", "--output", str(output)]
    assert grid.main(recall, [*arguments, "--modes", "scalar"]) == 0
    first = json.loads(output.read_text())
    assert (first["commit"], [row["mode"] for row in first["rows"]]) == ("abc", ["scalar"])
    row = first["rows"][0]
    assert [len(row["test"]), len(row["test"][0]), len(row["test"][0][0])] == [2, 2, 2]
    assert (tmp_path / "recall.png").stat().st_size > 10_000
    assert grid.main(recall, [*arguments, "--modes", "scalar", "none", "--minutes", "1e-9"]) == 0
    assert "1 cells are left" in capsys.readouterr().out
    assert grid.main(recall, [*arguments, "--modes", "scalar", "none"]) == 0
    second = json.loads(output.read_text())
    assert [row["mode"] for row in second["rows"]] == ["scalar", "none"]
    assert second["rows"][0] == row
    with pytest.raises(SystemExit, match="has setup"):
        grid.main(recall, [*arguments, "--steps", "5"])
    with pytest.raises(SystemExit, match="has commit abc, expected other"):
        grid.main(recall, [*arguments, "--commit", "other"])


def test_a_cell_that_fails_fails_the_run_and_no_other(tmp_path, capsys, monkeypatch):
    real = recall.train

    def fails(cell, setup, device):
        if cell[1] == "retnet":
            raise RuntimeError("no such rates")
        return real(cell, setup, device)

    monkeypatch.setattr(recall, "train", fails)
    output = tmp_path / "recall.json"
    modes = ["--tasks", "recall", "--modes", "retnet", "none"]
    assert grid.main(recall, [*TINY, *modes, "--output", str(output)]) == 1
    assert "no such rates" in capsys.readouterr().out
    assert [row["mode"] for row in json.loads(output.read_text())["rows"]] == ["none"]


def test_options_that_cannot_be_are_refused(capsys):
    for name, wrong in (("--widths", "10"), ("--shapes", "16,5,1"), ("--shapes", "12,4,1"), ("--shapes", "16,4"),
                        ("--minutes", "0"), ("--learning-rates", "-1")):
        with pytest.raises(SystemExit):
            grid.parse(recall, [*TINY, name, wrong])
        assert re.search(f"error: (argument )?{name}: expected", capsys.readouterr().err)


@pytest.mark.slow
def test_several_processes_train_what_one_does(tmp_path):
    rows = []
    for processes in ("1", "2"):
        output = tmp_path / f"{processes}.json"
        modes = ["--tasks", "recall", "--modes", "scalar", "none"]
        assert grid.main(recall, [*TINY, *modes, "--output", str(output), "--processes", processes]) == 0
        found = sorted(json.loads(output.read_text())["rows"], key=lambda row: row["mode"])
        rows.append([{key: x for key, x in row.items() if key != "seconds"} for row in found])
    assert rows[0] == rows[1]


def test_every_sequence_counts_the_same_in_the_loss():
    """The mean over sequences of the mean over their queries, of every model."""
    setup = SETUP._replace(shapes=(Shape(8, 2, 3), Shape(16, 4, 1)))
    run = Run(("recall", "none", 8), setup, "cpu")
    state = run.generator.get_state()
    expected = torch.zeros(len(run.flat))
    for task in run.tasks:
        batch = task.draw(2, run.generator)
        logits = run.model(batch.tokens, batch.positions, run.draw_of).detach()
        for model, draw in enumerate(run.draw_of):
            losses = F.cross_entropy(logits[model], batch.answers[draw], reduction="none").view(task.rows, task.keys)
            expected[model] += losses.mean(1).sum() / 4
    run.generator.set_state(state)
    run.step()
    torch.testing.assert_close(run.losses[0], expected)


@pytest.mark.parametrize("count", [2, 7])
def test_a_graph_takes_as_many_steps(count, monkeypatch):
    """A stand-in for CUDA: what is captured is not run, and runs at every replay."""
    taken, captured, capturing = [], [], []

    class Graph:
        def register_generator_state(self, generator):
            captured.append(generator)

        def replay(self):
            captured[1]()

    class Stream:
        def wait_stream(self, other):
            pass

    @contextlib.contextmanager
    def graph(graph):
        capturing.append(True)
        yield
        capturing.pop()

    def step(self):
        if capturing:
            captured.append(lambda: taken.append("replayed"))
        else:
            taken.append("launched")

    cuda = types.SimpleNamespace(
        CUDAGraph=Graph, Stream=Stream, current_stream=Stream, stream=lambda stream: contextlib.nullcontext(),
        graph=graph, synchronize=lambda: None,
    )
    run = Run(("recall", "none", 8), SETUP._replace(graph=True, steps=7), "cpu")
    monkeypatch.setattr(recall.torch, "cuda", cuda)
    monkeypatch.setattr(Run, "step", step)
    run.steps(count)
    assert taken == ["launched"] * min(count, 3) + ["replayed"] * max(0, count - 3)
    assert captured[:1] == [run.generator] * (count > 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_a_graph_learns_what_launches_learn():
    found = []
    for graph in (False, True):
        setup = SETUP._replace(graph=graph, steps=20, backend="auto")
        found.append(recall.train(("recall", "scalar", 64), setup, "cuda"))
    losses = [torch.tensor(row["loss"]) for row in found]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
