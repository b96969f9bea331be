"""Length extrapolation in miniature: the same texts for all, losses at the right positions, calls that go on."""

import itertools
import json
import random
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks import harness
from language_models import corpus as corpora
from language_models.schemes import SCHEMES
from studies import length_extrapolation as study
from toy_lm.model import Block

TINY = [
    "--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch-size", "4", "--steps", "20",
    "--lengths", "64", "256", "--crops", "6", "3", "--without-decay-up-to", "64", "--seeds", "0",
    "--precision", "float32", "--learning-rate", "3e-3",
]
SETTINGS = Namespace(**vars(harness.parse(study, TINY)), **study.FIXED)


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


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
def corpus_folder(data, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    corpora.build(corpora.in_folder(data), folder)
    return folder


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory) -> Path:
    """The result of a whole call."""
    folder = tmp_path_factory.mktemp("measured")
    assert harness.main(study, call(data, folder)) == 0
    return folder / "result.json"


def call(data: Path, folder: Path, *more: str) -> list[str]:
    return [*TINY, "--data", str(data), "--folder", str(folder), "--output", str(folder / "result.json"), *more]


def test_a_call_measures_every_scheme(measured):
    result = json.loads(measured.read_text())
    assert [(run["scheme"], run["seed"]) for run in result["rows"]] == [(name, 0) for name in SCHEMES]
    assert {"commit", "torch", "command", "date", "gpu"} <= result.keys()
    assert result["corpus"]["training"]["packages"] + result["corpus"]["held out"]["packages"] == 10
    assert len(result["corpus"]["sha256"]) == 64
    assert result["settings"]["context"] == 16
    for run in result["rows"]:
        scheme = SCHEMES[run["scheme"]]
        assert run["training"]["bits"][0] == pytest.approx(8, abs=0.5)
        assert run["training"]["bits"][-1] < run["training"]["bits"][0]
        read = {row["length"]: row for row in run["reading"]}
        assert set(read) == ({64} if scheme.decay == "none" else {64, 256})
        for length, row in read.items():
            edges = result["edges"][str(length)]
            assert len(row["bits"]) == len(edges) - 1
            assert all(0 < bits < 9 for bits in row["bits"])
            columns = {(column["begin"], column["end"]) for column in row["columns"]}
            assert columns == ({(0, 16), (16, 64)} if length == 64 else {(64, 256)})
        # shorter texts have no room for needles; a digit that is one of 16 has 4 bits
        assert [row["length"] for row in run["needles"]] == ([] if scheme.decay == "none" else [256])
        for row in run["needles"]:
            assert row["texts"] == 3
            assert all(len(row[key]) == len(study.DEPTHS) for key in ("bits", "found"))
            assert all(1 < bits < 20 for bits in row["bits"])
    assert measured.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_cells_of_a_seed_share_bytes_and_weights(corpus_folder):
    """Schemes with the same model have the same losses, digit by digit; another seed has others."""
    of_models = {}
    for run in (("none", 0), ("none", 1), ("rotary", 0), ("scalar", 0)):
        model = study.build_model(SETTINGS, *run)
        of_models[run] = torch.cat([p.flatten() for name, p in model.named_parameters() if ".decay." not in name])
    assert torch.equal(of_models[("none", 0)], of_models[("rotary", 0)])
    assert torch.equal(of_models[("none", 0)], of_models[("scalar", 0)])
    assert not torch.equal(of_models[("none", 0)], of_models[("none", 1)])
    # learned ALiBi with rates that cannot move is ALiBi
    asked = []
    for scheme in ("alibi", "alibi-learned"):
        settings = Namespace(**vars(SETTINGS) | {"steps": 10, "learning_rate": 1e-12})
        asked.append(study.train((scheme, 0), settings, corpus_folder, "cpu")["training"]["bits"])
    assert asked[0] == asked[1]


def test_blocks_are_compiled_for_training_alone(corpus_folder, monkeypatch):
    compiled = []
    monkeypatch.setattr(Block, "compile", lambda block, **options: compiled.append((block, options)))
    rows = []
    for compile in (False, True):
        settings = Namespace(**vars(SETTINGS) | {"steps": 3, "lengths": [64], "crops": [2], "compile": compile})
        rows.append(study.train(("pro", 0), settings, corpus_folder, "cpu"))
        assert rows[-1]["training"].pop("seconds") >= 0
    assert rows[0] == rows[1]
    assert [options for _, options in compiled] == [{"dynamic": False}]


def test_a_diverged_model_fails_and_is_not_kept(data, tmp_path, capsys):
    arguments = call(data, tmp_path, "--schemes", "none", "--learning-rate", "1e30")
    assert harness.main(study, arguments) == 1
    assert json.loads((tmp_path / "result.json").read_text())["rows"] == []
    printed = capsys.readouterr().out
    assert "none, 0: failed" in printed
    assert "FloatingPointError: the loss of step" in printed


class LastByteBefore(torch.nn.Module):
    """Expects the byte of `back` places before, with certainty, if there is one; else knows nothing."""

    def __init__(self, back: int):
        super().__init__()
        self.back = back

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        past = tokens.long()[:, : max(0, tokens.shape[1] - self.back + 1)]
        logits[:, self.back - 1 :] = 100.0 * F.one_hot(past, 256)
        return logits


