"""Base of the benchmarks: cases and inputs, checks against float64, clocks, and a run from options to JSON.

A benchmark is a module with a table of OPTIONS and with measure(run). Its docstring says what its figures mean, and is
part of its report. check_options(options, cuda), if it has that, yields errors.
"""

import contextlib
import os
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shared.options import parser_of
from shared.provenance import ROOT, provenance
from shared.report import resumed, write
from torch import Tensor

from decayattn import decay_attention
from decayattn.nn.decay import alibi_log_decay
from decayattn.testing import Comparison, format_table

DECAYS = ("scalar", "constant", "none")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DIRECTIONS = ("forward", "backward")
# a backward has five matrix products per pair of query and key where a forward has two, all alike if D_v = D
BACKWARD_WORK = 2.5
# part of the help and the report of every benchmark with rounds
COMMON = """
A result of ours outside its error budget gets no speed, and the exit status is 1. Rounds of all calls are interleaved;
figures are medians over the rounds, with their range. Without a GPU kernels have no speeds: they run in Triton's
interpreter on small shapes, for their errors.
"""
# float64 scores of the oracle (0.5 GB): of longer sequences it takes the last rows only
ORACLE_SCORES = 2**26


class Absent(Exception):
    """A peer cannot run a case here; the message is the reason."""


