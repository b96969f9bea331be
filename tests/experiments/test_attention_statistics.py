"""Half-lives and visited tiles of a model's attention, and the log of them that a training keeps."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from language_models.model import ByteLM
from language_models.statistics import attention_statistics
from matplotlib.text import Text
from toy_lm import figures, statistics
from toy_lm.statistics import AttentionStatistics, read

from decayattn import visited_fraction

LENGTH = 640


def model(scheme: str) -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(layers=1, width=32, heads=2, decay=scheme, context=LENGTH)


def tokens() -> torch.Tensor:
    return torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scheme", ["scalar", "rotary-scalar", "alibi"])
def test_they_are_of_what_the_layer_gives_to_the_kernels(scheme, device, monkeypatch):
    """q and k as the position module left them."""
    of, given = model(scheme).to(device), []
    kernel = sys.modules["decayattn.nn.attention"].decay_attention
    monkeypatch.setattr(
        "decayattn.nn.attention.decay_attention", lambda *a, **o: (given.append((a, o)), kernel(*a, **o))[1]
    )
    [found] = attention_statistics(of, tokens().to(device))
    [((q, k, _, log_decay), options)] = given
    assert found["visited"] == visited_fraction(q, k, log_decay, scale=options["scale"])[0].tolist()
    assert min(found["visited"]) < 1
    rates = log_decay if log_decay.ndim == 1 else log_decay[0, 1:].mean(0)
    assert found["half_lives"] == pytest.approx((-math.log(2) / rates).tolist(), rel=1e-5)
    assert not of.blocks[0].attention._forward_hooks
    assert not of.blocks[0].attention.in_proj._forward_hooks


def test_without_a_decay_there_are_no_half_lives():
    [found] = attention_statistics(model("none"), tokens()[:, :64], visited=False)
    assert found == {"half_lives": None, "visited": None}


def log(folder: Path, visited: list) -> None:
    layers = [[{"half_lives": [4.0, "inf"], "visited": x}] * 5 for x in visited]
    rows = [{"step": 10 * n, "milliseconds_per_step": 3.0 if n else None, "layers": x} for n, x in enumerate(layers)]
    (folder / "attention.json").write_text(json.dumps({"bytes": 100, "context": 50, "rows": rows}))


def test_figures_name_their_text_and_unit(tmp_path, monkeypatch):
    log(tmp_path, [[1.0, 1.0], None, [0.5, 0.25]])
    assert len(read(tmp_path)) == 3
    drawn, save = [], figures._save
    monkeypatch.setattr(figures, "_save", lambda figure, path: (drawn.append(figure), save(figure, path))[1])
    for draw in (figures.draw_half_lives, figures.draw_half_lives_over_training, figures.draw_visited_over_training):
        assert draw(tmp_path, "title").read_bytes().startswith(b"\x89PNG")
    for figure in drawn[:2]:
        texts = {text.get_text() for text in figure.findobj(Text)}
        caption = "half-life of the mean λ over 100 tokens (bytes)\nof the validation text, in tokens"
        assert any(text.endswith(caption) for text in texts)
        assert "half-life (tokens)" in texts
    log(tmp_path, [None, None])
    assert figures.draw_visited_over_training(tmp_path, "title") is None


def test_the_time_of_a_step_is_without_validation_and_checkpoint(tmp_path, monkeypatch):
    """ModelCheckpoint's part of a validation's end comes after every other callback's."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(statistics.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(AttentionStatistics, "_record_on_rank_zero", lambda self, trainer, module: timed.append(
        (trainer.global_step, self._milliseconds)))
    timed, callback = [], AttentionStatistics(tmp_path, 0)
    trainer = SimpleNamespace(global_step=0, state=SimpleNamespace(fn="fit"))
    callback.on_train_start(trainer, None)
    for _ in range(2):
        clock.now += 100  # a checkpoint
        for _ in range(4):
            callback.on_train_batch_start(trainer, None, None, 0)
            clock.now += 0.25
            trainer.global_step += 1
        callback.on_validation_start(trainer, None)
        clock.now += 10
        callback.on_validation_end(trainer, None)
    assert timed == [(0, None), (4, 250.0), (8, 250.0)]
