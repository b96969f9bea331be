"""Text from ByteLM: recomputed for every token, with a cache (by itself, or as a CUDA graph), and with a cache that
forgets what no row can notice."""

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from language_models.model import BYTES, ByteLM
from shared.cases import DTYPES
from shared.peers import reason
from shared.timing import interleaved
from torch import Tensor

from decayattn import DecayFlashAttention
from decayattn.nn import CapturedStep, DecayCache, ScalarDecay
from decayattn.testing.table import Verdict, ratio
from sequence_benchmark.report import missing, passed, spread

SECTION = "generate"
MODES = ("recompute", "cache", "captured", "evict")
# The check's oracle holds the scores of so many tokens in float64. Evictions that come later are not in the check.
MOST_CHECKED_TOKENS = 8192
# so many of the checked tokens come one by one, and their logits are compared
CHECKED_STEPS = 16


def build_model(
    layers: int, width: int, heads: int, half_lives: Sequence[float], dtype: torch.dtype, device: str, seed: int
) -> ByteLM:
    """ByteLM with random weights, whose scores are bounded (qk_norm), as evict needs it.

    The weight of a new ScalarDecay is 0: a head's decay is one per token, and has the same value at every token.
    """
    with torch.random.fork_rng(devices=[]):  # built on the CPU: the same weights on every device
        torch.manual_seed(seed)
        model = ByteLM(layers=layers, width=width, heads=heads, decay="scalar")
        for block in model.blocks:
            decay = ScalarDecay(width, heads, initial_half_lives=tuple(half_lives))
            block.attention = DecayFlashAttention(width, heads, decay=decay, qk_norm=True)
    return model.to(device, dtype).requires_grad_(False)


def set_backend(model: ByteLM, backend: str) -> ByteLM:
    """The model, all its attention on that backend."""
    for block in model.blocks:
        block.attention.backend = backend
    return model


@dataclass(frozen=True)
class Eviction:
    """DecayCache.evict after every so many new tokens, at a tolerance."""

    every: int
    tolerance: float

    def __call__(self, model: ByteLM, caches: Sequence[DecayCache]) -> None:
        for block, cache in zip(model.blocks, caches, strict=True):
            cache.evict(self.tolerance, block.attention.score_bound())


def held_bound(model: ByteLM, eviction: Eviction) -> int:
    r"""No layer's cache holds more tokens after an eviction, however long the text.

    With the rate r of the slowest head and its score bound S, a token that is n tokens old can go as soon as that token
    and all before it have at most the tolerance::

        exp(2 S) Σ_{m ≥ n} exp(−r m)  =  exp(2 S − r n) / (1 − exp(−r))  ≤  tolerance
    """
    bounds = []
    for block in model.blocks:
        rate = -F.logsigmoid(block.attention.decay.bias).double()
        nats = 2 * block.attention.score_bound() - math.log(eviction.tolerance) - torch.log(-torch.expm1(-rate))
        bounds.append(math.ceil(float((nats / rate).max())))
    return max(bounds) + 1  # 1 for roundings


class Recompute:
    """Writes text without a cache: every step is a call on the whole text so far."""

    def __init__(self, model: ByteLM, prompt: Tensor):
        self.model, self.text = model, prompt
        self.new = greedy(model(prompt))

    def step(self) -> None:
        self.text = torch.cat([self.text, self.new], 1)
        self.new = greedy(self.model(self.text))


class Cached:
    """Writes text with a cache per layer that holds `room` tokens.

    Evictions begin after the prompt. `lengths` tells of each later one how many tokens the longest cache held before it
    and after it. captured: the steps are a CUDA graph's.
    """

    def __init__(
        self, model: ByteLM, prompt: Tensor, room: int, eviction: Eviction | None = None, captured: bool = False
    ):
        self.model, self.eviction = model, eviction
        self.caches = model.make_caches(len(prompt), room)
        self.new = greedy(model(prompt, self.caches))
        self.steps = 0
        self.lengths: list[tuple[int, int]] = []
        if eviction:
            eviction(model, self.caches)
        self.next: Callable[[Tensor], Tensor] = self._next
        if captured:
            self.next = CapturedStep(self._next, self.caches, self.new)

    def _next(self, new: Tensor) -> Tensor:
        return greedy(self.model(new, self.caches))

    def step(self) -> None:
        self.new = self.next(self.new)
        self.steps += 1
        if self.eviction and self.steps % self.eviction.every == 0:
            before = longest(self.caches)
            self.eviction(self.model, self.caches)
            self.lengths.append((before, longest(self.caches)))


