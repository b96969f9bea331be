"""Rows of a halo's exchange: one launch that moves those of k, v and λ into a buffer, out of it, or adds them.

distributed/halo_exchange.py has the same in PyTorch's operators, many more of which the host has to launch.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from decayattn.backends.runtime import launching
from decayattn.backends.runtime.integers import cdiv, next_power_of_2
from decayattn.backends.runtime.strided import strided

_TILE: tl.constexpr = tl.constexpr(16)  # rows of a program
_RUNS: tl.constexpr = tl.constexpr(64)  # runs that one step of a search reads


def move(
    mode: str, tensors: Sequence[Tensor | None], rows: Sequence[Tensor | None], runs: Tensor, span: tuple[int, int]
) -> None:
    """Move rows of a span. mode: "read" from k, v and λ (B, T, H_kv, ·), "write" to them, or "add".

    rows: for each tensor its values in all rows, (rows, ·).
    runs: as of distributed.halo_plan.Rows.
    """
    device, (first, last) = runs.device, span
    widths = [None if x is None else (x.shape[1], next_power_of_2(x.shape[1])) for x in rows]
    with launching.on_device(device):
        launching.of_call(device, (runs, *tensors, *rows), mode)(
            _move, cdiv(last - first, _TILE.value), runs, runs.shape[0], first, last, *map(strided, (*tensors, *rows)),
            **dict(zip(("K", "V", "DECAY"), widths, strict=True)), MODE=mode, num_warps=4,
        )


@triton.jit(do_not_specialize=["number", "first", "last"])
def _move(
    runs, number, first, last, k, v, log_decay, k_rows, v_rows, decay_rows,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, MODE: tl.constexpr,
):
    """`move` of a tile of rows; a row's run is the first one that ends after it."""
    row = first + tl.program_id(0).to(tl.int64) * _TILE + tl.arange(0, _TILE)
    there = row < last
    run = tl.zeros([_TILE], tl.int32)
    for chunk in range(0, number, _RUNS):
        other = chunk + tl.arange(0, _RUNS)
        end = tl.load(runs + 5 * other + 4, mask=other < number, other=last)
        run += tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    of_run = runs + 5 * run
    entry, head = tl.load(of_run, mask=there, other=0), tl.load(of_run + 2, mask=there, other=0)
    token = row + tl.load(of_run + 1, mask=there, other=0)
    if k is not None:
        _move_part(k, k_rows, row, there, entry, token, head, K, MODE)
    if v is not None:
        _move_part(v, v_rows, row, there, entry, token, head, V, MODE)
    if log_decay is not None:
        _move_part(log_decay, decay_rows, row, there, entry, token, head, DECAY, MODE)


@triton.jit
def _move_part(x, rows, row, there, entry, token, head, WIDTHS: tl.constexpr, MODE: tl.constexpr):
    """WIDTHS: columns of the tensor and of a tile, a power of 2."""
    column, strides = tl.arange(0, WIDTHS[1]), x.strides
    inside = there[:, None] & (column < WIDTHS[0])[None, :]
    of_row = x.data + entry * strides[0] + token * strides[1] + head * strides[2]
    here = of_row[:, None] + column[None, :] * strides[3]
    buffer = rows.data + row[:, None] * rows.strides[0] + column[None, :]
    if MODE == "read":
        tl.store(buffer, tl.load(here, mask=inside), mask=inside)
    elif MODE == "write":
        tl.store(here, tl.load(buffer, mask=inside), mask=inside)
    else:
        ACCUMULATOR: tl.constexpr = tl.float64 if rows.data.dtype.element_ty == tl.float64 else tl.float32
        total = tl.load(here, mask=inside).to(ACCUMULATOR) + tl.load(buffer, mask=inside).to(ACCUMULATOR)
        tl.store(here, total.to(x.data.dtype.element_ty), mask=inside)
