"""Length extrapolation in miniature: the same texts for all, losses at the right positions, what is cut off goes on."""

import itertools
import json
import math
import random
import signal
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import length_extrapolation
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from extrapolation import figure, reading, results, training, workers
from extrapolation.settings import DEFAULT_SCHEMES, Run, Settings
from language_models import corpus as corpora
from language_models.schemes import SCHEMES
from shared.plots import kilo

SETTINGS = Settings(
    layers=1, width=16, heads=2, context=16, batch_size=4, steps=20, learning_rate=3e-3, lengths=(64, 256),
    crops=(6, 3), without_decay_up_to=64, precision="float32",
)
TINY = [
    "--device", "cpu", "--preset", "cpu", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16",
    "--batch-size", "4", "--steps", "20", "--lengths", "64", "256", "--crops", "6", "3", "--without-decay-up-to", "64",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Ten packages of one file in which words follow from one another."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(10):
        words = random.Random(number).choices(["abra", "cada", "bra, ", "def f(x):\n", "    return x\n"], k=400)
        (folder / f"package{number}").mkdir()
        (folder / f"package{number}" / "file.py").write_text("".join(words))
    return folder


@pytest.fixture(scope="module")
def corpus(data, tmp_path_factory) -> corpora.Corpus:
    return corpora.build(corpora.in_folder(data), tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory) -> Path:
    """The result of a whole call."""
    folder = tmp_path_factory.mktemp("measured")
    assert length_extrapolation.main(call(data, folder)) == 0
    return folder / "result.json"


def call(data: Path, folder: Path, *more: str) -> list[str]:
    return [*TINY, "--data", str(data), "--folder", str(folder), "--output", str(folder / "result.json"), *more]


def test_a_call_measures_every_scheme_and_says_where_its_figures_are_from(measured):
    result = json.loads(measured.read_text())
    assert [(run["scheme"], run["seed"]) for run in result["runs"]] == [(name, 0) for name in DEFAULT_SCHEMES]
    assert len(DEFAULT_SCHEMES) == 9
    assert {"commit", "torch", "command", "date", "gpu"} <= result.keys()
    assert result["corpus"]["training"]["packages"] + result["corpus"]["held out"]["packages"] == 10
    assert len(result["corpus"]["sha256"]) == 64
    assert result["settings"]["context"] == 16
    for run in result["runs"]:
        scheme = SCHEMES[run["scheme"]]
        assert run["training"]["bits"][0][1] == pytest.approx(8, abs=0.5)
        assert run["training"]["bits"][-1][1] < run["training"]["bits"][0][1]
        read = {row["length"]: row for row in run["reading"]}
        assert set(read) == ({64, 256} if scheme.decays and scheme.any_length else {64})
        for length, row in read.items():
            edges = result["edges"][str(length)]
            assert len(row["bits"]) == len(row["bits_in_windows"]) == len(edges) - 1
            known = [bits for bits, end in zip(row["bits"], edges[1:], strict=True) if bits is not None or end <= 16]
            assert len(known) == (len(edges) - 1 if scheme.any_length else edges.index(16))
            assert all(0 < bits < 9 for bits in known + row["bits_in_windows"])
            columns = {(column["begin"], column["end"]) for column in row["columns"]}
            assert columns == ({(0, 16), (16, 64)} if length == 64 else {(64, 256)})
    assert measured.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not list(measured.parent.glob("checkpoints/*"))


def test_the_runs_of_a_seed_see_the_same_bytes_from_the_same_weights(corpus):
    """So schemes whose model is the same have the same losses, digit by digit; another seed has others."""
    of_models = {}
    for run in (Run("none", 0), Run("none", 1), Run("rotary", 0), Run("scalar", 0)):
        model = training.build_model(SETTINGS, run, "cpu")
        of_models[run] = torch.cat([p.flatten() for name, p in model.named_parameters() if ".decay." not in name])
    assert torch.equal(of_models[Run("none", 0)], of_models[Run("rotary", 0)])
    assert torch.equal(of_models[Run("none", 0)], of_models[Run("scalar", 0)])
    assert not torch.equal(of_models[Run("none", 0)], of_models[Run("none", 1)])
    # learned ALiBi whose rates cannot move is ALiBi
    asked = []
    for scheme in ("alibi", "alibi-learned"):
        settings = replace(SETTINGS, steps=10, learning_rate=1e-12)
        asked.append(training.train(settings, Run(scheme, 0), corpus, corpus.text, Path("none.pt"))[1]["bits"])
    assert asked[0] == asked[1]


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(corpus, tmp_path):
    whole, said = training.train(SETTINGS, Run("scalar", 0), corpus, corpus.text, tmp_path / "a.pt")
    with pytest.raises(training.Stopped):
        training.train(SETTINGS, Run("scalar", 0), corpus, corpus.text, tmp_path / "b.pt", should_stop=lambda: True)
    assert torch.load(tmp_path / "b.pt", weights_only=True)["step"] == training.LOOK
    steps = []
    model, again = training.train(
        SETTINGS, Run("scalar", 0), corpus, corpus.text, tmp_path / "b.pt", on_look=lambda n, _: steps.append(n)
    )
    assert steps == [10, 10]  # those of before, and those of this call
    assert again["bits"] == said["bits"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    with pytest.raises(ValueError, match="is of other settings or texts"):
        training.train(replace(SETTINGS, clip=2.0), Run("scalar", 0), corpus, corpus.text, tmp_path / "b.pt")


def test_a_model_that_diverges_is_told_and_not_read(data, tmp_path, capsys):
    arguments = call(data, tmp_path, "--schemes", "none", "--learning-rate", "1e30", "--clip", "1e30")
    assert length_extrapolation.main(arguments) == 1
    [run] = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert run["diverged"] in (10, 20)
    assert run["reading"] == []
    printed = capsys.readouterr().out
    assert "no position (1 of 1 diverged)" in printed
    assert "no figure: no run has been read" in printed


class LastByteBefore(torch.nn.Module):
    """Expects the byte of `back` places before, if there is one, with certainty; else knows nothing."""

    def __init__(self, back: int):
        super().__init__()
        self.back = back

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        past = tokens.long()[:, : max(0, tokens.shape[1] - self.back + 1)]
        logits[:, self.back - 1 :] = 100.0 * F.one_hot(past, 256)
        return logits


def test_losses_are_of_the_positions_that_they_say():
    """Texts repeat after 40 bytes: known from the position on at which so many bytes are before it."""
    tokens = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 7)[:, :257]
    bits = reading.losses(LastByteBefore(40), tokens, SETTINGS)
    assert bits.shape == (3, 256)
    torch.testing.assert_close(bits[:, :39], torch.full((3, 39), 8.0))
    assert bits[:, 39:].max() < 1e-3
    # a window of 16 bytes never has 40 before, and has 5 from the fifth byte on or from its middle on
    in_windows = reading.losses_in_windows(LastByteBefore(40), tokens, SETTINGS)
    torch.testing.assert_close(in_windows, torch.full((3, 256), 8.0))
    tokens = torch.randint(256, (3, 5), generator=torch.Generator().manual_seed(0)).repeat(1, 60)[:, :257]
    in_windows = reading.losses_in_windows(LastByteBefore(5), tokens, SETTINGS)
    assert in_windows.shape == (3, 256)
    assert in_windows[:, :4].min() > 7.9
    assert in_windows[:, 4:].max() < 1e-3


def test_windows_are_the_model_on_the_bytes_before(corpus):
    """No more than the trained length of them, and at least half as many."""
    model = training.build_model(SETTINGS, Run("scalar", 0), "cpu").eval()
    tokens = corpora.crops(corpus.text, corpora.held_out_starts(corpus, 65, 2, 1), 65)
    with torch.no_grad():
        found = reading.losses_in_windows(model, tokens, SETTINGS)
        for position in (0, 7, 15, 16, 23, 24, 63):
            begin = 0 if position < 16 else position // 8 * 8 - 8
            alone = reading.losses(model, tokens[:, begin : position + 2], SETTINGS)[:, -1]
            torch.testing.assert_close(found[:, position], alone, rtol=1e-4, atol=1e-4)


def test_columns_and_stretches_are_means_over_their_positions():
    whole = torch.arange(64.0).expand(3, 64) + torch.tensor([[0.0], [1.0], [5.0]])
    in_windows = torch.arange(64.0).expand(3, 64)
    found = reading.column(16, 64, whole, in_windows, 16)
    assert found["bits"] == pytest.approx(39.5 + 2)
    assert found["in_windows"] == pytest.approx(39.5)
    assert found["standard_error"] == pytest.approx(math.sqrt(7) / math.sqrt(3))
    assert reading.column(16, 64, None, in_windows, 16)["bits"] is None
    assert reading.column(0, 16, None, in_windows, 16)["bits"] == pytest.approx(7.5)
    assert reading._binned(in_windows, [0, 2, 64]) == [0.5, 32.5]
    assert reading._binned(in_windows[:, :16], [0, 2, 16, 64]) == [0.5, 8.5, None]
    for length in SETTINGS.lengths:
        edges = SETTINGS.bins(length)
        assert (edges[0], edges[-1]) == (0, length)
        assert {16, 64} <= set(edges)
        assert all(a < b for a, b in itertools.pairwise(edges))
    assert SETTINGS.columns() == [(0, 16), (16, 64), (64, 256)]
    assert len(replace(SETTINGS, context=1024, lengths=(16_384, 65_536)).bins(65_536)) < 300


def test_a_later_call_adds_what_is_missing_and_refuses_what_does_not_fit(data, tmp_path, capsys):
    assert length_extrapolation.main(call(data, tmp_path, "--schemes", "none")) == 0
    first = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert length_extrapolation.main(call(data, tmp_path, "--schemes", "none", "rotary", "--seeds", "0", "1")) == 0
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert runs[0] == first[0]
    assert [(run["scheme"], run["seed"]) for run in runs[1:]] == [("rotary", 0), ("none", 1), ("rotary", 1)]
    capsys.readouterr()
    assert length_extrapolation.main(call(data, tmp_path, "--steps", "30")) == 2
    assert "has steps 20, this call 30; give another --output" in capsys.readouterr().err
    assert length_extrapolation.main(call(data, tmp_path, "--commit", "abc")) == 2
    assert "this call abc; give another --output" in capsys.readouterr().err
    assert length_extrapolation.main(call(data, tmp_path, "--held-out", "0.4")) == 2
    assert "has held_out 0.15, this call 0.4" in capsys.readouterr().err


def test_a_call_without_time_starts_nothing_new_and_keeps_what_is_in_progress(corpus, tmp_path, monkeypatch):
    """The deadline passes in the middle of the first run; the second one is not begun."""
    job = workers.Job(SETTINGS, tmp_path, False, deadline=1000.0)
    monkeypatch.setattr(corpora, "load", lambda folder: corpus)
    clock = itertools.chain([0.0] * 3, itertools.repeat(1001.0))
    monkeypatch.setattr(workers, "time", SimpleNamespace(time=lambda: next(clock), monotonic=lambda: 0.0))
    waiting, said = [Run("none", 0), Run("none", 1)], []
    workers.work(job, "cpu", lambda: waiting.pop(0), said.append, lambda: False)
    assert said[-1].stopped
    assert (tmp_path / "checkpoints" / "none-0.pt").exists()
    assert waiting == [Run("none", 1)]
    # a run has taken 600 s, and 300 are left
    times = iter([0.0, 0.0, 100.0, 700.0, 700.0, 700.0])
    monkeypatch.setattr(workers, "time", SimpleNamespace(time=lambda: next(times), monotonic=lambda: 0.0))
    monkeypatch.setattr(workers, "one", lambda *_: {"done": True})
    said.clear()
    workers.work(job, "cpu", lambda: waiting.pop(0), said.append, lambda: False)
    assert [report.result for report in said] == [{"done": True}]


def test_ctrl_c_keeps_a_checkpoint_and_the_next_call_goes_on(data, tmp_path, monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    arguments = call(data, tmp_path, "--schemes", "none", "rotary", "--steps", "40")
    save = training.train

    def interrupted(*given, on_look, **rest):
        def look(steps, seconds):
            on_look(steps, seconds)
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)  # as a signal does, in whatever thread

        return save(*given, on_look=look, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "train", interrupted)
        patch.setattr(workers, "_here", _in_this_thread)
        assert length_extrapolation.main(arguments) == 0
    assert "2 of 2 runs are left" in capsys.readouterr().out
    assert torch.load(tmp_path / "checkpoints" / "none-0.pt", weights_only=True)["step"] == 10
    assert signal.getsignal(signal.SIGINT) is before
    assert length_extrapolation.main(arguments) == 0
    assert len(json.loads((tmp_path / "result.json").read_text())["runs"]) == 2


def _in_this_thread(job, runs, device, asked):
    waiting, said = list(runs), []
    workers.work(job, device, lambda: waiting.pop(0) if waiting else None, said.append, asked)
    return said


@pytest.mark.slow
def test_two_processes_share_the_runs(data, tmp_path, measured):
    """And find what one does."""
    assert length_extrapolation.main(call(data, tmp_path, "--schemes", "alibi", "none", "--devices", "2")) == 0
    found = {run["scheme"]: run for run in json.loads((tmp_path / "result.json").read_text())["runs"]}
    expected = {run["scheme"]: run for run in json.loads(measured.read_text())["runs"]}
    assert set(found) == {"alibi", "none"}
    for scheme, run in found.items():
        assert run["reading"][0]["bits"] == pytest.approx(expected[scheme]["reading"][0]["bits"], abs=1e-4)


@pytest.mark.slow
def test_a_process_that_fails_says_how(data, tmp_path):
    corpora.build(corpora.in_folder(data), tmp_path)
    job = workers.Job(replace(SETTINGS, heads=3), tmp_path, False, None)
    with pytest.raises(RuntimeError, match=r"none, seed 0:\n(.|\n)*num_heads"):
        list(workers.reports(job, [Run("none", 0)], ["cpu", "cpu"]))


def test_the_table_has_means_and_ranges_over_seeds(measured):
    result = json.loads(measured.read_text())
    [run] = [run for run in result["runs"] if run["scheme"] == "scalar"]
    other = json.loads(json.dumps(run)) | {"seed": 1}
    run["reading"][0]["columns"][0]["bits"], other["reading"][0]["columns"][0]["bits"] = 2.0, 2.5
    head, rows = results.table(result | {"runs": [*result["runs"], other]})
    assert head == ["bits per byte", "0–16", "16–64", "16–64, ≤ 16 before", "64–256", "64–256, ≤ 16 before"]
    table = {row[0]: row[1:] for row in rows}
    assert table["scalar decay (FoX)"][0] == "2.250 (2.000–2.500)"
    assert table["rotary"][3:] == ["–", "–"]
    assert table["decay per channel (Wall)"][1] == "–"
    assert float(table["decay per channel (Wall)"][2]) > 0
    assert kilo(16_384) == "16k"


def test_the_figure_shows_the_mean_and_marks_the_trained_length(measured):
    result = json.loads(measured.read_text())
    drawn = figure.draw(result)
    assert len(drawn.axes) == 2
    labels = drawn.axes[0].get_legend_handles_labels()[1]
    assert labels == [SCHEMES[name].label for name in SCHEMES if name in DEFAULT_SCHEMES]
    [trained] = [line for line in drawn.axes[0].lines if line.get_linestyle() == ":"]
    assert set(trained.get_xdata()) == {16}
    positions, means = figure.coarser(np.array([0, 1, 2, 4, 8]), np.array([[1.0, 2.0, 3.0, 4.0]]))
    assert list(means[0]) == [1.0, 2.0, 3.0, 4.0]
    assert all(a < b for a, b in itertools.pairwise(positions))
    with pytest.raises(ValueError, match="no run has been read"):
        figure.draw(result | {"runs": []})


def test_a_result_is_drawn_elsewhere(measured, tmp_path, monkeypatch, capsys):
    plot = tmp_path / "drawn.png"
    assert length_extrapolation.main(["--draw", str(measured), "--plot", str(plot)]) == 0
    assert plot.stat().st_size > 10_000
    plot.unlink()
    monkeypatch.delitem(sys.modules, "extrapolation.figure")
    monkeypatch.delattr("extrapolation.figure")
    monkeypatch.setattr(sys, "meta_path", [WithoutMatplotlib(), *sys.meta_path])
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    assert length_extrapolation.main(["--draw", str(measured), "--plot", str(plot)]) == 0
    assert "no figure: matplotlib is not installed here; --draw result.json" in capsys.readouterr().out
    assert not plot.exists()


class WithoutMatplotlib:
    """A machine that has none."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "60"], "--crops: expected as many numbers as --lengths"),
        (["--lengths", "60", "256"], "--lengths: expected multiples of --context"),
        (["--heads", "3"], "--heads: must divide the width"),
        (["--device", "cuda", "--devices", "99"], "--devices: expected at most"),
        (["--minutes", "0"], "--minutes: expected a number above 0"),
        (["--schemes", "alibi2"], "invalid choice: 'alibi2'"),
    ],
)
def test_bad_options_are_refused(more, message, data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        length_extrapolation.parse(call(data, tmp_path, *more))
    assert message in capsys.readouterr().err


def test_every_preset_has_every_setting():
    """Whatever is not in it has a default of its own."""
    for preset in length_extrapolation.PRESETS:
        options = length_extrapolation.parse(["--preset", preset, "--device", "cpu"])
        assert all(hasattr(options, field.name) for field in fields(Settings))
        assert length_extrapolation.PRESETS[preset]["steps"] == options.steps
