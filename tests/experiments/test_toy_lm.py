"""Parts of the toy language model: model, texts, sampling, statistics, figures."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from language_models.schemes import attention_layer
from matplotlib.text import Text
from toy_lm import figures
from toy_lm.model import ByteLM, attention_statistics, generate, learning_rate_factor, next_byte_loss, parameter_groups
from toy_lm.parallel import share
from train_toy_lm import ByteData

from decayattn import decay_attention, visited_fraction
from decayattn.nn.attention import DECAYS


def make_model(decay="scalar", layers=1, documents="together"):
    torch.manual_seed(0)
    return ByteLM(layers, 32, 2, decay, documents, "reference")


def tokens(batch, length):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize("decay", DECAYS)
def test_decay_orders_the_past_and_spares_its_parameters(decay):
    """One causal layer without a decay does not know in which order it saw the past; with every decay it does."""
    model, x = make_model(decay), tokens(8, 65)
    assert abs(next_byte_loss(model, x).item() / math.log(2) - 8) < 0.1  # a uniform guess at first
    later = torch.cat([x[:, :40], 255 - x[:, 40:]], dim=1)
    assert torch.equal(model(x)[:, :40], model(later)[:, :40])
    model, shuffled = model.double(), torch.cat([x[:, :64].flip(1), x[:, 64:]], dim=1)
    change = (model(x)[:, -1] - model(shuffled)[:, -1]).norm() / model(x)[:, -1].norm()
    assert (change < 1e-12) == (decay == "none")
    decayed, spared = parameter_groups(model, 0.1)
    names = {p: name.split(".")[-2] for name, p in model.named_parameters()}
    assert {names[p] for p in decayed["params"]} == {"in_proj", "out_proj", "mlp_in", "mlp_out", "head"}
    assert len(decayed["params"] + spared["params"]) == len([p for p in names if p.requires_grad])
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(("decay", "documents"), [("scalar", "resets"), ("scalar", "packed"), ("alibi", "packed")])
def test_documents_get_the_logits_that_they_have_alone(decay, documents):
    apart, alone = make_model(decay, 2, documents).double(), make_model(decay, 2).double()
    x = tokens(2, 40).clamp(min=1)
    x[0, 7] = x[0, 8] = x[0, 30] = x[1, 39] = 0
    found = apart(x)
    for row, cuts in enumerate([[0, 7, 8, 30, 40], [0, 39, 40]]):
        for start, end in itertools.pairwise(cuts):
            torch.testing.assert_close(found[row : row + 1, start:end], alone(x[row : row + 1, start:end]))
    assert not torch.allclose(found, alone(x))


@pytest.mark.parametrize("decay", ["scalar", "retnet-learned", "none"])
def test_samples_equal_those_without_a_cache(decay):
    model, generator, text = make_model(decay, 2).double(), torch.Generator().manual_seed(3), b"import "
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # far from uniform, so that the past matters
        for _ in range(20):
            probabilities = (model(torch.tensor([list(text)]))[0, -1].float() / 0.5).softmax(-1)
            text += bytes([int(torch.multinomial(probabilities, 1, generator=generator))])
    assert generate(model, b"import ", 20, seed=3, temperature=0.5) == text[7:]
    assert generate(model, b"import ", 20, seed=4, temperature=0.5) != text[7:]


def test_sample_ends_with_its_document():
    together, apart = make_model(), make_model("scalar", 1, "packed")
    for of in (together, apart):
        torch.nn.init.zeros_(of.head.weight)  # every byte is as likely as any other
    long = generate(together, b"two", 30, seed=9)
    assert generate(apart, b"one\0two", 30, seed=9) == generate(apart, b"\0two", 30, seed=9)
    assert generate(apart, b"two", 30, seed=9) == long[: long.index(0)]


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    factors = [learning_rate_factor(step, 100) for step in range(101)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[100] == pytest.approx(0.1)


def make_data(folder: Path, contents: dict[str, bytes], **options) -> ByteData:
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return ByteData(str(folder), **{"context": 8} | options)


def test_texts_are_split_by_file_without_binaries(tmp_path):
    contents = {f"{n:02}": f"<{n:02}>".encode() * 5 for n in range(40)}
    data = make_data(tmp_path, contents | {".hidden": b"hidden", "binary": b"\0" * 50})
    texts = list(contents.values())
    assert data.validation.numpy().tobytes() == texts[19] + b"\n" + texts[39]
    assert data.training.numpy().tobytes() == b"\n".join(text for n, text in enumerate(texts) if n not in (19, 39))
    assert data.skipped == 1
    one = ByteData(str(tmp_path / "00"), context=0)  # the end of a single file validates
    assert [part.numpy().tobytes() for part in (one.training, one.validation)] == [texts[0][:19], texts[0][19:]]
    (tmp_path / "few").mkdir()
    few = make_data(tmp_path / "few", {name: name.encode() * 20 for name in "abc"}, documents="packed")
    assert few.training.numpy().tobytes() == b"a" * 20 + b"\0" + b"b" * 20
    assert few.validation.numpy().tobytes() == b"c" * 20


def test_standard_library_is_large_and_its_own():
    data = ByteData()
    assert min(len(data.training) / 19, len(data.validation)) > 100_000
    assert b"site-packages" not in data.training[:1000].numpy().tobytes()


def test_crops_depend_on_seed_and_step_alone(tmp_path):
    text = {"text": bytes(range(1, 201))}
    data, other = (make_data(tmp_path, text, context=4, batch_size=400, seed=seed) for seed in (3, 4))
    batch = data.batch(5)
    assert torch.equal(batch, data.batch(5))
    assert all(not torch.equal(batch, x) for x in (data.batch(6), other.batch(5)))
    assert torch.equal(batch.diff(dim=1), torch.ones(400, 4, dtype=torch.uint8))
    assert (batch.min(), batch.max()) == (1, 190)
    ranks = [SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": 2}) for rank in (0, 1)]
    assert torch.equal(torch.cat([share(batch, rank) for rank in ranks]), batch)
    crops = []
    for rank in (SimpleNamespace(), *ranks):
        data.trainer = SimpleNamespace(strategy=rank)
        crops.append(torch.cat(list(data.val_dataloader())))
    assert torch.equal(crops[0], torch.cat(crops[1:]))
    assert crops[0].shape == (64, 5)
    assert (crops[0].min(), crops[0].max()) == (191, 200)


@pytest.mark.parametrize("scheme", ["scalar", "rotary-scalar", "alibi"])
def test_statistics_are_those_of_the_kernel_arguments(scheme, device, monkeypatch):
    torch.manual_seed(0)
    model = ByteLM(1, 32, 2, make_attention=lambda: attention_layer(scheme, 32, 2)).to(device)
    monkeypatch.setattr("decayattn.nn.attention.decay_attention", spy := mock.Mock(wraps=decay_attention))
    [found] = attention_statistics(model, tokens(1, 640).to(device))
    [((q, k, _, log_decay), options)] = spy.call_args_list
    assert found["visited"] == visited_fraction(q, k, log_decay, scale=options["scale"])[0].tolist()
    assert min(found["visited"]) < 1
    rates = log_decay if log_decay.ndim == 1 else log_decay[0, 1:].mean(0)
    assert found["half_lives"] == pytest.approx((-math.log(2) / rates).tolist(), rel=1e-5)
    assert not model.blocks[0].attention._forward_pre_hooks


def test_logs_of_resumes_join_in_figures(tmp_path, monkeypatch):
    """A resume repeats the validation at its step, and the steps after its checkpoint."""
    for start, rows in ((0, "0,,8.0\n1,4.0,\n10,3.0,\n10,,3.5\n20,2.5,\n"), (10, "10,,9.9\n11,2.9,\n12,,2.0\n")):
        (tmp_path / f"logs/from_step_{start}").mkdir(parents=True)
        (tmp_path / f"logs/from_step_{start}/metrics.csv").write_text("step,train_bits,val_bits\n" + rows)
    assert figures.read_log(tmp_path, "train_bits") == ([1, 10, 11], [4.0, 3.0, 2.9])
    assert figures.read_log(tmp_path, "val_bits") == ([0, 10, 12], [8.0, 3.5, 2.0])

    layers = [[{"half_lives": [4.0, "inf"], "visited": visited}] * 2 for visited in ([1, 1], None)]
    rows = [{"step": 9 * n, "layers": of_step} for n, of_step in enumerate(layers)]
    (tmp_path / "attention.json").write_text(json.dumps({"bytes": 100, "rows": rows}))
    drawn = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    figures.draw(tmp_path, "title", 50)
    for name in ("loss", "half_lives", "visited"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    words = [" ".join(text.get_text() for text in figure.findobj(Text)) for figure in drawn]
    assert "validation, at the end 2.00" in words[0]
    assert "half-life of the mean λ over 100 bytes of the validation text; context 50 dashed" in words[1]
    assert "fraction of tiles visited, text of 100 bytes" in words[2]
