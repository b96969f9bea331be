"""How the sections are printed."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def section(title: str) -> Iterator[None]:
    """A title, what the block prints, and how long it took."""
    begin = time.perf_counter()
    print(title, flush=True)
    yield
    print(f"  ({time.perf_counter() - begin:.1f} s)\n", flush=True)


def row(*cells: str, widths: Sequence[int] = ()) -> None:
    """A line, now."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)] + [*cells[len(widths) :]]
    print("  " + "  ".join(padded).rstrip(), flush=True)


def one_line(error: BaseException) -> str:
    """What kind of exception, and the line of its message that says most."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if name == "CompilationError" else lines[0]  # Triton shows the source first
    return f"{name}: {text[:200]}" if text else name


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).removeprefix("torch."))
