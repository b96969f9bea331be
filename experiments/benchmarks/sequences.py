"""Speed of packed sequences, decoding and generation; correct first. Usage::

    python experiments/benchmarks/sequences.py                              # on a GPU: all of it
    python experiments/benchmarks/sequences.py --what decode                # part of it

* packed: decay_attention_varlen on documents of mixed length, compared with a dense batch of as many tokens and visible
  pairs ("dense alike"). TFLOP/s count 4·D·H operations forward per visible pair, 2.5 times that backward; nothing is
  skipped.
* decode: one new token over a long cache; bytes of keys, values and α read per second, compared with those of a copy of
  the keys on the same device. paged: in pages of 64 tokens, in random order.
* generate: tokens (bytes) per second that a small language model writes without a cache, with one, with its step
  captured in a CUDA graph, and so with a cache that evicts; and the length of the latter while it writes a long text.

The budget of generate's logits is twice the error of the model without a cache, plus one rounding. stream: held_bound
is the upper bound of the cache after an eviction, by arithmetic from the model's decays. Without a GPU generate is
timed by the clock, on that CPU.
"""

import copy
import functools
import itertools
import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from toy_lm.model import BYTES, ByteLM

from benchmarks import harness
from benchmarks.harness import BACKWARD_WORK, DECAYS, DTYPES, Case, Parts, Prepared, Run, Timings, spread
from decayattn import DecayFlashAttention, decay_attention, decay_attention_varlen
from decayattn.backends import registry
from decayattn.nn import CapturedStep, DecayCache, ScalarDecay
from decayattn.problem import Inputs
from decayattn.testing import Comparison, verify_attention, verify_attention_varlen

OPTIONS = {
    "what": (["packed", "decode", "generate"],) * 2 + ("parts to run", ("packed", "decode", "generate")),
    "dtype": harness.DTYPE,
    "mean_log_decay": (-0.01, -0.01, "mean log-decay per token, natural log (drawn from [2m, 0])", float),
    "seconds": (0.03, 0.03, "time of one figure of a kernel"),
    "rounds": (5, 2, "interleaved rounds"),
    "backend": ("auto", "triton", "our backend in the packed part", registry.NAMES),
    "generate_stream": (100_000, 400, "tokens of the long text, written with evictions"),
    "output": harness.output("benchmark_sequences.json"),
}


# on a GPU, and on a CPU, where kernels are interpreted. step, model: arguments of Step and build_model. half_lives,
# evict_every, prompt and written are in tokens
SIZES = {
    "cuda": Namespace(
        head_dims=(64, 128), heads=16, documents=64, shortest=64, longest=4096, step=(64, 32, 8, 128, 32768),
        model=(4, 256, 4), half_lives=(4.0, 64.0), evict_every=128, prompt=8192, written=512,
    ),
    "cpu": Namespace(
        head_dims=(8,), heads=2, documents=3, shortest=2, longest=20, step=(2, 4, 2, 8, 50), model=(2, 32, 2),
        half_lives=(1.0, 2.0), evict_every=16, prompt=128, written=32,
    ),
}
TOLERANCE = 2.0**-24  # probability that evictions may cost a row


def measure(run: Run) -> None:
    """Every part that was asked for."""
    run.report |= {"device": run.report["gpu"] or "CPU", "packed": [], "decode": [], "generate": [], "stream": None}
    for part in dict.fromkeys(run.options.what):
        PARTS[part](run)
        run.save()


# packed documents, and a batch of as many tokens with as many visible pairs
PACKED, ALIKE = "packed", "dense alike"


