"""The kernels' gradients against finite differences of the kernels themselves, in float64."""

import pytest
import torch
from torch.autograd import gradcheck

from decayattn import decay_attention

TOLERANCES = dict(eps=1e-6, atol=1e-7, rtol=1e-5)

SLOW = () if torch.cuda.is_available() else pytest.mark.slow
HEADS = 2
# tiles of the interpreter are 32 × 32, so 36 tokens need two of them each way
TOKENS = 36


def inputs(device, rows, keys, decay, *, row_scale=False, batch=1, kv_heads=1, head_dim=5, value_dim=3) -> dict:
    """The leaves of one call; its log-decays are of both signs."""
    new = dict(device=device, dtype=torch.float64)
    tensors = dict(
        q=torch.randn(batch, rows, HEADS, head_dim, **new),
        k=torch.randn(batch, keys, kv_heads, head_dim, **new),
        v=torch.randn(batch, keys, kv_heads, value_dim, **new),
    )
    if decay == "constant":
        tensors["log_decay"] = torch.tensor([-0.3, 0.02], **new)
    if decay == "scalar":
        tensors["log_decay"] = 0.3 * torch.randn(batch, keys, HEADS, **new)
    if row_scale:
        tensors["scale"] = torch.randn(batch, rows, HEADS, **new)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def check(leaves: dict, causal: bool, *, resets: torch.Tensor | None = None, **options) -> None:
    """gradcheck of out and lse with respect to every leaf; the resets are masked after the leaf, where no finite
    difference steps off −inf. Without the lse of rows that see nothing: −inf has no difference quotient."""
    names = list(leaves)

    def outputs(*values):
        arguments = dict(zip(names, values, strict=True))
        if resets is not None:
            arguments["log_decay"] = arguments["log_decay"].masked_fill(resets, -torch.inf)
        out, lse = decay_attention(**arguments, causal=causal, return_lse=True, backend="triton")
        return out, lse[~torch.isneginf(lse)]

    # tests/test_autograd.py omits gradients: here each would cost another dozen launches
    assert gradcheck(outputs, tuple(leaves.values()), **TOLERANCES, check_undefined_grad=False, **options)


@pytest.mark.parametrize(("rows", "keys", "decay", "causal", "options"), [
    *(pytest.param(TOKENS, TOKENS, decay, causal, dict(row_scale=True), marks=marks) for decay, causal, marks in [
        ("none", True, SLOW), ("none", False, SLOW), ("constant", True, SLOW), ("constant", False, ()),
        ("scalar", True, ()), ("scalar", False, ()),
    ]),
    # queries are the last rows
    pytest.param(5, TOKENS, "scalar", True, {}, marks=SLOW), (5, TOKENS, "scalar", False, {}),
    (TOKENS, 5, "scalar", True, {}),
    (20, 20, "scalar", True, dict(batch=2, kv_heads=2)),
])
def test_gradients(rows, keys, decay, causal, options, device):
    check(inputs(device, rows, keys, decay, **options), causal, fast_mode=True)


@pytest.mark.parametrize("causal", [True, False])
def test_between_resets(causal, device):
    resets = torch.zeros(1, TOKENS, HEADS, dtype=torch.bool, device=device)
    resets[0, [1, 17, 32], 0] = True
    resets[0, TOKENS - 1, 1] = True
    check(inputs(device, TOKENS, TOKENS, "scalar"), causal, resets=resets, fast_mode=True)