def greedy(logits: Tensor) -> Tensor:
    """The likeliest next tokens (B, 1); nothing waits for the device."""
    return logits[:, -1:].argmax(-1)


def longest(caches: Sequence[DecayCache]) -> int:
    return max(cache.longest for cache in caches)


@dataclass(frozen=True)
class LogitsRow:
    """The logits of one mode against their budget, in the Frobenius norm; a line of decayattn.testing's table."""

    HEADINGS: ClassVar[tuple[str, ...]] = ("logits",)

    mode: str
    error: float
    budget: float
    relative_error: float
    norm: str
    passed: bool

    @property
    def verdict(self) -> Verdict:
        return "ok" if self.passed else "wrong"

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.mode,)


def verify(model: ByteLM, tokens: Tensor, eviction: Eviction) -> list[LogitsRow]:
    """The logits of the last CHECKED_STEPS tokens of a given text with caches, step by step, captured, and evicting.

    They may be as far from x64 (a float64 copy of the model on the reference, the whole text at once) as twice what
    the model without a cache is, and one rounding.
    """
    x64 = set_backend(copy.deepcopy(model).double(), "reference")(tokens)[:, -CHECKED_STEPS:]
    plain = model(tokens)[:, -CHECKED_STEPS:]
    norm = float(x64.norm())
    budget = 2 * float((plain.double() - x64).norm()) + torch.finfo(plain.dtype).eps * norm
    found = []
    for mode in MODES[1:]:
        error = float((last_logits(model, tokens, eviction, mode).double() - x64).norm())
        found.append(LogitsRow(mode, error, budget, ratio(error, norm), "frobenius", error <= budget))
    return found


def last_logits(model: ByteLM, tokens: Tensor, eviction: Eviction, mode: str) -> Tensor:
    """The logits of the last CHECKED_STEPS tokens, which come one by one, through caches.

    Those before them come in parts of eviction.every tokens; evicting, there is an eviction after each part, and the
    later steps are captured, too.
    """
    caches = model.make_caches(*tokens.shape)
    early, late = tokens[:, :-CHECKED_STEPS], tokens[:, -CHECKED_STEPS:]
    for part in early.split(eviction.every, 1):
        model(part, caches)
        if mode == "evict":
            eviction(model, caches)

    def step(token: Tensor) -> Tensor:
        return model(token, caches)

    captured = step if mode == "cache" else CapturedStep(step, caches, late[:, :1])
    return torch.cat([captured(token).clone() for token in late.split(1, 1)], 1)


@torch.no_grad()
def run(
    options: argparse.Namespace, device: str, timer: Callable[[Callable[[], object]], float] | None,
    report: dict[str, Any],
) -> None:
    """Check the logits, time every mode, and write a long text with evictions; on a CPU, too.

    The timer measures kernels; text is timed by the clock, and takes none.
    """
    shape = options.generate_layers, options.generate_width, options.generate_heads
    case = "{} layers, width {}, {} heads, {}, half-lives {:g} to {:g}, tolerance {:.1e}".format(
        *shape, options.dtype, *options.generate_half_lives, options.generate_tolerance
    )
    print(f"\ntext from a model with random weights, on {report['device']}: {case}", flush=True)
    try:
        model = build_model(*shape, options.generate_half_lives, DTYPES[options.dtype], device, options.seed)
        eviction = Eviction(options.generate_evict_every, options.generate_tolerance)
        generator = torch.Generator().manual_seed(options.seed)
        text = torch.randint(BYTES, (1, MOST_CHECKED_TOKENS), generator=generator).to(device)
        checked = min(held_bound(model, eviction) + 2 * eviction.every + CHECKED_STEPS, MOST_CHECKED_TOKENS)
        if not passed(report, SECTION, case, verify(model, text[:, :checked], eviction)):
            return
        prompt = torch.randint(BYTES, (1, options.generate_prompt), generator=generator).to(device)
        seconds = time_modes(model, prompt, options.generate_timed, options.rounds, eviction)
        found = rows(case, report["device"], len(prompt[0]), options.generate_timed, seconds)
        report["generate"] += found
        print(table(found), flush=True)
        report["stream"] = stream(model, options.generate_stream, eviction)
    except Exception as error:  # the other parts of the run go on
        missing(report, SECTION, case, "failed", reason(error))