def test_losses_are_of_the_positions_that_they_say():
    """Texts repeat after 40 bytes: known from the position on that has 40 bytes before it."""
    tokens = torch.randint(256, (3, 40), generator=torch.Generator().manual_seed(0)).repeat(1, 7)[:, :257]
    bits = study.losses(LastByteBefore(40), tokens, SETTINGS)
    assert bits.shape == (3, 256)
    torch.testing.assert_close(bits[:, :39], torch.full((3, 39), 8.0))
    assert bits[:, 39:].max() < 1e-3
    # a window of 16 bytes never has 40 before, and has 5 from the fifth byte on or from its middle on
    in_windows = study.losses_in_windows(LastByteBefore(40), tokens, SETTINGS)
    torch.testing.assert_close(in_windows, torch.full((3, 256), 8.0))
    tokens = torch.randint(256, (3, 5), generator=torch.Generator().manual_seed(0)).repeat(1, 60)[:, :257]
    in_windows = study.losses_in_windows(LastByteBefore(5), tokens, SETTINGS)
    assert in_windows.shape == (3, 256)
    assert in_windows[:, :4].min() > 7.9
    assert in_windows[:, 4:].max() < 1e-3


class Copy(torch.nn.Module):
    """Expects, with certainty, the byte after the last place that had the 4 bytes before this one too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        for text, row in zip(tokens.tolist(), logits, strict=True):
            after: dict[tuple, int] = {}
            for at in range(4, len(text)):
                before = tuple(text[at - 3 : at + 1])
                if before in after:
                    row[at, after[before]] = 100.0
                after[tuple(text[at - 4 : at])] = text[at]
        return logits


def test_needles_are_found_by_a_copy_and_else_by_chance(corpus_folder):
    """A model that copies finds all digits but the first ones, behind bytes that all lines share."""
    corpus = corpora.load(corpus_folder)
    for model, found in ((Copy(), 7 / 8), (LastByteBefore(10**6), 0.0)):
        [row] = study.retrieve(model, [64, 256], SETTINGS, corpus, corpus.text)
        assert (row["length"], len(row["bits"])) == (256, len(study.DEPTHS))
        assert sum(row["found"]) / len(study.DEPTHS) == pytest.approx(found, abs=0.3)
    tokens, places = study.with_needles(corpus.text[:2000].view(2, 1000))
    for text, repeated in zip(tokens, places, strict=True):
        lines = [bytes(line) for line in bytes(text.tolist()).split(b"\n") if b' = "' in line and len(line) == 21]
        assert len(lines) == 10
        assert sorted(lines[:5]) == sorted(lines[5:])
        assert len({line[:8] for line in lines}) == 5
        values = [bytes(text[at].tolist()) for at in repeated]
        assert values == [line[12:20] for line in lines[:5]]


def test_stretches_cover_every_position():
    for length in SETTINGS.lengths:
        edges = study.bins(16, length)
        assert (edges[0], edges[-1]) == (0, length)
        assert {16, 64} <= set(edges)
        assert all(a < b for a, b in itertools.pairwise(edges))
    assert study.columns(16, 256) == [(0, 16), (16, 64), (64, 256)]
    assert len(study.bins(1024, 65_536)) == 74


@pytest.mark.slow
def test_two_processes_share_the_runs(data, tmp_path, measured):
    """Two find what one does."""
    assert harness.main(study, call(data, tmp_path, "--schemes", "alibi", "none", "--devices", "2")) == 0
    found = {run["scheme"]: run for run in json.loads((tmp_path / "result.json").read_text())["rows"]}
    expected = {run["scheme"]: run for run in json.loads(measured.read_text())["rows"]}
    assert set(found) == {"alibi", "none"}
    for scheme, run in found.items():
        assert run["reading"][0]["bits"] == pytest.approx(expected[scheme]["reading"][0]["bits"], abs=1e-4)


def test_the_table_has_means_and_ranges_over_seeds(measured):
    result = json.loads(measured.read_text())
    [run] = [run for run in result["rows"] if run["scheme"] == "scalar"]
    other = json.loads(json.dumps(run)) | {"seed": 1}
    run["reading"][0]["columns"][0]["bits"], other["reading"][0]["columns"][0]["bits"] = 2.0, 2.5
    head, *rows = study.cells_of_table(result | {"rows": [*result["rows"], other]})
    assert head == ["bits per byte", "0–16", "16–64", "16–64, ≤ 16 before", "64–256", "64–256, ≤ 16 before"]
    table = {row[0]: row[1:] for row in rows}
    assert table["scalar decay (FoX)"][0] == "2.250 (2.000–2.500)"
    assert table["rotary"][3:] == ["–", "–"]


def test_the_figure_shows_the_mean_and_marks_the_trained_length(measured):
    result = json.loads(measured.read_text())
    drawn = study.draw(result)
    assert len(drawn.axes) == 2
    labels = drawn.axes[0].get_legend_handles_labels()[1]
    assert labels == [scheme.label for scheme in SCHEMES.values()]
    [trained] = [line for line in drawn.axes[0].lines if line.get_linestyle() == ":"]
    assert set(trained.get_xdata()) == {16}
