"""What every run of one result has in common, and what tells runs apart."""

import itertools
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from language_models.schemes import SCHEMES

# learned RetNet rates are learned ALiBi with another start
DEFAULT_SCHEMES = [name for name in SCHEMES if name != "retnet-learned"]


class Run(NamedTuple):
    """One model of one scheme."""

    scheme: str
    seed: int

    def __str__(self) -> str:
        return f"{self.scheme}, seed {self.seed}"


@dataclass(frozen=True)
class Settings:
    """Sizes of the model, its training and its reading; results with other ones are not put together."""

    layers: int
    width: int
    heads: int
    context: int
    batch_size: int
    steps: int
    learning_rate: float
    lengths: tuple[int, ...]
    crops: tuple[int, ...]
    without_decay_up_to: int
    precision: str
    weight_decay: float = 0.1
    clip: float = 1.0
    held_out: float = 0.15
    crops_per_file: int = 4
    corpus_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}

    def columns(self) -> list[tuple[int, int]]:
        """The stretches of positions of the table, [begin, end): to the context, 4, 16 and 64 times it."""
        edges = [0, *(self.context * factor for factor in (1, 4, 16, 64))]
        return [(begin, end) for begin, end in itertools.pairwise(edges) if end <= max(self.lengths)]

    def bins(self, length: int) -> list[int]:
        """Edges of the stretches of positions whose mean loss is kept: finer where the loss changes faster."""
        edges, position = [0], 0
        for end, width in ((1, 1 / 64), (16, 1 / 8), (float("inf"), 1)):
            step = max(1, int(width * self.context))
            while position < min(end * self.context, length):
                position = min(position + step, length)
                edges.append(position)
        return edges
