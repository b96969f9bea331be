"""The loss of a trained model at every position of texts longer than those that it was trained on."""

import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from language_models.corpus import Corpus, crops, held_out_starts
from language_models.model import ByteLM
from language_models.schemes import SCHEMES
from language_models.statistics import attention_statistics
from torch import Tensor

from extrapolation.settings import Settings
from extrapolation.training import autocast

# tokens of a call: of the memory that it takes, the most is for the products of the MLP
_TOKENS = {"cuda": 2**18, "cpu": 2**13}
_BITS_PER_NAT = 1 / np.log(2)


@torch.no_grad()
def read(model: ByteLM, scheme: str, settings: Settings, corpus: Corpus, text: Tensor) -> list[dict[str, Any]]:
    """For every length that the scheme takes part in, mean bits per byte over crops of held-out files, twice: with the
    whole crop before each byte, and in windows of the trained length, each half a window after the one before, whose
    second halves count. Both are of the same bytes, so their difference is what the longer context does.

    bits, bits_in_windows: of every stretch of settings.bins; bits is None beyond the trained length for a scheme that
    takes no longer text. columns: of every stretch of the table, with the standard error of the difference over crops.
    attention: attention_statistics on the first crop. milliseconds: of reading it, with and without skipping. What is
    visited, and times, are a GPU's only.
    """
    model.eval()
    chosen = SCHEMES[scheme]
    found = []
    for length, count in zip(settings.lengths, settings.crops, strict=True):
        if length > settings.without_decay_up_to and not chosen.decays:
            continue
        if length > min(settings.lengths) and not chosen.any_length:
            continue
        starts = held_out_starts(corpus, length + 1, count, settings.crops_per_file)
        tokens = crops(text, starts, length + 1)
        in_windows = losses_in_windows(model, tokens, settings)
        whole = losses(model, tokens, settings) if chosen.any_length else None
        row = {
            "length": length, "crops": len(starts),
            "bits": _binned(in_windows[:, : settings.context] if whole is None else whole, settings.bins(length)),
            "bits_in_windows": _binned(in_windows, settings.bins(length)),
            "columns": [
                column(begin, end, whole, in_windows, settings.context)
                for begin, end in settings.columns()
                if end <= length and all(end > other for other in settings.lengths if other < length)
            ],
        }
        if chosen.any_length:
            row["attention"] = _statistics(model, tokens[:1, :-1], settings)
            row["milliseconds"] = _times(model, tokens[:1], settings)
        found.append(row)
    return found


def losses(model: ByteLM, tokens: Tensor, settings: Settings) -> Tensor:
    """Bits of every byte after the first of tokens (B, T + 1), (B, T) float32; byte t + 1 has t + 1 bytes before it."""
    parts = []
    for part in tokens.split(max(1, _TOKENS[tokens.device.type] // tokens.shape[1])):
        with autocast(settings, tokens.device):
            logits = model(part[:, :-1])
        target = part[:, 1:].long()
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none")
        parts.append(loss.view(target.shape) * _BITS_PER_NAT)
    return torch.cat(parts)


def losses_in_windows(model: ByteLM, tokens: Tensor, settings: Settings) -> Tensor:
    """The same with at most `context` bytes before each, at least half as many but at the beginning."""
    size, half = settings.context, settings.context // 2
    windows = tokens.unfold(1, size + 1, half)  # (B, number, size + 1)
    of_windows = losses(model, windows.flatten(0, 1), settings).unflatten(0, windows.shape[:2])
    return torch.cat([of_windows[:, 0, :half], of_windows[:, :, half:].flatten(1)], dim=1)


def _binned(bits: Tensor, edges: list[int]) -> list[float | None]:
    means = bits.double().mean(0)
    return [
        round(float(means[begin:end].mean()), 5) if end <= len(means) else None
        for begin, end in itertools.pairwise(edges)
    ]


def column(begin: int, end: int, whole: Tensor | None, in_windows: Tensor, context: int) -> dict[str, Any]:
    """Mean bits per byte of positions begin ≤ t < end, read whole and in windows."""
    windows = in_windows[:, begin:end].double().mean(1)
    if whole is None and end > context:
        return {"begin": begin, "end": end, "bits": None, "in_windows": float(windows.mean()), "standard_error": None}
    of_crops = windows if whole is None else whole[:, begin:end].double().mean(1)
    error = float((of_crops - windows).std() / len(windows) ** 0.5) if len(windows) > 1 else None
    return {
        "begin": begin, "end": end, "bits": float(of_crops.mean()), "in_windows": float(windows.mean()),
        "standard_error": error,
    }


def _statistics(model: ByteLM, tokens: Tensor, settings: Settings) -> list[dict[str, Any]]:
    with autocast(settings, tokens.device):
        return attention_statistics(model, tokens, visited=tokens.device.type == "cuda")


def _times(model: ByteLM, tokens: Tensor, settings: Settings) -> dict[str, float] | None:
    """Milliseconds of one forward of the model, median of 3, with skipping and without."""
    if tokens.device.type != "cuda":
        return None
    found = {}
    layers = [block.attention for block in model.blocks]
    for name, tolerance in (("skipping", "auto"), ("whole", None)):
        for layer in layers:
            layer.skip_tolerance = tolerance
        seconds = []
        for _ in range(4):
            torch.cuda.synchronize(tokens.device)
            begun = time.perf_counter()
            losses(model, tokens, settings)
            torch.cuda.synchronize(tokens.device)
            seconds.append(time.perf_counter() - begun)
        found[name] = round(1e3 * statistics.median(seconds[1:]), 3)
    for layer in layers:
        layer.skip_tolerance = "auto"
    return found
