"""Bytes to train on: read once, split by file, cut into crops that depend on nothing but the seed and the step."""

import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toy_lm.config import OptionError

VALIDATION_EVERY = 20  # one file in twenty validates, or the last twentieth of a single file
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def load_text(data: str | None, context: int, separator: bytes = b"\n") -> tuple[Tensor, Tensor]:
    """(training, validation) text as uint8 tensors, from a file, a folder or, for None, Python's standard library.

    The separator stands between files.

    Raises OptionError where there is nothing to read, or too little for one crop of `context` bytes and its successor.
    """
    files = standard_library() if data is None else _files_of(Path(data))
    source = "the Python standard library" if data is None else data
    if len(files) == 1:
        text = files[0].read_bytes()
        cut = len(text) - len(text) // VALIDATION_EVERY
        parts = text[:cut], text[cut:]
    else:
        # fewer than twenty files: the last one validates
        every = min(VALIDATION_EVERY, len(files))
        validation = files[every - 1 :: every]
        training = [file for number, file in enumerate(files, start=1) if number % every]
        parts = _join(training, separator), _join(validation, separator)
    for name, text in zip(("training", "validation"), parts, strict=True):
        if len(text) < context + 1:
            raise OptionError(
                f"data: the {name} part of {source} has {len(text)} bytes, expected at least {context + 1} "
                f"for a context of {context}; give more text or a smaller --context"
            )
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in parts)


def standard_library() -> list[Path]:
    """The standard library's own source files, sorted by path; its tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(root).parts)]
    if not files:
        raise OptionError(f"data: this Python has no library sources below {root}; give your own text with --data")
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _files_of(path: Path) -> list[Path]:
    """The file, or every file below the folder that is not hidden, sorted by path."""
    if not path.exists():
        raise OptionError(f"data: expected a file or a folder, got {str(path)!r}, which does not exist")
    if path.is_file():
        return [path]
    files = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise OptionError(f"data: the folder {str(path)!r} holds no files")
    return sorted(files, key=lambda file: file.relative_to(path).parts)


def _join(files: list[Path], separator: bytes) -> bytes:
    return separator.join(file.read_bytes() for file in files)


class TrainingBatches:
    """Endless batches of random crops, uint8 (batch_size / world, context + 1).

    Batch n is a pure function of (seed, n), and a device's batch is its slice of it: a resumed run sees what it would
    have seen, and one device sees what several see together.
    """

    def __init__(
        self, text: Tensor, context: int, batch_size: int, seed: int, *, first_step: int = 0, rank: int = 0,
        world: int = 1,
    ):
        self.text, self.context, self.batch_size, self.seed = text, context, batch_size, seed
        self.first_step, self.rank, self.world = first_step, rank, world

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.batch, itertools.count(self.first_step))

    def batch(self, step: int) -> Tensor:
        """This device's crops of one step."""
        starts = np.random.default_rng([self.seed, step]).integers(len(self.text) - self.context, size=self.batch_size)
        share = self.batch_size // self.world
        return _crops(self.text, torch.from_numpy(starts[self.rank * share : (self.rank + 1) * share]), self.context)


class ValidationBatches:
    """This device's share of a fixed set of `count` crops, spread evenly over the text, in batches of `batch_size`."""

    def __init__(self, text: Tensor, context: int, count: int, batch_size: int, *, rank: int = 0, world: int = 1):
        starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()[rank::world]
        self.batches = _crops(text, starts, context).split(batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _crops(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """`context` bytes and the one after them from each start, (len(starts), context + 1)."""
    return text[starts[:, None] + torch.arange(context + 1)]
