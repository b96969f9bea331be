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

    Shapes are the same in every batch: a training step can be a CUDA graph.
    """

    def __init__(self, name: str, length: int, pairs: int, rows: int, vocabulary: int, device: torch.device | str):
        if name not in TASKS:
            raise ValueError(f"name: expected one of {TASKS}, got {name!r}")
        self.repeats = 2 if name == "forgetting" else 1
        if pairs < 2 or pairs % self.repeats or 4 * pairs > length:
            raise ValueError(f"pairs: expected an even number from 2 to length / 4 = {length // 4}, got {pairs}")
        if vocabulary < 2 * pairs + 2:
            raise ValueError(f"vocabulary: expected at least 2 · pairs + 2 = {2 * pairs + 2}, got {vocabulary}")
        self.length, self.pairs, self.rows, self.vocabulary = length, pairs, rows, vocabulary
        self.keys, self.device = pairs // self.repeats, torch.device(device)
        self.queries = rows * self.keys
        gap = torch.arange((length - 2 * pairs) // 2, device=device)
        self.gap_logits = (POWER - 1) * torch.log1p(gap)

    def draw(self, draws: int, generator: torch.Generator) -> Batch:
        """So many draws; nothing waits for the device."""
        half, shape = self.vocabulary // 2, (draws, self.rows)
        key = 1 + self._distinct(half - 1, self.keys, shape, generator)  # (S, B, keys)
        value = half + self._distinct(self.vocabulary - half, self.pairs, shape, generator)  # (S, B, pairs)
        # whose pair the n-th one is, in an order that is drawn
        order = self._uniform((*shape, self.pairs), generator).argsort(-1)
        whose = order // self.repeats
        times = order.argsort(-1).unflatten(-1, (-1, self.repeats))  # (S, B, keys, repeats): when a key has its pairs
        first, last = times.amin(-1), times.amax(-1)
        tokens = torch.full((*shape, self.length), FILLER, device=self.device)
        tokens[..., : 2 * self.pairs] = torch.stack([key.gather(-1, whose), value], dim=-1).flatten(-2)
        uniform = self._uniform((*shape, len(self.gap_logits)), generator)
        gumbel = self.gap_logits - (-uniform.log()).log()  # its largest are draws without replacement
        position = 2 * self.pairs + 2 * gumbel.topk(self.keys).indices
        tokens.scatter_(-1, position, key)
        row = self.length * torch.arange(self.rows, device=self.device)[:, None]
        found = (position + row, value.gather(-1, last), value.gather(-1, first))
        return Batch(tokens, *(x.flatten(1) for x in found))

    def _uniform(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, device=self.device)

    def _distinct(self, choices: int, count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """`count` different numbers below `choices`, in random order."""
        return self._uniform((*shape, choices), generator).topk(count).indices
