"""Gradients of whole models: right ones pass, and a wrong or a missing gradient of a decay fails."""

import copy
import dataclasses
import functools
import itertools
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from judged_calls import PADDING, make_inputs, make_packed_inputs
from torch import nn
from torch.utils.checkpoint import checkpoint

from decayattn import DecayFlashAttention, decay_attention, decay_attention_varlen, reference
from decayattn.testing import compare_model_gradients, format_table, models


class Block(nn.Module):
    def __init__(self, width, heads, **options):
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(width), DecayFlashAttention(width, heads, **options)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class TinyModel(nn.Module):
    """A byte model with an input of each kind: integer tokens and a floating weight per position."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.blocks = nn.Sequential(Block(32, 4, **options), Block(32, 4, **options))
        self.head = nn.Linear(32, 32)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def weighted_loss(model, batch):
    logits = model(batch["tokens"][:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
    return (losses * batch["weights"].flatten()).mean()


def gradients_of(model, loss, batch, **options):
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss(model, batch), [*parameters.values()], **options)
    return dict(zip(parameters, gradients, strict=True))


@pytest.fixture
def model_and_batch():
    torch.manual_seed(0)
    model = TinyModel(decay="scalar", bias=True, num_kv_heads=2, backend="auto")
    for block in model.blocks:
        nn.init.normal_(block.attention.decay.weight, std=0.2)
    return model, {"tokens": torch.randint(0, 32, (2, 17)), "weights": torch.rand(2, 16)}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_model_gradients_are_accepted(model_and_batch, autocast):
    model, batch = model_and_batch
    rows = compare_model_gradients(model, weighted_loss, batch, backend="reference", autocast=autocast)
    assert [row.parameter for row in rows] == [name for name, _ in model.named_parameters()]
    assert {row.parameter for row in rows if row.is_decay} == {
        f"blocks.{layer}.attention.decay.{name}" for layer in (0, 1) for name in ("weight", "bias")
    }
    assert all(row.passed for row in rows), format_table(rows)
    assert {row.precision for row in rows} == {"float32" if autocast is None else "bfloat16"}
    assert json.loads(json.dumps([dataclasses.asdict(row) for row in rows]))[0]["parameter"] == "embedding.weight"
    # the model comes back as it was
    assert {block.attention.backend for block in model.blocks} == {"auto"}
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("autocast", "factor"), [(None, 1.0001), (torch.bfloat16, 1.05)])
def test_a_scaled_decay_gradient_in_a_model_is_refused(model_and_batch, autocast, factor):
    model, batch = model_and_batch
    name = "blocks.1.attention.decay.weight"
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        gradients = gradients_of(model, weighted_loss, batch)
    scaled = gradients | {name: factor * gradients[name]}
    rows = compare_model_gradients(model, weighted_loss, batch, autocast=autocast, tested=scaled)
    assert {row.parameter: row.verdict for row in rows if not row.passed} == {name: "wrong"}
    assert "VIOLATED" in format_table(rows)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_missing_decay_gradient_in_a_model_is_refused(model_and_batch, autocast, monkeypatch):
    """log_decay detached in the tested call: the gate's parameters get no gradient, and those below it a wrong one."""
    model, batch = model_and_batch
    attention, calls = reference.attention, iter(range(2))

    def detached(problem, inputs):
        without = inputs._replace(log_decay=inputs.log_decay.detach())
        is_tested = problem.dtype != torch.float64 and next(calls, None) is not None
        return attention(problem, without if is_tested else inputs)

    monkeypatch.setattr(reference, "attention", detached)
    rows = compare_model_gradients(model, weighted_loss, batch, backend="reference", autocast=autocast)
    failed = {row.parameter for row in rows if not row.passed}
    assert {row.parameter for row in rows if row.is_decay} <= failed
    assert {row.relative_error for row in rows if row.is_decay} == {1.0}
    assert "head.weight" not in failed


class CheckpointedModel(TinyModel):
    def forward(self, tokens):
        return self.head(checkpoint(self.blocks, self.embedding(tokens), use_reentrant=False))


