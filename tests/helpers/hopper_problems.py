"""Problems for the Hopper kernels: on a GPU, or, where there is none, on a CPU (gluon_on_cpu)."""

import contextlib
import functools
import itertools
import math
import random
from typing import Any
from unittest import mock

import judged_calls
import torch
from gluon_on_cpu import Kernel

from decayattn.backends.hopper import backend as hopper
from decayattn.backends.hopper.backward import launch as launch_backward
from decayattn.backends.hopper.forward import launch
from decayattn.backends.runtime import launching

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16 = torch.bfloat16, torch.float16
int32 = functools.partial(judged_calls.int32, device=DEVICE)
verify = functools.partial(judged_calls.verify, backend="hopper")
FORWARD, GRADIENTS = launch.forward_kernel, launch_backward.gradients_kernel
# D_v of a D, if it is another one: the backward has kernels for those two
VALUE_DIMS = {192: 128}


def on(gpu: Any, cpu: Any) -> Any:
    """Parameters of a test: those for a GPU, or the few for a CPU, where each takes seconds."""
    return gpu if DEVICE == "cuda" else cpu


BATCH, HEADS = on((2, 4), (1, 2))


def emulated(seed: int = 0, programs: int = 3) -> contextlib.ExitStack:
    """Run the Hopper kernels on the CPU: few programs, so that each has several work tiles. Programs of row terms are
    larger than a GPU's, 64 rows, and for odd seeds as large, 32."""
    stack = contextlib.ExitStack()
    for owner, name, value in (
        (launch, "forward_kernel", Kernel(FORWARD, seed)),
        (launch_backward, "gradients_kernel", Kernel(GRADIENTS, seed)),
        (launch_backward, "_ROW_TERMS_BLOCK", 32 if seed % 2 else 64),
        (launching, "multiprocessors", lambda device: programs),
        (hopper, "unavailable", lambda dtype, device: None),
    ):
        stack.enter_context(mock.patch.object(owner, name, value))
    return stack


def make(
    rows=333, keys=None, *, batch=BATCH, heads=HEADS, kv_heads=None, dim=64, value_dim=None, decay="scalar", dtype=BF16,
    strength=0.1,
):
    keys, kv_heads, value_dim = keys or rows, kv_heads or heads, value_dim or VALUE_DIMS.get(dim, dim)
    q = torch.randn(batch, rows, heads, dim, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(batch, keys, kv_heads, d, device=DEVICE, dtype=dtype) for d in (dim, value_dim))
    log_decay = {
        "none": None,
        "constant": -strength * torch.rand(heads, device=DEVICE),
        "scalar": -2 * strength * torch.rand(batch, keys, heads, device=DEVICE),
    }[decay]
    return dict(q=q, k=k, v=v, log_decay=log_decay)


def make_packed(rows, keys=None, *, outside=5, resets=0.0, **options) -> dict:
    """Sequences of these rows and keys for verify_attention_varlen. Tokens before and after them hold NaN."""
    lengths = {"q": rows, "k": rows if keys is None else keys}
    ends = {side: list(itertools.accumulate(n, initial=outside)) for side, n in lengths.items()}
    inputs = make(ends["q"][-1] + outside, ends["k"][-1] + outside, batch=1, **options)
    inputs = {name: x[0] if x is not None and x.ndim > 1 else x for name, x in inputs.items()}
    per_token = inputs["log_decay"] is not None and inputs["log_decay"].ndim == 2
    if per_token:
        inputs["log_decay"][torch.rand_like(inputs["log_decay"]) < resets] = -torch.inf
        inputs["log_decay"][[end for end in ends["k"] if end < ends["k"][-1]]] = math.nan  # of first tokens: not used
    for name in ("q", "k", "v", *["log_decay"] * per_token):
        end = ends["q" if name == "q" else "k"][-1]
        inputs[name][:outside] = inputs[name][end:] = math.nan
    return inputs | dict(cu_seqlens_q=int32(*ends["q"]), cu_seqlens_k=int32(*ends["k"]))


def row_scales(inputs: dict, per: str = "row") -> torch.Tensor:
    """A scale per row, of either sign, and 0, and NaN where q is; or per head."""
    q = inputs["q"]
    scales = torch.randn(q.shape[:-1] if per == "row" else q.shape[-2], device=q.device) * 2 / q.shape[-1] ** 0.5
    if per == "row":
        scales[torch.rand_like(scales) < 0.1] = 0.0
        scales[q.isnan().any(-1)] = math.nan
    return scales


def random_packing(seed: int, sequences: int, longest: int) -> tuple[list[int], list[int]]:
    """Half of the sequences with as many rows as keys, some with none of either."""
    draw = random.Random(seed)
    keys = [draw.choice((0, draw.randrange(longest), longest, 128)) for _ in range(sequences)]
    return [draw.choice((n, n, draw.randrange(longest), 0)) for n in keys], keys


# (rows, keys) of sequences
MIXED = ([200, 0, 7, 300, 1, 0, 192], [50, 4, 0, 333, 129, 0, 64])
PACKINGS = on(
    [MIXED, ([65, 0, 1, 300, 4, 128, 0], None), ([0, 513], None), ([1] * 6, [1, 0, 2, 140, 5, 130]), ([40], [1140]),
     random_packing(0, 12, 700)],
    [([20, 0, 200, 1, 0], [5, 4, 233, 129, 0])],
)


def make_padded(**options) -> dict:
    """On the right, on the left, on both sides, and nothing but padding; it holds NaN."""
    rows, keys = on((333, 500), (203, 240))
    inputs = make(rows, keys, batch=4, kv_heads=2, **options)
    decay = options["decay"]
    inputs |= dict(
        seqused_q=int32(rows - 43, rows, rows - 33, 12), seqused_k=int32(keys, keys - 100, rows - 33, 5),
        leftpad_q=int32(0, 100, 3, 0), leftpad_k=int32(0, 129, 3, 5),
    )
    for n in range(4):
        for name in ("q", "k", "v", *["log_decay"] * (decay == "scalar")):
            side = "q" if name == "q" else "k"
            inputs[name][n, : inputs["leftpad_" + side][n]] = math.nan
            inputs[name][n, inputs["seqused_" + side][n] :] = math.nan
    return inputs
