"""The kernels around a halo's exchange against PyTorch's operators, bit by bit. One process simulates the ranks."""

import itertools
import math

import pytest
import torch

from decayattn.backends.planning import halo_rows
from decayattn.distributed.collectives import Slices
from decayattn.distributed.halo_exchange import EagerRows as eager_rows
from decayattn.distributed.halo_plan import HaloPlan as Fetch


def bits(x):
    return torch.cat([x.flatten(), x.new_zeros(1)]).view(torch.uint8)


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(bits(x), bits(y))


def exchanged(rows, numbers):
    """Rows that every rank receives; numbers[source][rank] counts them."""
    parts = [x.split(list(count)) for x, count in zip(rows, numbers, strict=True)]
    return [torch.cat(received) for received in zip(*parts, strict=True)]


class Case:
    """Tensors and a random plan of several ranks."""

    def __init__(self, seed, device, ranks=3, batch=2, kv_heads=2, group=2, dim=5, value_dim=3, dtype=torch.bfloat16,
                 decay=torch.float32, share=None, even=False, reach=False, longest=45):
        self.random = random = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.decay = device, dtype, decay
        self.shape = batch, kv_heads, group, dim, value_dim

        def number(high):
            return int(torch.randint(0, high, (), generator=random))

        self.lengths = (24,) * ranks if even else tuple(number(4) and number(longest) for _ in range(ranks))
        offsets = [0, *itertools.accumulate(self.lengths)]
        share = torch.rand(ranks, batch * kv_heads, generator=random) if share is None else torch.tensor(share)
        begins = ((1 - share) * torch.tensor(offsets[:-1])[:, None]).long().expand(ranks, batch * kv_heads)
        # the gathered begins have one more column
        of_all = begins if reach else torch.cat([begins, begins[:, :1]], 1)[:, :-1]
        if reach:
            begins = of_all = begins[:, :1].expand_as(begins)
        self.fetches = [
            Fetch(Slices(self.lengths, rank, None), of_all.to(device), kv_heads, begins.tolist(), (0,) * ranks)
            for rank in range(ranks)
        ]
        self.parts = [self.of(length) for length in self.lengths]

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(self.device, dtype or self.dtype)

    def of(self, length):
        """k, v and λ of a slice, with strides of their own."""
        batch, kv_heads, group, dim, value_dim = self.shape
        k = self.normal(batch, length, kv_heads, 2 * dim)[..., ::2]
        v = self.normal(batch, kv_heads, length, value_dim).transpose(1, 2)
        if length:
            k[0, -1, 0, 0], v[0, 0, 0, 0] = math.nan, -math.inf
        if self.decay is None:
            return [k, v, None]
        return [k, v, self.normal(batch, kv_heads * group, length, dtype=self.decay).transpose(1, 2)]

    def check_forward(self, tokens):
        """tokens: of a slice after its halo."""
        sent = []
        for fetch, parts in zip(self.fetches, self.parts, strict=True):
            sent.append(eager_rows.pack_sent(fetch, parts))
            assert_same([halo_rows.pack_sent(fetch.segments, parts)], sent[-1:])
        received = exchanged(sent, [fetch.send for fetch in self.fetches])
        for fetch, parts, rows, length in zip(self.fetches, self.parts, received, self.lengths, strict=True):
            expected = eager_rows.extend(fetch, rows, parts, tokens(length))
            assert_same(halo_rows.extend(fetch.segments, rows, parts, tokens(length)), expected)

    def check_backward(self, tokens, asked=(True, True, True)):
        sent, grads = [], []
        for fetch, length in zip(self.fetches, self.lengths, strict=True):
            of_all = self.of(fetch.halo + tokens(length))
            grads.append([x if is_asked else None for x, is_asked in zip(of_all, asked, strict=True)])
            sent.append(eager_rows.pack_returned(fetch, grads[-1]))
            assert_same([halo_rows.pack_returned(fetch.segments, grads[-1])], sent[-1:])
        received = exchanged(sent, [fetch.receive for fetch in self.fetches])
        for fetch, of_rank, rows, length in zip(self.fetches, grads, received, self.lengths, strict=True):
            # gradients of a slice, in place: a view with strides of its own
            totals = [x if is_asked else None for x, is_asked in zip(self.of(length), asked, strict=True)]
            expected = eager_rows.add_returned(fetch, rows, totals, of_rank, tokens(length))
            found = halo_rows.add_returned(fetch.segments, rows, totals, of_rank, tokens(length))
            # a conversion need not keep what a NaN has in its lower bits, and the interpreter cuts bfloat16 off
            found, expected = (
                [None if x is None else x.nan_to_num(nan=7e3, neginf=-7e3) for x in part] for part in (found, expected)
            )
            if self.dtype == torch.bfloat16 and self.device.type == "cpu":
                for x, y in zip(found[:2], expected[:2], strict=True):
                    assert x is y is None or torch.allclose(x, y, rtol=2.0**-7, atol=0)
                found[:2] = expected[:2]
            assert_same(found, expected)


CASES = {
    "bfloat16": {},
    "two ranks": dict(ranks=2, dim=8, value_dim=16),
    "four ranks, float16": dict(ranks=4, dtype=torch.float16, group=1),
    "float32": dict(dtype=torch.float32, kv_heads=1, group=3),
    "float64": dict(dtype=torch.float64, decay=torch.float64, batch=1),
    "float64 with a decay in float32": dict(dtype=torch.float64, ranks=4),
    "no decay": dict(decay=None),
    "more pairs than are added up at once": dict(ranks=2, batch=65, group=1, dim=1, value_dim=1, longest=6),
    "everything": dict(share=[[1.0]], even=True),
    "nothing": dict(share=[[0.0]]),
    "a reach": dict(reach=True),
    "one sequence, one head": dict(batch=1, kv_heads=1, group=1, ranks=4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), *[2] * torch.cuda.is_available()])
def test_kernels_equal_operators(case, seed, device):
    ranks = Case(seed, device, **CASES[case])
    # all tokens of a slice, or its first ones
    lengths = (lambda length: length, lambda length: length // 3, lambda length: 0)
    for tokens in lengths:
        ranks.check_forward(tokens)
        ranks.check_backward(tokens, (True, True, ranks.decay is not None))


@pytest.mark.parametrize("asked", [(True, False, False), (False, True, True), (False, False, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_unneeded_gradients_are_not_sent(asked, dtype, device):
    Case(3, device, dtype=dtype).check_backward(lambda length: length // 2, asked)


def test_empty_exchanges_launch_nothing(device, monkeypatch):
    ranks = Case(0, device, share=[[0.0]])
    monkeypatch.setattr(halo_rows, "_launch", None)
    for fetch, parts in zip(ranks.fetches, ranks.parts, strict=True):
        assert halo_rows.pack_sent(fetch.segments, parts).shape[0] == 0
        assert halo_rows.pack_returned(fetch.segments, parts).shape[0] == 0
        assert [x.shape[1] for x in halo_rows.extend(fetch.segments, parts[0].new_empty(0, 12), parts, 0)] == [0] * 3
        added = halo_rows.add_returned(fetch.segments, parts[0].new_empty(0, 12), parts, parts, 0)
        assert all(x.data_ptr() == y.data_ptr() for x, y in zip(added, parts, strict=True))
