"""Printing of the sections."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def section(title: str) -> Iterator[None]:
    """Print a title before the block, and its duration after it."""
    begin = time.perf_counter()
    print(title, flush=True)
    yield
    print(f"  ({time.perf_counter() - begin:.1f} s)\n", flush=True)


def row(*cells: str, widths: Sequence[int] = ()) -> None:
    """Print a line and flush it."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)] + [*cells[len(widths) :]]
    print("  " + "  ".join(padded).rstrip(), flush=True)


def one_line(error: BaseException) -> str:
    """Type of an exception and the most informative line of its message."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if name == "CompilationError" else lines[0]  # Triton prints the source first
    return f"{name}: {text[:200]}" if text else name


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).removeprefix("torch."))
