"""One new token over a long cache: the bytes that it reads, its check, its speed beside a copy of the device."""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from shared.cases import DECAYS, DTYPES
from shared.peers import reason
from shared.timing import interleaved
from torch import Tensor
from torch.nn.functional import pad

from decayattn.problem import AttentionProblem, Inputs
from decayattn.testing import Comparison
from decayattn.testing.attention import Budget
from decayattn.testing.call import Arguments, Call, bounds_of
from sequence_benchmark.report import missing, passed, spread

SECTION = "decode"
COPY = "copy"  # what the steps are compared with
PAGED = ", paged"  # behind the name of a decay: the cache is in pages of so many tokens, in random order
PAGE = 64
ALPHA_BYTES = 8  # the cache holds the running sum of the log-decays in float64


@dataclass(frozen=True)
class Step:
    """One new token in each of `batch` entries, whose caches hold `tokens` tokens, the new one among them; D_v = D."""

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
        """Keys and values, and α with a decay per token; what a step reads and writes besides is no part of it."""
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
            name: pad(inputs[name], (0, 0) * (inputs[name].ndim - 2) + (0, blocks * PAGE - self.tokens))
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


@torch.no_grad()
def verify(step: Step, inputs: dict[str, Tensor], decay: str, results: tuple[Tensor, Tensor]) -> list[Comparison]:
    """out and lse of two key heads' queries against the error budget of decayattn.testing.

    They are those of the first key head of the first entry, and of the last one of the last entry. The oracle is the
    float64 reference.
    """
    comparisons = []
    group = step.heads // step.kv_heads
    for entry, kv_head in dict.fromkeys([(0, 0), (step.batch - 1, step.kv_heads - 1)]):
        own, heads = slice(entry, entry + 1), slice(kv_head * group, (kv_head + 1) * group)
        q = inputs["q"][own, :, heads]
        k, v = (inputs[name][own, :, kv_head : kv_head + 1] for name in ("keys", "values"))
        log_decay = None
        if decay == "constant":
            log_decay = inputs["rates"][heads]
        elif decay == "scalar":
            log_decay = inputs["log_decay"][own, :, heads]
        problem = AttentionProblem.of(q, v, log_decay, row_scale=None, causal=True)
        arguments = Arguments(q, k, v, log_decay, None, None, None)
        all_bounds = bounds_of(problem, None)
        pairs = tuple((bounds, head) for bounds in all_bounds for head in range(group))
        # a step has no gradients: they are evaluated for zeros, and left aside
        grad_lse = q.new_zeros(1, group, 1, dtype=problem.accumulator_dtype)
        call = Call(arguments, torch.zeros_like(q), grad_lse, all_bounds, pairs, problem)
        with torch.enable_grad():
            x64 = call.oracle()
        out, lse = results
        tested = {"out": out[own, :, heads], "lse": lse[own, heads]}
        for found in Budget(call, {name: x64[name] for name in tested}).judge(tested):
            comparisons.append(replace(found, head=(entry, kv_head * group + found.head[1])))
    return comparisons


def run(
    options: argparse.Namespace, device: str, timer: Callable[[Callable[[], object]], float] | None,
    report: dict[str, Any],
) -> None:
    """Check the step with every decay, then time those that are right; without a timer the checks are all."""
    step = Step(
        options.decode_batch, options.decode_heads, options.decode_kv_heads, options.decode_head_dim,
        options.decode_tokens, options.dtype,
    )
    print(f"\none new token over a cache: {step}", flush=True)
    try:
        inputs = step.inputs(device, options.seed, options.mean_log_decay)
        paged = step.paged(inputs, options.seed)
    except Exception as error:  # the device's memory, say: the other parts of the run go on
        missing(report, SECTION, str(step), "failed", reason(error))
        return
    calls: dict[str, Callable[[], object]] = {}
    for decay, cached in ((decay, cached) for cached in (inputs, paged) for decay in DECAYS):
        name = decay + PAGED * (cached is paged)
        case = f"{step}, decay {name}"
        try:
            call = step.call(cached, decay)
            if passed(report, SECTION, case, verify(step, inputs, decay, call())):
                calls[name] = call
        except Exception as error:  # the other decays go on, and the run fails in the end
            missing(report, SECTION, case, "failed", reason(error))
    if timer is None or not calls:
        return
    try:
        target = torch.empty_like(inputs["keys"])
        times = time_calls({COPY: lambda: target.copy_(inputs["keys"]), **calls}, options.rounds, timer)
    except Exception as error:
        missing(report, SECTION, str(step), "failed", reason(error))
        return
    found = rows(step, 2 * inputs["keys"].nbytes, times)
    report["decode"] += found
    print(table(found))


def time_calls(
    calls: dict[str, Callable[[], object]], rounds: int, timer: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    """Milliseconds of every call, one number per round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for name in interleaved(calls, rounds):
        times[name].append(timer(calls[name]))
    return times


def rows(step: Step, copied: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The copy and every decay; ratio_to_copy compares bytes per second.

    Args:
        copied: bytes that the copy reads and writes.
        times: milliseconds per round, by decay or "copy".
    """
    result = []
    for name, values in times.items():
        ms, ms_range = spread(values)
        moved = copied if name == COPY else step.bytes_read(name.removesuffix(PAGED))
        copy_speed = copied / spread(times[COPY])[0] / 1e6
        result.append(
            asdict(step) | {
                "decay": name, "bytes": moved, "ms": ms, "ms_range": ms_range,
                "gigabytes_per_second": moved / ms / 1e6,
                "gigabytes_per_second_range": [moved / bound / 1e6 for bound in reversed(ms_range)],
                "ratio_to_copy": moved / ms / 1e6 / copy_speed,
            }
        )
    return result


def table(found: list[dict[str, Any]]) -> str:
    """A line per row."""
    lines = [f"  {'':16}{'ms':>10} {'[range]':>19} {'GB/s':>8} {'/copy':>7}"]
    for row in found:
        low, high = row["ms_range"]
        speed = f"{row['gigabytes_per_second']:8.1f} {row['ratio_to_copy']:7.2f}"
        lines.append(f"  {row['decay']:16}{row['ms']:10.3f} {f'[{low:.3f}–{high:.3f}]':>19} {speed}")
    return "\n".join(lines)