def test_backward_recomputes_the_tested_forward(model_and_batch):
    model, batch = model_and_batch
    expected = compare_model_gradients(model, weighted_loss, batch, backend="reference")
    checkpointed = CheckpointedModel(decay="scalar", bias=True, num_kv_heads=2, backend="auto")
    checkpointed.load_state_dict(model.state_dict())
    seen = []
    for block in checkpointed.blocks:
        block.attention.register_forward_pre_hook(lambda layer, _: seen.append(layer.backend))
    assert compare_model_gradients(checkpointed, weighted_loss, batch, backend="reference") == expected
    assert len(seen) >= 3 * 2 * 2  # three runs, two layers, each computed twice
    assert set(seen) == {"reference"}


def test_the_modes_of_the_caller_change_nothing(model_and_batch):
    model, batch = model_and_batch
    expected = compare_model_gradients(model, weighted_loss, batch, backend="reference")
    for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert compare_model_gradients(model, weighted_loss, batch, backend="reference") == expected


@pytest.mark.parametrize("packed", [False, True])
def test_the_rounded_attention_of_a_model_takes_every_argument(packed, monkeypatch):
    """Nothing is rounded in float64, and autograd of the reference has the same gradients."""
    inputs = (make_packed_inputs if packed else make_inputs)(torch.float64, "resets", row_scale=True)
    inputs |= dict(causal=False, window_size=(5, 4), sink=torch.randn(4).double())
    inputs |= dict(max_seqlen_q=11, max_seqlen_k=13) if packed else PADDING | dict(bias=torch.randn(23, 23).double())
    leaves = [x.requires_grad_() for x in inputs.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    attend = decay_attention_varlen if packed else decay_attention

    def results():
        out, lse = attend(**inputs, return_lse=True, backend="reference")
        lse = lse.masked_fill(lse.isneginf(), 0.0)
        loss = (out * torch.arange(8)).sum() + lse.square().sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]

    expected = results()
    monkeypatch.setattr(reference, "attention", functools.partial(models._RoundedAttention.call, factor=1.0))
    for found, wanted in zip(results(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


# Losses that nothing can be compared with


class Noisy(nn.Module):
    """A layer and something random, or with a state, after it."""

    def __init__(self, after=None):
        super().__init__()
        self.embedding, self.attention = nn.Embedding(32, 16), DecayFlashAttention(16, 2, backend="reference")
        self.after = after or nn.Identity()

    def forward(self, tokens):
        return self.after(self.attention(self.embedding(tokens)))


class DropPath(nn.Module):
    """One sample of 1000, so that two evaluations seldom differ."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x * 0 if self.training and self.draw() < 0.001 else x


TOKENS = torch.arange(18).reshape(2, 9) % 11


def squares(model, tokens):
    return model(tokens).square().mean()


def masks_in_place(model, tokens):
    tokens[torch.rand(tokens.shape) < 0.2] = 0
    return squares(model, tokens)


def more_with_every_call(calls):
    return lambda model, tokens: squares(model, tokens) * next(calls)


def noise_in_the_gradient(model, tokens):
    x = model(tokens)
    x.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
    return x.square().mean()


def seeded(noise, dtype=None):
    def loss(model, tokens):
        torch.manual_seed(0)
        x = model(tokens)
        return (x + noise * torch.randn_like(x, dtype=dtype)).square().mean()

    return loss


@pytest.mark.parametrize(("model", "loss", "said"), [
    (Noisy(nn.Dropout(0.1)), squares, "draws random numbers"),
    (Noisy(DropPath(lambda: torch.rand(()))), squares, "draws random numbers"),
    (Noisy(DropPath(random.random)), squares, "draws random numbers"),
    (torch.compile(Noisy(nn.Dropout(0.1))), squares, "draws random numbers"),
    (Noisy(), masks_in_place, "draws random numbers"),
    (Noisy(), noise_in_the_gradient, "draws random numbers"),
    (Noisy(), seeded(0.3), "the same random numbers in float32 and float64"),
    (Noisy(), more_with_every_call(itertools.count(1)), "a state that it changes"),
    (Noisy(), lambda model, tokens: squares(Noisy(), tokens), "depends on the model passed to it"),
    (Noisy(), lambda model, tokens: model(tokens).mean(-1), r"expected a scalar tensor, got \(2, 9\)"),
])
@pytest.mark.parametrize("given", [False, True])
def test_a_loss_that_changes_is_refused_by_name(model, loss, said, given):
    tested = {name: torch.zeros_like(p) for name, p in model.named_parameters()} if given else None
    with pytest.raises(ValueError, match=f"^loss: .*{said}"):
        compare_model_gradients(model, loss, TOKENS, backend="reference", tested=tested)


class Normalised(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16, **options)

    def forward(self, x):
        return self.norm(self.linear(x).mT).mT


class Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(("model", "loss"), [
    (Noisy(nn.Dropout(0.1)).eval(), squares),
    (Noisy(nn.Dropout(0.3)), seeded(0.0)),
    (Noisy(), seeded(0.3, torch.float32)),
    (Noisy(Normalised()), squares),
    (Noisy(Counting()), squares),
    (torch.compile(Noisy()), squares),
])
def test_models_are_left_as_they_were(model, loss):
    """Buffers, attributes, gradients, the batch, backends and random number generators."""
    state, counted = copy.deepcopy(model.state_dict()), getattr(model.after, "calls", None)

    def generators():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002

    tokens, states = TOKENS.clone(), generators()
    rows = compare_model_gradients(model, loss, tokens, backend="reference")
    assert {row.verdict for row in rows} == {"ok"}, format_table(rows)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert getattr(model.after, "calls", None) == counted
    assert model.attention.backend == "reference"
    assert torch.equal(tokens, TOKENS)
    assert generators() == states


# Budgets that say nothing, and zeros


def test_budget_above_the_gradient_cannot_tell():
    """All values are nearly the same, so rounding to bfloat16 hides the gradient of the decay."""
    model = Noisy()
    nn.init.normal_(model.embedding.weight, mean=1.0, std=1e-4)
    tested = gradients_of(model, squares, TOKENS)
    tested["attention.decay.bias"] *= -1
    rows = compare_model_gradients(model, squares, TOKENS, autocast=torch.bfloat16, tested=tested)
    found = {row.parameter: row for row in rows}
    decay = found["attention.decay.bias"]
    assert (decay.verdict, decay.passed) == ("cannot tell", False)
    assert decay.relative_budget > 1
    assert "cannot tell" in format_table([decay])
    assert found["attention.out_proj.weight"].verdict == "ok"


def test_a_gradient_that_cancels_is_zero():
    """The bias before a normalisation has none: zeros are right, and a number of the size of its terms is wrong."""
    model = Noisy(Normalised())
    right = gradients_of(model, squares, TOKENS)
    for size, verdict in ((0.0, "ok"), (1.0, "ok"), (1e6, "wrong")):
        tested = right | {"after.linear.bias": size * right["after.linear.bias"]}
        rows = compare_model_gradients(model, squares, TOKENS, tested=tested)
        assert {row.parameter: row.verdict for row in rows}["after.linear.bias"] == verdict


def test_embeddings_of_absent_tokens_have_a_literal_zero():
    model = Noisy()
    right = gradients_of(model, squares, TOKENS)
    right["embedding.weight"][20, 3] = 1e-30
    rows = {row.parameter: row for row in compare_model_gradients(model, squares, TOKENS, tested=right)}
    assert {name for name, row in rows.items() if row.verdict == "wrong"} == {"embedding.weight"}
    assert (rows["embedding.weight"].norm, rows["embedding.weight"].budget) == ("zeros", 0.0)


def test_a_model_without_decay_attention_is_refused():
    with pytest.raises(ValueError, match="model: expected at least one DecayFlashAttention"):
        compare_model_gradients(nn.Linear(2, 2), lambda model, x: model(x).sum(), torch.zeros(1, 2))
