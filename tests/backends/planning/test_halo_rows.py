"""The kernel that moves rows of a halo's exchange, against PyTorch's operators, bit by bit."""

import pytest
import torch

from decayattn.distributed import halo_exchange
from decayattn.distributed.collectives import row_bytes, unpack

BATCH, TOKENS, HEADS = 2, 50, 3


def runs_of(seed, device, pairs, longest):
    """Runs of tokens of random batch entries and heads, that do not overlap; and their number of rows."""
    random, found, row = torch.Generator().manual_seed(seed), [], 0
    for pair in torch.randperm(BATCH * HEADS, generator=random)[:pairs].tolist():
        first, count = torch.randint(0, TOKENS - longest, (2,), generator=random).tolist()
        count = min(count, longest)
        found.append([pair // HEADS, first - row, pair % HEADS, count, row + count])
        row += count
    return torch.tensor(found, device=device), row


def tensors_of(seed, device, dtype, decay, dim=5, value_dim=3, group=2):
    """k, v and λ, with strides of their own."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(device, dtype)

    k, v = normal(BATCH, TOKENS, HEADS, 2 * dim)[..., ::2], normal(BATCH, HEADS, TOKENS, value_dim).transpose(1, 2)
    log_decay = None if decay is None else normal(BATCH, HEADS * group, TOKENS, dtype=decay).mT
    return [k, v, None if log_decay is None else log_decay.unflatten(2, (HEADS, group))]


@pytest.mark.parametrize("mode", ["read", "write", "add"])
@pytest.mark.parametrize(("dtype", "decay", "pairs", "longest"), [
    (torch.float16, torch.float32, 6, 17), (torch.float32, torch.float32, 1, 40), (torch.float64, torch.float64, 3, 1),
    (torch.float64, torch.float32, 2, 9), (torch.float16, None, 3, 9),
])
def test_kernel_and_operators_move_the_same_rows(mode, dtype, decay, pairs, longest, device):
    runs, number = runs_of(1, device, pairs, longest)
    tensors, parts = (tensors_of(seed, device, dtype, decay) for seed in (2, 3))
    rows = torch.zeros(number, row_bytes(tensors), dtype=torch.uint8, device=device)
    halo_exchange._move("read", parts, unpack(rows, parts), runs, (0, number), kernels=False)
    span = (number // 3, number)  # that of one rank
    results = []
    for kernels in (True, False):
        own, buffer = [None if x is None else x.clone() for x in tensors], rows.clone()
        halo_exchange._move(mode, own, unpack(buffer, own), runs, span, kernels)
        results.append([buffer, *own])
    for found, expected, before in zip(*results, [rows, *tensors], strict=True):
        assert (found is None and expected is None) or torch.equal(found, expected)
        changes = before is not None and (before is rows) == (mode == "read") and span[0] < span[1]
        assert not changes or not torch.equal(found, before)


def test_sums_of_several_ranks_are_float32(device):
    """Gradients in float16, which are added to float32."""
    runs, number = runs_of(1, device, 6, 17)
    parts = tensors_of(2, device, torch.float16, torch.float32)
    rows = torch.zeros(number, row_bytes(parts), dtype=torch.uint8, device=device)
    halo_exchange._move("read", parts, unpack(rows, parts), runs, (0, number), kernels=True)
    for kernels in (True, False):
        totals = [torch.full(x.shape, 2.0**12, device=device) for x in parts]
        halo_exchange._move("add", totals, unpack(rows, parts), runs, (0, number), kernels)
        entry, shift, head, _, _ = runs[0].tolist()
        for total, x in zip(totals, parts, strict=True):
            assert torch.equal(total[entry, shift, head], 2.0**12 + x[entry, shift, head].float())