def reason(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


@dataclass(frozen=True)
class Case:
    """One self-attention problem; decay is "scalar", "constant" or "none" as in decay_attention.

    deviation: that of the logits, q·k / √D. value_dim: D_v; None for D. row_scales: one for every row, which only ours
    take. kv_heads: H_kv; None for H. rates: "uniform" around the mean, "alibi", or "none to speak of", −10⁻⁶.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    decay: str
    mean_log_decay: float
    causal: bool = True
    deviation: float = 1.0
    value_dim: int | None = None
    row_scales: bool = False
    kv_heads: int | None = None
    rates: str = "uniform"

    def __str__(self) -> str:
        more = "" if self.value_dim is None else f" D_v{self.value_dim}"
        more += "" if self.causal else ", not causal"
        more += ", a scale per row" if self.row_scales else ""
        more += "" if self.deviation == 1 else f", logits of deviation {self.deviation:g}"
        more += "" if self.rates == "uniform" else f", {self.rates}"
        return f"B{self.batch} H{self.heads} T{self.length} D{self.head_dim} {self.dtype}, decay {self.decay}{more}"

    def tflops(self, direction: str, milliseconds: float) -> float:
        """TFLOP/s of 2·B·H·T²·(D + D_v) operations forward, 2·B·H·T²·(3 D + 2 D_v) backward, half of that if causal."""
        pairs = self.length**2 / 2 if self.causal else self.length**2
        value_dim = self.value_dim or self.head_dim
        products = 3 * self.head_dim + 2 * value_dim if direction == "backward" else self.head_dim + value_dim
        return 2 * self.batch * self.heads * pairs * products / milliseconds / 1e9

    def inputs(self, device: str, seed: int) -> dict[str, Tensor]:
        """q, grad_out (B, T, H, ·), k, v (B, T, H_kv, ·), normal, and log_decay unless the case has none.

        Scalar log-decays (B, T, H) are uniform in [2m, 0], m the case's mean; constant ones (H,) spread evenly over
        that interval. Scales of rows (B, T, H) are uniform in [½, 1½] / √D.
        """
        generator = torch.Generator(device).manual_seed(seed)
        shape, heads, kv_heads = (self.batch, self.length), self.heads, self.kv_heads or self.heads
        size, value_dim = self.deviation**0.5, self.value_dim or self.head_dim
        found = {
            name: (size * torch.randn(*shape, *rest, generator=generator, device=device)).to(DTYPES[self.dtype])
            for name, size, rest in (("q", size, (heads, self.head_dim)), ("k", size, (kv_heads, self.head_dim)),
                                     ("v", 1.0, (kv_heads, value_dim)), ("grad_out", 1.0, (heads, value_dim)))
        }
        if self.rates == "alibi":
            found["log_decay"] = torch.tensor(alibi_log_decay(heads), device=device)
        elif self.decay == "scalar":
            uniform = torch.rand(*shape, heads, generator=generator, device=device)
            weak = self.rates == "none to speak of"
            found["log_decay"] = torch.full_like(uniform, -1e-6) if weak else 2 * self.mean_log_decay * uniform
        elif self.decay == "constant":
            found["log_decay"] = 2 * self.mean_log_decay * (torch.arange(heads, device=device) + 0.5) / heads
        if self.row_scales:
            uniform = torch.rand(*shape, heads, generator=generator, device=device)
            found["scale"] = (uniform + 0.5) / self.head_dim**0.5
        return found


@dataclass
class Prepared:
    """A call for one case with its tensors in its own layout; those in `wanted` require a gradient."""

    attend: Callable[..., Tensor]
    tensors: dict[str, Tensor]
    wanted: dict[str, Tensor]
    grad_out: Tensor
    layout: str = "BTHD"
    deterministic: bool = False  # torch.use_deterministic_algorithms, which every call sets

    def forward(self) -> Tensor:
        """One forward call as in training: the graph is built, outputs are allocated."""
        torch.use_deterministic_algorithms(self.deterministic)
        scale = {"scale": self.tensors["scale"]} if "scale" in self.tensors else {}
        return self.attend(*(self.tensors.get(name) for name in ("q", "k", "v", "log_decay")), **scale)

    def backward(self, out: Tensor, grad_out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Every gradient of that call, fresh tensors; the graph stays for the next one."""
        torch.use_deterministic_algorithms(self.deterministic)
        grad_out = self.grad_out if grad_out is None else grad_out
        return torch.autograd.grad(out, list(self.wanted.values()), grad_out, retain_graph=True)

    def parts(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """The calls to time, by direction."""
        yield "forward", self.forward
        out = self.forward()
        yield "backward", lambda: self.backward(out)


def prepare(
    attend: Callable[..., Tensor], inputs: dict[str, Tensor], layout: str = "BTHD", fixed: Sequence[str] = ()
) -> Prepared:
    """A call on leaves of its own, which require gradients unless they are `fixed`."""
    tensors = {name: in_layout(x, layout).contiguous().detach() for name, x in inputs.items()}
    grad_out = tensors.pop("grad_out")
    wanted = {name: x.requires_grad_() for name, x in tensors.items() if name not in fixed}
    return Prepared(attend, tensors, wanted, grad_out, layout)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """A tensor of the contract's layout (B, T, H, …) as a view in `layout`, and back: the two are their own inverse."""
    return x.transpose(1, 2) if layout == "BHTD" and x.ndim > 1 else x


def oracle_rows(case: Case) -> int:
    """Number of last rows of a sequence that the oracle evaluates."""
    return min(case.length, max(1, ORACLE_SCORES // case.length))


def oracle(case: Case, inputs: dict[str, Tensor], decay: bool, row_scales: bool = True) -> dict[str, Tensor]:
    """Out and every gradient in float64 for the last rows of the last head of the last batch entry. The other rows have
    output gradient 0, which makes the gradients of k, v and log_decay exact for all keys."""
    rows = oracle_rows(case)
    names = ["q", "k", "v", *["log_decay"] * decay, *["scale"] * row_scales]
    leaves = {}
    for name in (name for name in names if name in inputs):
        x = inputs[name].double()
        leaves[name] = (x[-1:] if x.ndim == 1 else x[-1:, :, -1:]).requires_grad_()
    scale = leaves.get("scale")
    out = decay_attention(
        leaves["q"][:, -rows:], leaves["k"], leaves["v"], leaves.get("log_decay"), causal=case.causal,
        scale=None if scale is None else scale[:, -rows:], backend="reference",
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs["grad_out"][-1:, -rows:, -1:].double())
    result = {f"d{name}": gradient.flatten() for name, gradient in zip(leaves, gradients, strict=True)}
    return {"out": out.detach().flatten()} | result


def relative_errors(case: Case, prepared: Prepared, expected: dict[str, Tensor]) -> dict[str, float]:
    """‖x − x64‖ / ‖x64‖ of out and of every gradient that the peer has, where the oracle has looked."""
    rows = oracle_rows(case)
    out = prepared.forward()
    grad_out = torch.zeros_like(prepared.grad_out)
    checked = in_layout(grad_out, prepared.layout)[-1:, -rows:]
    checked.copy_(in_layout(prepared.grad_out, prepared.layout)[-1:, -rows:])
    gradients = prepared.backward(out, grad_out)
    results = {"out": in_layout(out.detach(), prepared.layout)[-1, -rows:, -1]}
    for name, gradient in zip(prepared.wanted, gradients, strict=True):
        gradient = in_layout(gradient, prepared.layout)
        results[f"d{name}"] = gradient[-1:] if gradient.ndim == 1 else gradient[-1, :, -1]
    return {
        name: float((x.double().flatten() - expected[name]).norm() / expected[name].norm())
        for name, x in results.items()
    }


# milliseconds of a call
Timer = Callable[[Callable[[], object]], float]
_CACHE = 1 << 28  # bytes, more than any L2 cache has
_CAPTURED = 8  # calls of a graph: between two graphs the device waits a few microseconds
_HEAD_START = 30_000_000  # clock cycles: 15 ms of an H200


def burst_timer(seconds: float) -> Timer:
    """Median of calls that together take `seconds`, by CUDA events, the L2 cache cleared before each. The device sleeps
    first, so that the host is ahead of it."""

    def timer(call: Callable[[], object]) -> float:
        each = statistics.median(_milliseconds(call, 5, asleep=0))
        _milliseconds(call, max(1, int(seconds * 1e3 / 3 / each)), asleep=0)
        return statistics.median(_milliseconds(call, max(1, int(seconds * 1e3 / each)), asleep=_HEAD_START))

    return timer


def sustained_timer(seconds: float) -> Timer:
    """Mean of calls back to back, as in training: as many as fill `seconds`, after a quarter of them."""

    def timer(call: Callable[[], object]) -> float:
        each = back_to_back(call, 3)
        count = max(3, int(seconds * 1e3 / each))
        back_to_back(call, max(2, count // 4))
        return back_to_back(call, count)

    return timer


def captured_timer(seconds: float) -> Timer:
    """The same of CUDA graphs that replay calls, without the host. It captures on the current stream, which may not be
    the default one."""
    sustained = sustained_timer(seconds)

    def timer(call: Callable[[], object]) -> float:
        call()  # compiled, and its workspaces allocated, before the capture
        return sustained(captured(call, _CAPTURED, torch.cuda.current_stream()).replay) / _CAPTURED

    return timer


def captured(call: Callable[[], object], copies: int = 1, stream: Any = None) -> Any:
    """A CUDA graph of `copies` calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(copies):
            call()
    return graph


def clock(call: Callable[[], object], count: int, wait: bool = True) -> float:
    """Seconds of `count` calls, all work of the device included if it is waited for."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronise()
    start = time.perf_counter()
    for _ in range(count):
        call()
    returned = time.perf_counter()
    synchronise()
    return (time.perf_counter() if wait else returned) - start


def back_to_back(call: Callable[[], object], count: int) -> float:
    """Milliseconds per call of `count` calls, between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def _milliseconds(call: Callable[[], object], count: int, asleep: int) -> list[float]:
    """Times of `count` calls, after the device has slept for `asleep` clock cycles."""
    cache = torch.empty(_CACHE, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    torch.cuda._sleep(asleep)
    for begin, end in events:
        cache.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def interleaved(names: Iterable[str], rounds: int) -> Iterator[str]:
    """The names, round by round, so that a drifting clock meets all alike. The second round is in reverse, later ones
    in random orders: a call also finds the clock that the one before it left."""
    order, generator = list(names), random.Random(0)
    for number in range(rounds):
        yield from order
        generator.shuffle(order) if number else order.reverse()


# by name and part (a direction, say), the figures of every round
Timings = dict[tuple[str, str], list[float]]
Parts = Callable[[], Iterable[tuple[str, Callable[[], Any]]]]


def spread(values: Sequence[float], name: str = "ms") -> dict[str, Any]:
    """Entries of a row: the median under `name`, and [least, largest] under `name`_range."""
    return {name: statistics.median(values), f"{name}_range": [min(values), max(values)]}


def machine() -> tuple[str, bool]:
    """(device, True where kernels are timed). Without a GPU they run in Triton's interpreter, for their errors."""
    if torch.cuda.is_available():
        return "cuda", True
    os.environ.setdefault("TRITON_INTERPRET", "1")  # in time: decayattn imports Triton when a kernel is first asked for
    return "cpu", False


class Run:
    """A benchmark at work: its options, where it runs, and the report that it fills, which is written as it grows."""

    def __init__(self, script: str, options: Namespace, argv: list[str], method: str | None):
        self.options = options
        self.device, self.timed = machine()
        self.report: dict[str, Any] = provenance(script, argv)
        self.report |= {"method": method, "rounds": getattr(options, "rounds", None)}
        self.report |= {"checks": [], "missing": [], "rows": []}

    def add(self, rows: Iterable[dict[str, Any]], label: str, columns: Sequence[str], to: str = "rows") -> None:
        """Add rows to the report, write it, and print them as a table."""
        found = list(rows)
        self.report[to] += found
        self.save()
        print(table(found, label, columns), flush=True)

    def resume(self, **setup: Any) -> None:
        """Go on with the report of an earlier call with the same code, machine and setup, if there is one."""
        self.report = resumed(self.report | {"setup": setup}, self.options.output)

    def missing(self, kind: str, why: str, ours: bool = True, **where: str) -> None:
        """Record the reason for a missing figure; kind is "wrong", "failed" or "absent"."""
        self.report["missing"].append(where | {"ours": ours, "kind": kind, "reason": why})
        print(f"  {', '.join(map(str, where.values()))}: {kind}: {why}", flush=True)

    @contextlib.contextmanager
    def attempt(self, **where: Any) -> Iterator[None]:
        """Record an exception: the others go on, and one of ours fails the run."""
        try:
            yield
        except Absent as error:
            self.missing("absent", str(error), **where)
        except Exception as error:
            self.missing("failed", reason(error), **where)

    def time(
        self, calls: dict[str, Parts], timer: Callable[[Any], float], rounds: int | None = None,
        where: dict[str, dict[str, Any]] | None = None,
    ) -> Timings:
        """Time the parts of all calls in interleaved rounds; only one call's parts, and their graph, are alive at a
        time. where: arguments of `missing` by a call's name; the others go on after one fails. With None it raises."""
        timings: Timings = {}
        failed: set[str] = set()
        for name in interleaved(calls, rounds or self.options.rounds):
            if name in failed:
                continue
            try:
                for part, call in calls[name]():
                    timings.setdefault((name, part), []).append(timer(call))
            except Exception as error:  # out of memory, say
                if where is None:
                    raise
                failed.add(name)
                self.missing("failed", reason(error), **where[name])
        return {key: figures for key, figures in timings.items() if key[0] not in failed}

    def passed(self, comparisons: Sequence[Comparison], **where: Any) -> bool:
        """Record a check; a result outside its error budget gets no speed."""
        outside = [c.name for c in comparisons if not c.passed]
        return self.right(outside, format_table(comparisons).splitlines(), **where)

    def right(self, outside: Sequence[str], table: list[str], ours: bool = True, **where: str) -> bool:
        """Record a check with these tensors outside of the error budget."""
        self.report["checks"].append(where | {"table": table})
        if outside:
            print("\n".join(table))
            why = f"{', '.join(outside)} outside the error budget: no speed is reported"
            self.missing("wrong", why, ours, **where)
        else:
            print(f"  {', '.join(where.values())}: within the error budget", flush=True)
        return not outside

    def save(self) -> None:
        """Write the report; a run that is cut off keeps its rows."""
        if self.options.output:
            write(self.report, self.options.output)


def method(module: Any) -> str:
    return module.__doc__ + COMMON * ("rounds" in module.OPTIONS)


def parse(module: Any, argv: Sequence[str]) -> Namespace:
    """The options of a benchmark, defaults filled in for this machine."""
    cuda = machine()[0] == "cuda"
    parser = parser_of(method(module), module.OPTIONS | {"seed": (0, 0, "seed of all random numbers", int)}, cuda)
    options = parser.parse_args(argv)
    if getattr(options, "dtype", None) == "bfloat16" and not cuda:
        parser.error("--dtype: expected float16 or float32, got bfloat16: Triton's interpreter multiplies it wrongly")
    for name in ("ranks", "devices"):
        if cuda and getattr(options, name, 0) > torch.cuda.device_count():
            parser.error(f"--{name}: expected at most {torch.cuda.device_count()}, the GPUs of this machine")
    for wrong in getattr(module, "check_options", lambda *_: ())(options, cuda):
        parser.error(wrong)
    return options


def main(module: Any, argv: Sequence[str] | None = None) -> int:
    """Run a benchmark. The exit status is 1 if a result of ours is wrong or fails, 2 for a bad option."""
    argv = sys.argv[1:] if argv is None else list(argv)
    return run_all(module, parse(module, argv), argv)


def run_all(module: Any, options: Namespace, argv: list[str]) -> int:
    """The measurement and its report; the exit status."""
    run = Run(str(Path(module.__file__).resolve().relative_to(ROOT)), options, argv, method(module))
    if not run.timed and run.report["rounds"]:
        print("No GPU, so no speeds of kernels: their errors in Triton's interpreter.")
    print(" · ".join(f"{key} {run.report[key]}" for key in ("gpu", "driver", "torch", "triton", "commit")), flush=True)
    module.measure(run)
    run.save()
    if options.output:
        print(f"\nwrote {options.output}")
    failed = any(entry["ours"] for entry in run.report["missing"])
    print("FAILED" if failed else "nothing failed")
    return int(failed)


def table(rows: Iterable[dict[str, Any]], label: str, columns: Sequence[str]) -> str:
    """A line per row for a terminal, which begins with `label`, a format of entries. None and entries that a row lacks
    are dashes, other numbers have four digits."""

    def said(x: Any) -> str:
        return "–" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x)

    return "\n".join(
        f"  {label.format(**row)}: " + ", ".join(f"{key} {said(row.get(key))}" for key in columns) for row in rows
    )


DTYPE = ("bfloat16", "float32", "dtype of q, k, v", DTYPES)


def output(name: str) -> tuple:
    """Option of the JSON file, in results/ on a GPU."""
    return ROOT / "results" / name, None, "JSON file; None: printed only", Path
