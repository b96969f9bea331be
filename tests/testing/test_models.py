"""Gradients of whole models: what is right is accepted, and a wrong or a missing gradient of a decay is refused."""

import dataclasses
import functools
import json

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


@pytest.fixture
def model_and_batch():
    torch.manual_seed(0)
    model = TinyModel(decay="scalar", bias=True, num_kv_heads=2, backend="auto")
    for block in model.blocks:
        nn.init.normal_(block.attention.decay.weight, std=0.2)
    return model, {"tokens": torch.randint(0, 32, (3, 33)), "weights": torch.rand(3, 32)}


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
    parameter = model.blocks[1].attention.decay.weight
    in_kernel = iter([True])  # the tested run comes first; the oracle and eager are right
    parameter.register_hook(lambda grad: grad * factor if next(in_kernel, False) else grad)
    rows = compare_model_gradients(model, weighted_loss, batch, backend="reference", autocast=autocast)
    assert [row.parameter for row in rows if not row.passed] == ["blocks.1.attention.decay.weight"]
    assert "VIOLATED" in format_table(rows)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_missing_decay_gradient_in_a_model_is_refused(model_and_batch, autocast, monkeypatch):
    """log_decay detached in the tested call: the gate's parameters get no gradient, and those below it a wrong one."""
    model, batch = model_and_batch
    attention, calls = reference.attention, iter(range(2))

    def detached(problem, inputs):
        without = inputs._replace(log_decay=inputs.log_decay.detach())
        return attention(problem, without if next(calls, None) is not None else inputs)

    monkeypatch.setattr(reference, "attention", detached)
    rows = compare_model_gradients(model, weighted_loss, batch, backend="reference", autocast=autocast)
    failed = {row.parameter for row in rows if not row.passed}
    assert {row.parameter for row in rows if row.is_decay} <= failed
    assert {row.relative_error for row in rows if row.is_decay} == {1.0}
    assert "head.weight" not in failed


class CheckpointedModel(TinyModel):
    def forward(self, tokens):
        return self.head(checkpoint(self.blocks, self.embedding(tokens), use_reentrant=False))


def test_what_the_backward_recomputes_is_what_was_run(model_and_batch):
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


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, functools.partial(torch.autocast, "cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "autocast"],
)
def test_the_modes_of_the_caller_change_nothing(model_and_batch, mode):
    model, batch = model_and_batch
    expected = compare_model_gradients(model, weighted_loss, batch, backend="reference")
    with mode():
        assert compare_model_gradients(model, weighted_loss, batch, backend="reference") == expected


def test_given_gradients_may_require_gradients(model_and_batch):
    model, batch = model_and_batch
    gradients = dict(zip(
        dict(model.named_parameters()),
        torch.autograd.grad(weighted_loss(model, batch), [*model.parameters()], create_graph=True), strict=True,
    ))
    rows = compare_model_gradients(model, weighted_loss, batch, backend="reference", tested=gradients)
    assert all(row.passed for row in rows), format_table(rows)


@pytest.mark.parametrize("packed", [False, True])
def test_the_rounded_attention_of_a_model_takes_every_argument(packed, monkeypatch):
    """In float64 nothing is rounded, and autograd of the reference has the same gradients."""
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


def test_a_model_without_decay_attention_is_refused():
    with pytest.raises(ValueError, match="model: expected at least one DecayFlashAttention"):
        compare_model_gradients(nn.Linear(2, 2), lambda model, x: model(x).sum(), torch.zeros(1, 2))
