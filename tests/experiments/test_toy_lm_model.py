"""The toy model, its optimiser settings, its sampling and the half-lives that it reports."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from language_models.model import ByteLM, generate, next_byte_loss
from language_models.optimisation import learning_rate_factor, parameter_groups
from toy_lm.figures import read_log
from toy_lm.report import copy_to_evaluate

from decayattn import DecayFlashAttention
from decayattn.nn import record_half_lives

DECAYS = ["scalar", "alibi", "alibi-learned", "retnet", "retnet-learned", "none"]


def small_model(decay="scalar", layers=1, documents="together"):
    torch.manual_seed(0)
    return ByteLM(layers=layers, width=32, heads=2, decay=decay, documents=documents, backend="reference")


def tokens(batch, length):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def test_a_fresh_model_knows_nothing():
    bits = next_byte_loss(small_model(), tokens(8, 65)).item() / math.log(2)
    assert abs(bits - 8) < 0.1  # 8 bits are a uniform guess


@pytest.mark.parametrize("decay", DECAYS)
def test_predictions_do_not_see_the_future(decay):
    model, x = small_model(decay, layers=2), tokens(1, 20)
    y = x.clone()
    y[:, 12:] = 255 - y[:, 12:]
    assert torch.equal(model(x)[:, :12], model(y)[:, :12])


@pytest.mark.parametrize("decay", DECAYS)
def test_the_decay_is_the_only_position_information(decay):
    """One causal layer without decay cannot tell in which order it saw the past; every decay can."""
    model, x = small_model(decay).double(), tokens(1, 20)
    shuffled = torch.cat([x[:, :19].flip(1), x[:, 19:]], dim=1)
    change = (model(x)[0, -1] - model(shuffled)[0, -1]).norm() / model(x)[0, -1].norm()
    assert (change < 1e-12) == (decay == "none")


@pytest.mark.parametrize("decay", DECAYS)
def test_every_parameter_is_in_one_group_and_decay_parameters_have_no_weight_decay(decay):
    model = small_model(decay, layers=2)
    decayed, spared = parameter_groups(model, 0.1)
    assert sorted(map(id, decayed["params"] + spared["params"])) == sorted(id(p) for p in model.parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    modules = {names[id(p)].split(".")[-2] for p in decayed["params"]}
    assert modules == {"in_proj", "out_proj", "mlp_in", "mlp_out", "head"}
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


@pytest.mark.parametrize(("decay", "documents"), [("scalar", "resets"), ("scalar", "packed"), ("alibi", "packed")])
def test_documents_are_kept_apart(decay, documents):
    """Resets and packing give every document what it has alone, and so the same as one another."""
    model = small_model(decay, 2, documents).double()
    x = tokens(2, 40).clamp(min=1)
    x[0, 7] = x[0, 8] = x[0, 30] = x[1, 39] = 0
    found = model(x)
    for row, cuts in enumerate([[0, 7, 8, 30, 40], [0, 39, 40]]):
        for start, end in itertools.pairwise(cuts):
            alone = small_model(decay, 2).double()(x[row : row + 1, start:end])
            torch.testing.assert_close(found[row : row + 1, start:end], alone)
    assert not torch.allclose(found, small_model(decay, 2).double()(x))


def test_a_generated_text_ends_with_its_document():
    model = small_model("scalar", 1, "packed")
    last = generate(model, b"one\0two", 20, seed=0)
    assert last == generate(model, b"\0two", 20, seed=0)
    together = small_model("scalar", 1)
    torch.nn.init.zeros_(together.head.weight)
    model.load_state_dict(together.state_dict())  # every byte is as likely as any other
    long = generate(together, b"two", 2000, seed=0)
    assert generate(model, b"two", 2000, seed=0) == long[: long.index(0)]


def test_learning_rate_warms_up_and_falls_to_a_tenth():
    factors = [learning_rate_factor(step, 100) for step in range(101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[5] == 1.0
    assert factors[100] == pytest.approx(0.1)


def test_samples_depend_on_the_seed_alone():
    model = small_model()
    first, again, other = (generate(model, b"import ", 20, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 20


@pytest.mark.parametrize("decay", DECAYS)
def test_samples_are_those_of_a_model_that_reads_the_whole_text_again(decay):
    model, generator, text = small_model(decay, layers=2).double(), torch.Generator().manual_seed(3), b"import "
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # far from uniform, so that the past matters
        for _ in range(30):
            logits = model(torch.tensor([list(text)]))[0, -1]
            probabilities = (logits.float() / 0.5).softmax(-1)
            text += bytes([int(torch.multinomial(probabilities, 1, generator=generator))])
    assert generate(model, b"import ", 30, seed=3, temperature=0.5) == text[7:]


def test_logs_of_a_resumed_run_join_without_repetition(tmp_path):
    for start, rows in ((0, "0,4.0,\n9,3.0,\n19,2.5,\n"), (10, "9,,9.9\n10,2.9,\n")):
        folder = tmp_path / "logs" / f"from_step_{start}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("step,train_bits,val_bits\n" + rows)
    assert read_log(tmp_path, "train_bits") == ((0, 9, 10), (4.0, 3.0, 2.9))
    assert read_log(tmp_path, "val_bits") == ((), ())


def test_a_model_is_evaluated_by_whatever_backend_takes_it():
    """"hopper" trains in 16 bits and has no kernels for a cache; samples and half-lives are of a float32 copy."""
    model = ByteLM(layers=2, width=32, heads=2, decay="scalar", backend="hopper").bfloat16()
    evaluated = copy_to_evaluate(SimpleNamespace(model=model, whole=None, config=SimpleNamespace(accelerator="cpu")))
    assert len(generate(evaluated, b"import ", 4, seed=0)) == 4
    with record_half_lives(evaluated) as half_lives:
        assert evaluated(tokens(1, 9)).dtype == torch.float32
    assert len(half_lives) == 2
    assert [layer.backend for layer in model.modules() if isinstance(layer, DecayFlashAttention)] == ["hopper"] * 2
