"""Multi-query associative recall, drawn on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TASKS = ("recall", "forgetting")
FILLER = 0
# exponent of the law by which gaps between a pair and its query are drawn: p(gap n) ∝ n^(a − 1)
POWER = 0.01


class Batch(NamedTuple):
    """S independent draws of B sequences; Q queries in each draw.

    tokens (S, B, T) · positions (S, Q) of the queries in the draw's B·T tokens · answers (S, Q) · stale (S, Q), the
    value that was overwritten (the answer itself where nothing was).
    """

    tokens: Tensor
    positions: Tensor
    answers: Tensor
    stale: Tensor


class Task:
    """Sequences of `length` tokens as in Zoology (Arora et al., arXiv 2312.04927)::

        k3 v1 k1 v7 k2 v4 … 0 k1 0 0 0 k3 …
                               v7       v1      to be predicted at the queries, and nothing elsewhere

    `pairs` key-value pairs, then queries, one per key, at even distances behind the pairs that follow a power law, and
    fillers in between. Keys are distinct tokens of the first half of the vocabulary, values of the second.

    "recall": every key has one pair. "forgetting": every key has two, in an order that is drawn, and the answer is the
    value of its later pair; so there are pairs / 2 queries, and half of them are right for who ignores the order.

    Sequence b has pairs[b % len(pairs)] pairs, so that shapes are the same in every batch: a training step can be a
    CUDA graph.
    """

    def __init__(
        self, name: str, length: int, pairs: Sequence[int], rows: int, vocabulary: int, device: torch.device | str
    ):
        if name not in TASKS:
            raise ValueError(f"name: expected one of {TASKS}, got {name!r}")
        repeats = 2 if name == "forgetting" else 1
        if any(count < 2 or count % repeats or 4 * count > length for count in pairs):
            raise ValueError(f"pairs: expected even numbers from 2 to length / 4 = {length // 4}, got {list(pairs)}")
        if vocabulary < 2 * max(pairs) + 2:
            raise ValueError(f"vocabulary: expected at least 2 · pairs + 2 = {2 * max(pairs) + 2}, got {vocabulary}")
        self.name, self.length, self.rows, self.vocabulary = name, length, rows, vocabulary
        self.repeats, self.most, self.device = repeats, max(pairs), torch.device(device)
        count = torch.tensor([pairs[row % len(pairs)] for row in range(rows)])
        keys, space = count // repeats, (length - 2 * count) // 2
        assignment, key = torch.arange(self.most), torch.arange(self.most // repeats)
        gap = torch.arange(int(space.max()))
        self.count = count[:, None].to(device)  # (B, 1)
        self.assigned = (assignment < count[:, None]).to(device)  # (B, pairs)
        self.asked = (key < keys[:, None]).to(device)  # (B, keys)
        self.gap_logits = torch.where(gap < space[:, None], (POWER - 1) * torch.log1p(gap), -torch.inf).to(device)
        self.chosen = (key < keys[:, None]).flatten().nonzero().flatten().to(device)  # (Q,) of B · keys
        self.queries = len(self.chosen)

    def draw(self, draws: int, generator: torch.Generator) -> Batch:
        """So many draws; nothing waits for the device."""
        half, shape = self.vocabulary // 2, (draws, self.rows)
        key = 1 + self._distinct(half - 1, self.most // self.repeats, shape, generator)  # (S, B, keys)
        value = half + self._distinct(self.vocabulary - half, self.most, shape, generator)  # (S, B, pairs)
        # whose pair the n-th one is, in an order that is drawn among the pairs that a sequence has
        order = (self._uniform((*shape, self.most), generator) + 2.0 * ~self.assigned).argsort(-1)
        whose = order // self.repeats
        times = order.argsort(-1).unflatten(-1, (-1, self.repeats))  # (S, B, keys, repeats): when a key has its pairs
        first, last = times.amin(-1), times.amax(-1)
        context = torch.stack([key.gather(-1, whose), value], dim=-1)  # (S, B, pairs, 2)
        context = context.masked_fill(~self.assigned[..., None], FILLER).flatten(-2)
        # one more token, which takes what is not asked
        tokens = torch.full((*shape, self.length + 1), FILLER, device=self.device)
        tokens[..., : 2 * self.most] = context
        uniform = self._uniform((*shape, self.gap_logits.shape[-1]), generator)
        gumbel = self.gap_logits - (-uniform.log()).log()  # its largest are draws without replacement
        position = 2 * self.count + 2 * gumbel.topk(key.shape[-1]).indices
        tokens.scatter_(-1, position.masked_fill(~self.asked, self.length), key)
        row = self.length * torch.arange(self.rows, device=self.device)[:, None]
        found = (position + row, value.gather(-1, last), value.gather(-1, first))
        return Batch(tokens[..., :-1], *(x.flatten(1).index_select(1, self.chosen) for x in found))

    def _uniform(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, device=self.device)

    def _distinct(self, choices: int, count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """`count` different numbers below `choices`, in random order."""
        return self._uniform((*shape, choices), generator).topk(count).indices
