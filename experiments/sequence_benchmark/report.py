"""What is written down of a run, and how it was obtained."""

import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from shared.timing import MILLISECONDS

from decayattn.testing import format_table
from decayattn.testing.table import Row

METHOD = {
    "packed": "forward: a whole call on tensors that require gradients; backward: torch.autograd.grad of that call for "
    "all of them; both with their preparation kernels and allocations. dense: decay_attention; packed: "
    "decay_attention_varlen of documents of mixed length; dense alike: decay_attention on a batch of as many tokens "
    "with as many visible pairs; window: decay_attention with window_size=(left, 0); all with skip_tolerance=None, "
    "which does all the work that is counted",
    "tflops": "4·D·H operations forward per visible pair of query and key, the pairs counted exactly, 2.5 times that "
    "backward",
    "decode": "one call for one new token per batch entry. gigabytes_per_second: the bytes of the cached keys and "
    "values, and of α (float64) with a decay per token; of the copy, the bytes read and written by copy_ of the keys. "
    "paged: the cache in pages of 64 tokens, in random order",
    "ms": MILLISECONDS,
    "generate": "tokens (bytes) per second of one text, greedily written by a model with random weights, after a "
    "prompt that is not timed; wall-clock time, median over interleaved rounds after one that is not counted. "
    "recompute: the whole text anew for every token; cache: a DecayCache per layer; captured: and the step as a "
    "CapturedStep, a CUDA graph; evict: and DecayCache.evict after every so many tokens",
    "stream": "the length of the longest cache of any layer before and after every eviction while a long text is "
    "written. held_bound: what it can be after one, by arithmetic from the model's decays. The caches have room for "
    "that and for the tokens until the next eviction, and one that needs more fails",
    "checks": "packed: decayattn.testing on the timed inputs, a few (sequence, head) pairs. decode: the same error "
    "budget, all query heads of the first key head of the first entry and of the last one of the last entry. generate: "
    "‖x − x64‖ ≤ 2‖recompute − x64‖ + eps‖x64‖ of the last logits of a given text. What fails gets no speed",
}


def new_report(rounds: int) -> dict[str, Any]:
    """A report without results."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"CPU {platform.processor() or platform.machine()}",
        "method": METHOD,
        "rounds": rounds,
        "checks": [],
        "missing": [],
        "packed": [],
        "decode": [],
        "generate": [],
        "stream": None,
    }


def passed(report: dict[str, Any], section: str, case: str, comparisons: Sequence[Row]) -> bool:
    """Record a check; a violation is printed, and listed as missing."""
    table = format_table(comparisons)
    report["checks"].append({"section": section, "case": case, "table": table.splitlines()})
    if all(row.verdict == "ok" for row in comparisons):
        print(f"  {case}: within the error budget", flush=True)
        return True
    print(table)
    missing(report, section, case, "wrong", "results outside the error budget: no speed is reported")
    return False


def missing(report: dict[str, Any], section: str, case: str, kind: str, why: str) -> None:
    """Record what has no result, and why; kind is "wrong" or "failed"."""
    report["missing"].append({"section": section, "case": case, "kind": kind, "reason": why})
    print(f"  {case}: {kind}: {why}", flush=True)


def spread(values: Sequence[float]) -> tuple[float, list[float]]:
    """Median, and [least, largest]."""
    return statistics.median(values), [min(values), max(values)]