class Workload(NamedTuple):
    """Causal self-attention of sequences of these lengths, with D_v = D and one log-decay per token and head.

    PACKED: consecutive, (total, H, D), drawn as a case of batch 1. ALIKE: of one length, in a batch (B, T, H, D).
    """

    name: str
    lengths: tuple[int, ...]
    case: Case

    def __str__(self) -> str:
        return f"{self.name}: {len(self.lengths)} sequences of {min(self.lengths)} to {max(self.lengths)}, {self.case}"

    def flops(self, direction: str) -> float:
        """4·D·H operations forward per visible pair of query and key, 2.5 times that backward."""
        pairs = sum(length * (length + 1) // 2 for length in self.lengths)
        return 4.0 * self.case.head_dim * self.case.heads * pairs * (BACKWARD_WORK if direction == "backward" else 1)

    def inputs(self, device: str, seed: int) -> dict[str, Tensor]:
        """q, k, v, grad_out and log_decay."""
        return {name: x[0] if self.name == PACKED else x for name, x in self.case.inputs(device, seed).items()}

    def options(self, backend: str, device: str) -> dict[str, Any]:
        """Arguments of the call, the bounds of packed sequences among them."""
        found: dict[str, Any] = {"skip_tolerance": None, "backend": backend}
        if self.name == PACKED:
            ends, longest = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32), max(self.lengths)
            found |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return found

    def verify(self, inputs: dict[str, Tensor], backend: str) -> list[Comparison]:
        """Three (sequence, head) pairs against the error budget, the longest and the shortest sequence among them."""
        at, heads = self.lengths.index, self.case.heads
        judged = {(at(max(self.lengths)), 0), (at(min(self.lengths)), heads - 1), (len(self.lengths) - 1, heads // 2)}
        verify = verify_attention_varlen if self.name == PACKED else verify_attention
        return verify(**inputs, heads=sorted(judged), **self.options(backend, inputs["q"].device.type))

    def prepare(self, inputs: dict[str, Tensor], backend: str, device: str) -> Prepared:
        attend = decay_attention_varlen if self.name == PACKED else decay_attention
        return harness.prepare(functools.partial(attend, **self.options(backend, device)), inputs)


def document_lengths(count: int, shortest: int, longest: int, seed: int) -> tuple[int, ...]:
    """Random lengths, uniform in their logarithm, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    lengths = (math.log(shortest) + uniform * math.log(longest / shortest)).exp().round()
    return tuple(int(length) for length in lengths.clamp(shortest, longest))


def workloads(options: Namespace, sizes: Namespace, head_dim: int) -> list[Workload]:
    def case(batch: int, length: int) -> Case:
        return Case(batch, sizes.heads, length, head_dim, options.dtype, "scalar", options.mean_log_decay)

    documents = document_lengths(sizes.documents, sizes.shortest, sizes.longest, options.seed)
    length = round(sum(length**2 for length in documents) / sum(documents))
    count = max(1, round(sum(documents) / length))
    alike = Workload(ALIKE, (length,) * count, case(count, length))
    return [Workload(PACKED, documents, case(1, sum(documents))), alike]


def packed(run: Run) -> None:
    """Check both workloads, then time those that are right."""
    options, sizes = run.options, SIZES[run.device]
    for head_dim in sizes.head_dims:
        print(f"\npacked sequences, D {head_dim}", flush=True)
        chosen = {workload.name: workload for workload in workloads(options, sizes, head_dim)}
        places = {name: {"section": "packed", "case": str(workload)} for name, workload in chosen.items()}
        prepared: dict[str, Parts] = {}
        for name, workload in chosen.items():
            with run.attempt(**places[name]):
                inputs = workload.inputs(run.device, options.seed)
                if run.passed(workload.verify(inputs, options.backend), **places[name]):
                    prepared[name] = workload.prepare(inputs, options.backend, run.device).parts
        if run.timed:
            timings = run.time(prepared, harness.burst_timer(options.seconds), where=places)
            run.add(packed_rows(chosen, timings), "{workload} {direction}", ("ms", "tflops", "ratio_to_alike"),
                    to="packed")


def packed_rows(chosen: dict[str, Workload], timings: Timings) -> Iterator[dict[str, Any]]:
    """One row per workload and direction; ratio_to_alike compares TFLOP/s, above 1 is faster than the dense batch."""
    speeds = {(name, way): chosen[name].flops(way) / statistics.median(times) / 1e9
              for (name, way), times in timings.items()}
    for (name, direction), times in timings.items():
        workload, alike = chosen[name], speeds.get((ALIKE, direction))
        yield asdict(workload.case) | spread(times) | {
            "workload": name, "direction": direction, "sequences": len(workload.lengths),
            "tokens": sum(workload.lengths), "flops": workload.flops(direction), "tflops": speeds[name, direction],
            "ratio_to_alike": speeds[name, direction] / alike if alike and name == PACKED else None,
        }


COPY = "copy"  # what the steps are compared with
PAGED = ", paged"  # after the name of a decay: the cache is in pages of PAGE tokens, in random order
PAGE = 64
ALPHA_BYTES = 8  # the cache holds the running sum of the log-decays in float64


@dataclass(frozen=True)
class Step:
    """One new token in each of `batch` entries with `tokens` cached tokens, the new one among them; D_v = D."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    dtype: str

    def __str__(self) -> str:
        heads = f"H{self.heads} H_kv{self.kv_heads}"
        return f"B{self.batch} {heads} D{self.head_dim} {self.dtype}, {self.tokens} tokens"

    def bytes_read(self, decay: str) -> int:
        """Keys and values, and α with a decay per token; other reads and writes of a step are no part of it."""
        cached = self.batch * self.tokens
        read = cached * self.kv_heads * 2 * self.head_dim * DTYPES[self.dtype].itemsize
        return read + cached * self.heads * ALPHA_BYTES if decay == "scalar" else read

    def inputs(self, device: str, seed: int, mean_log_decay: float) -> dict[str, Tensor]:
        """q (B, 1, H, D); keys, values (B, T, H_kv, D); log-decays, negative: rates (H,), log_decay (B, T, H), alpha.

        alpha (B, T, H) is the running sum of log_decay in float64, in memory (B, H, T), as a DecayCache has it.
        """
        generator = torch.Generator(device).manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "device": device}
        cache = (self.batch, self.tokens, self.kv_heads, self.head_dim)
        inputs = {"q": torch.randn(self.batch, 1, self.heads, self.head_dim, dtype=DTYPES[self.dtype], **options)}
        for name in ("keys", "values"):
            inputs[name] = torch.randn(cache, dtype=DTYPES[self.dtype], **options)
        inputs["rates"] = 2 * mean_log_decay * torch.rand(self.heads, **options)
        inputs["log_decay"] = 2 * mean_log_decay * torch.rand(self.batch, self.tokens, self.heads, **options)
        inputs["alpha"] = inputs["log_decay"].cumsum(1, dtype=torch.float64).mT.contiguous().mT
        return inputs

    def paged(self, inputs: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
        """The same, keys, values and alpha in pages; block_table (B, blocks) int32."""
        blocks = -(-self.tokens // PAGE)
        order = torch.randperm(self.batch * blocks, generator=torch.Generator().manual_seed(seed))
        table = order.argsort().reshape(self.batch, blocks).to(inputs["q"].device, torch.int32)
        in_pages = {
            name: F.pad(inputs[name], (0, 0) * (inputs[name].ndim - 2) + (0, blocks * PAGE - self.tokens))
            .unflatten(1, (blocks, PAGE)).flatten(0, 1)[order.to(table.device)]
            for name in ("keys", "values", "alpha")
        }
        return inputs | in_pages | {"block_table": table}

    def call(self, inputs: dict[str, Tensor], decay: str) -> Callable[[], tuple[Tensor, Tensor]]:
        """The call that is timed: (out, lse) of the new tokens."""
        from decayattn.backends.portable.decode import decode  # imports Triton

        lengths = inputs["q"].new_full((self.batch,), self.tokens, dtype=torch.int32)
        rates = inputs["rates"] if decay == "constant" else None
        alpha = inputs["alpha"] if decay == "scalar" else None
        given = Inputs(inputs["q"], inputs["keys"], inputs["values"], rates, scale=self.head_dim**-0.5)
        return lambda: decode(given, lengths, alpha=alpha, block_table=inputs.get("block_table"))


def verify_step(step: Step, inputs: dict[str, Tensor], decay: str, results: tuple[Tensor, Tensor]) -> list[Comparison]:
    """out and lse against the error budget: the queries of the first key head of the first entry, and of the last one
    of the last entry."""
    comparisons, group = [], step.heads // step.kv_heads
    for entry, kv_head in dict.fromkeys([(0, 0), (step.batch - 1, step.kv_heads - 1)]):
        own, heads = slice(entry, entry + 1), slice(kv_head * group, (kv_head + 1) * group)
        tested = results[0][own, :, heads], results[1][own, heads]
        k, v = (inputs[name][own, :, kv_head : kv_head + 1] for name in ("keys", "values"))
        log_decay = {"scalar": inputs["log_decay"][own, :, heads], "constant": inputs["rates"][heads]}.get(decay)

        def attend(*, tested: tuple[Tensor, Tensor] = tested, **inputs: Any) -> list[Tensor]:
            # a step has no gradients: they are 0, as the oracle's for zeros, and left aside
            return [x + sum(y[:0].sum() for y in inputs.values() if isinstance(y, Tensor)) for x in tested]

        gradients = {"grad_out": torch.zeros_like(tested[0]), "grad_lse": torch.zeros_like(tested[1])}
        found = verify_attention(inputs["q"][own, :, heads], k, v, log_decay, attend=attend, **gradients)
        comparisons += [replace(c, head=(entry, heads.start + c.head[1])) for c in found if c.name in ("out", "lse")]
    return comparisons


def decode(run: Run) -> None:
    """Check the step with every decay, then time those that are right."""
    options = run.options
    step = Step(*SIZES[run.device].step, options.dtype)
    print(f"\none new token over a cache: {step}", flush=True)
    calls: dict[str, Callable[[], object]] = {}
    with run.attempt(section="decode", case=str(step)):
        inputs = step.inputs(run.device, options.seed, options.mean_log_decay)
        paged = step.paged(inputs, options.seed)
        for decay, cached in ((decay, cached) for cached in (inputs, paged) for decay in DECAYS):
            name = decay + PAGED * (cached is paged)
            where = {"section": "decode", "case": f"{step}, decay {name}"}
            with run.attempt(**where):
                call = step.call(cached, decay)
                if run.passed(verify_step(step, inputs, decay, call()), **where):
                    calls[name] = call
        if run.timed and calls:
            target = torch.empty_like(inputs["keys"])
            calls = {COPY: lambda: target.copy_(inputs["keys"]), **calls}
            parts = {name: lambda call=call: [("", call)] for name, call in calls.items()}
            timings = run.time(parts, harness.burst_timer(options.seconds))
            run.add(decode_rows(step, 2 * inputs["keys"].nbytes, timings), "{decay}",
                    ("ms", "gigabytes_per_second", "ratio_to_copy"), to="decode")


def decode_rows(step: Step, copied: int, timings: Timings) -> Iterator[dict[str, Any]]:
    """The copy and every decay; ratio_to_copy compares bytes per second. copied: bytes that the copy moves."""
    copy_speed = copied / statistics.median(timings[COPY, ""]) / 1e6
    for (name, _), values in timings.items():
        moved = copied if name == COPY else step.bytes_read(name.removesuffix(PAGED))
        row = asdict(step) | {"decay": name, "bytes": moved} | spread(values)
        speed = moved / row["ms"] / 1e6
        yield row | {"gigabytes_per_second": speed, "ratio_to_copy": speed / copy_speed}


MODES = ("recompute", "cache", "captured", "evict")
# the check's oracle holds the scores of this many tokens in float64. Evictions that come later are not in the check.
MOST_CHECKED_TOKENS = 8192
# of the checked tokens, those that come one by one; their logits are compared
CHECKED_STEPS = 16


def build_model(
    layers: int, width: int, heads: int, half_lives: Sequence[float], dtype: torch.dtype, device: str, seed: int
) -> ByteLM:
    """ByteLM with random weights and bounded scores (qk_norm), as evict needs them. The weight of a new ScalarDecay is
    0, so each head has one decay for all tokens."""
    with torch.random.fork_rng(devices=[]):  # built on the CPU: the same weights on every device
        torch.manual_seed(seed)
        model = ByteLM(layers, width, heads, make_attention=lambda: DecayFlashAttention(
            width, heads, decay=ScalarDecay(width, heads, initial_half_lives=tuple(half_lives)), qk_norm=True))
    return model.to(device, dtype).requires_grad_(False)


@dataclass
class Eviction:
    """DecayCache.evict after every `every` tokens. lengths: tokens of the longest cache, before and after each."""

    every: int
    tolerance: float
    lengths: list[tuple[int, int]] = field(default_factory=list, init=False)

    def __call__(self, model: ByteLM, caches: Sequence[DecayCache]) -> None:
        before = longest(caches)
        for block, cache in zip(model.blocks, caches, strict=True):
            cache.evict(self.tolerance, block.attention.score_bound())
        self.lengths.append((before, longest(caches)))


def held_bound(model: ByteLM, eviction: Eviction) -> int:
    r"""Upper bound on the tokens of a layer's cache after an eviction, however long the text.

    The slowest head has rate r and score bound S. A token n tokens old can go once it and all before it have at most::

        exp(2 S) Σ_{m ≥ n} exp(−r m)  =  exp(2 S − r n) / (1 − exp(−r))  ≤  tolerance
    """
    bounds = []
    for block in model.blocks:
        rate = -F.logsigmoid(block.attention.decay.bias).double()
        nats = 2 * block.attention.score_bound() - math.log(eviction.tolerance) - torch.log(-torch.expm1(-rate))
        bounds.append(math.ceil(float((nats / rate).max())))
    return max(bounds) + 1  # 1 for roundings


def write(
    model: ByteLM, prompt: Tensor, caches: list[DecayCache] | None = None, eviction: Eviction | None = None,
    captured: bool = False,
) -> Iterator[Tensor]:
    """The likeliest token (1, 1) after the prompt, then the one after that, and so on. Without caches each step reads
    the text so far. Evictions begin after the prompt. captured: the steps are a CUDA graph's."""
    new, text = greedy(model(prompt, caches)), prompt

    def step(new: Tensor) -> Tensor:
        return greedy(model(new, caches))

    if eviction:
        eviction(model, caches)
    take = CapturedStep(step, caches, new) if captured else step
    for written in itertools.count(1):
        yield new
        if caches:
            new = take(new)
        else:
            text = torch.cat([text, new], 1)
            new = greedy(model(text))
        if eviction and written % eviction.every == 0:
            eviction(model, caches)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest next tokens (B, 1), without a synchronisation."""
    return logits[:, -1:].argmax(-1)


def longest(caches: Sequence[DecayCache]) -> int:
    return max(cache.longest for cache in caches)


def logits_over_budget(model: ByteLM, tokens: Tensor, eviction: Eviction) -> dict[str, float]:
    """By mode, error over its budget of the logits of the last CHECKED_STEPS tokens with caches. x64 is a float64 copy
    on the reference. The logits may be twice as far from it as those without a cache, plus one rounding."""
    exact = copy.deepcopy(model).double()
    for block in exact.blocks:
        block.attention.backend = "reference"
    x64 = exact(tokens)[:, -CHECKED_STEPS:]
    plain = model(tokens)[:, -CHECKED_STEPS:]
    budget = 2 * (plain.double() - x64).norm() + torch.finfo(plain.dtype).eps * x64.norm()
    return {mode: float((last_logits(model, tokens, eviction, mode).double() - x64).norm() / budget)
            for mode in MODES[1:]}


def last_logits(model: ByteLM, tokens: Tensor, eviction: Eviction, mode: str) -> Tensor:
    """The logits of the last CHECKED_STEPS tokens, one by one, after parts of eviction.every tokens. Mode "evict" has
    an eviction after each part, and its later steps are captured."""
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
def generate(run: Run) -> None:
    """Check the logits, time every mode, and write a long text with evictions; also on a CPU, by the clock."""
    options, sizes, device = run.options, SIZES[run.device], run.report["device"]
    case = "{} layers, width {}, {} heads, {}, half-lives {:g} to {:g}, tolerance {:.1e}".format(
        *sizes.model, options.dtype, *sizes.half_lives, TOLERANCE
    )
    print(f"\ntext from a model with random weights, on {device}: {case}", flush=True)
    with run.attempt(section="generate", case=case):
        model = build_model(*sizes.model, sizes.half_lives, DTYPES[options.dtype], run.device, options.seed)
        eviction = Eviction(sizes.evict_every, TOLERANCE)
        generator = torch.Generator().manual_seed(options.seed)
        text = torch.randint(BYTES, (1, MOST_CHECKED_TOKENS), generator=generator).to(run.device)
        checked = min(held_bound(model, eviction) + 2 * eviction.every + CHECKED_STEPS, MOST_CHECKED_TOKENS)
        ratios = logits_over_budget(model, text[:, :checked], eviction)
        outside = [mode for mode, x in ratios.items() if not x <= 1]
        if not run.right(outside, [f"{mode}: {x:.3f}" for mode, x in ratios.items()], section="generate", case=case):
            return
        prompt = torch.randint(BYTES, (1, sizes.prompt), generator=generator).to(run.device)
        count = sizes.written
        speeds = {mode: spread([count / x for x in found], "tokens_per_second")
                  for mode, found in time_modes(model, prompt, count, run, eviction).items()}
        about = {"case": case, "device": device, "prompt": prompt.shape[1], "count": count}
        alone = speeds["recompute"]["tokens_per_second"]
        found = (about | {"mode": mode, "ratio_to_recompute": speed["tokens_per_second"] / alone} | speed
                 for mode, speed in speeds.items())
        run.add(found, "{mode}", ("tokens_per_second", "ratio_to_recompute"), to="generate")
        run.report["stream"] = stream(model, options.generate_stream, eviction)


def time_modes(model: ByteLM, prompt: Tensor, count: int, run: Run, eviction: Eviction) -> dict[str, list[float]]:
    """Seconds for `count` tokens after the prompt, by mode and round. A round before them compiles, and is not
    counted."""
    room = {"cache": prompt.shape[1] + count, "captured": prompt.shape[1] + count,
            "evict": max(prompt.shape[1], held_bound(model, eviction)) + eviction.every}

    def begun(mode: str) -> list[tuple[str, Iterator[Tensor]]]:
        writer = write(model, prompt, model.make_caches(1, room[mode]) if mode in room else None,
                       eviction if mode == "evict" else None, mode in ("captured", "evict"))
        next(writer)
        return [("", writer)]

    parts = {mode: functools.partial(begun, mode) for mode in MODES}
    timings = run.time(parts, lambda writer: harness.clock(writer.__next__, count), run.options.rounds + 1)
    return {mode: found[1:] for (mode, _), found in timings.items()}


def stream(model: ByteLM, count: int, eviction: Eviction) -> dict[str, Any]:
    """Write `count` tokens with evictions, in caches with room for held_bound and the tokens until the next eviction.
    Where evictions leave more, the next tokens do not fit, which raises."""
    held, eviction = held_bound(model, eviction), replace(eviction)
    prompt = torch.zeros(1, 1, dtype=torch.long, device=model.embedding.weight.device)
    writer = write(model, prompt, model.make_caches(1, held + eviction.every), eviction, captured=True)
    next(writer)
    tokens_per_second = count / harness.clock(writer.__next__, count)
    before, after = zip(*eviction.lengths[1:], strict=True)  # without that of the prompt
    return {
        "count": count, "evict_every": eviction.every, "tolerance": eviction.tolerance, "held_bound": held,
        "tokens_per_second": tokens_per_second, "tokens": [eviction.every * (n + 1) for n in range(len(before))],
        "before": list(before), "after": list(after),
    }


PARTS = {"packed": packed, "decode": decode, "generate": generate}


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