def time_modes(model: ByteLM, prompt: Tensor, count: int, rounds: int, eviction: Eviction) -> dict[str, list[float]]:
    """Seconds for `count` tokens after the prompt, one number per mode and round.

    One more round before them compiles, and is not counted.
    """
    length = prompt.shape[1]
    room = max(length, held_bound(model, eviction)) + eviction.every
    start: dict[str, Callable[[], Recompute | Cached]] = {
        "recompute": lambda: Recompute(model, prompt),
        "cache": lambda: Cached(model, prompt, length + count),
        "captured": lambda: Cached(model, prompt, length + count, captured=True),
        "evict": lambda: Cached(model, prompt, room, eviction, captured=True),
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for mode in interleaved(MODES, rounds + 1):
        writer = start[mode]()
        synchronize(prompt.device)
        began = time.perf_counter()
        for _ in range(count):
            writer.step()
        synchronize(prompt.device)
        seconds[mode].append(time.perf_counter() - began)
    return {mode: found[1:] for mode, found in seconds.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stream(model: ByteLM, count: int, eviction: Eviction) -> dict[str, Any]:
    """Write `count` tokens with evictions, and record how long the longest cache is.

    The caches have room for what an eviction may leave (held_bound) and for the tokens until the next one, however many
    are written. Where evictions leave more, the next tokens do not fit, which raises.

    Returns:
        tokens, before, after: at every eviction, how many tokens had been written, and the longest cache's length;
        held_bound; and how the text was written.
    """
    held = held_bound(model, eviction)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=model.embedding.weight.device)
    writer = Cached(model, prompt, held + eviction.every, eviction, captured=True)
    synchronize(prompt.device)
    began = time.perf_counter()
    for number in range(1, count + 1):
        writer.step()
        if number % max(1, count // 10) == 0:
            print(f"  {number} tokens written, {longest(writer.caches)} in the longest cache", flush=True)
    synchronize(prompt.device)
    seconds = time.perf_counter() - began
    before, after = zip(*writer.lengths, strict=True)
    return {
        "count": count, "evict_every": eviction.every, "tolerance": eviction.tolerance, "held_bound": held,
        "tokens_per_second": count / seconds, "tokens": [eviction.every * (n + 1) for n in range(len(before))],
        "before": list(before), "after": list(after),
    }


def rows(case: str, device: str, prompt: int, count: int, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row per mode; ratio_to_recompute above 1 is faster than without a cache."""
    result = []
    for mode, values in seconds.items():
        rate, rate_range = spread([count / value for value in values])
        recomputed = spread([count / value for value in seconds["recompute"]])[0]
        result.append(
            {
                "mode": mode, "case": case, "device": device, "prompt": prompt, "count": count,
                "tokens_per_second": rate, "tokens_per_second_range": rate_range,
                "ratio_to_recompute": rate / recomputed,
            }
        )
    return result


def table(found: list[dict[str, Any]]) -> str:
    """A line per mode."""
    first = found[0]
    lines = [f"  {first['count']} tokens after a prompt of {first['prompt']}, on {first['device']}"]
    lines.append(f"  {'':12}{'tokens/s':>10} {'[range]':>19} {'/recompute':>11}")
    for row in found:
        low, high = row["tokens_per_second_range"]
        speed = f"{row['tokens_per_second']:10.1f} {f'[{low:.1f}–{high:.1f}]':>19}"
        lines.append(f"  {row['mode']:12}{speed} {row['ratio_to_recompute']:11.2f}")
    return "\n".join(lines)
