"""Errors of calls against float64, as fractions of the error budget, for ordinary calls and the timed ones."""

import contextlib
import functools
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decayattn import compatibility, decay_attention_paged, visited_fraction
from decayattn.backends import registry
from decayattn.check.choice import half
from decayattn.check.processes import in_processes
from decayattn.check.text import one_line, row, section, short
from decayattn.nn.cache import DecayCache
from decayattn.problem import AttentionProblem, BackendName
from decayattn.testing import Comparison, verify_attention, verify_attention_varlen
from decayattn.testing.attention import Budget
from decayattn.testing.call import Arguments, Call, bounds_of
from decayattn.testing.table import ratio

# upper bound on the processes that compile and judge on a GPU; memory for each: a CUDA context, and in float64 the
# results of a timed call, their sizes, and one eager evaluation
MOST_PROCESSES = 16
PROCESS_BYTES = 5 * 2**30
# tokens of a page; seconds that one process of a halo waits for the other
_PAGE, _PATIENCE = 16, 120
# B, H and T of the timed calls
TIMED_SHAPE = (4, 16, 4096)
# skip no keys, so that all peers do the same work
TIMED_OPTIONS: dict[str, Any] = {"skip_tolerance": None, "return_lse": True}


@dataclass(frozen=True)
class Case:
    """Small call of grouped queries with an odd length, or a timed call.

    decay is "none" or "constant", or per token: "scalar", "resets" (with growth) or "strong" (far keys are skipped).

    form is one of
    * "dense", "last rows" (fewer queries than keys), "packed" (sequences, one of them empty),
    * "options": a window, a sink, a bias and a scale per row,
    * "decode", "paged": one token for a cache, without gradients,
    * "halo": a sequence in two slices; this process has one of them,
    * "timed": the call of the speed section, with the same kernels. One head is judged.
    """

    dtype: torch.dtype
    head_dim: int
    decay: str = "scalar"
    form: str = "dense"
    causal: bool = True
    value_dim: int | None = None
    length: int = 301
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    rank: int = 0
    store: str = ""  # file by which the two processes of a halo meet

    @property
    def name(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim else "")
        words = [f"{short(self.dtype)} {dims} T{self.length}", _DECAYS[self.decay]]
        words += [self.form] * (self.form != "dense") + ["not causal"] * (not self.causal)
        words += [f"rank {self.rank}"] * (self.form == "halo")
        return ", ".join(words)

    def compare(self, backend: BackendName, device: torch.device) -> list[Comparison]:
        """Compare every result of the call with its budget."""
        if self.form == "halo" and device.type == "cuda":
            device = torch.device("cuda", (device.index + self.rank) % torch.cuda.device_count())
        batch, heads, kv_heads, length = self.batch, self.heads, self.kv_heads, self.length
        value_dim = self.value_dim or self.head_dim
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        q = normal(batch, length, heads, self.head_dim)
        k, v = normal(batch, length, kv_heads, self.head_dim), normal(batch, length, kv_heads, value_dim)
        log_decay = None
        if self.decay == "constant":
            log_decay = -0.2 * uniform(heads)
        elif self.decay in ("scalar", "strong"):
            log_decay = {"scalar": -0.2, "strong": -1.0}[self.decay] * uniform(batch, length, heads)
        elif self.decay == "resets":
            log_decay = 0.1 - 0.4 * uniform(batch, length, heads)
            log_decay[uniform(batch, length, heads) < 0.02] = -math.inf
        given: dict[str, Any] = {"causal": self.causal, "backend": backend}
        if self.form == "decode":
            return _compare_decoding(q, k, v, log_decay, backend)
        if self.form == "paged" and log_decay is not None:
            return _compare_pages(q, k, v, log_decay, backend)
        if self.form == "halo" and log_decay is not None:
            return _compare_halo(self, q, k, v, log_decay, backend)
        if self.form == "packed":
            ends = torch.tensor(
                [0, length // 3, length // 3, length // 2, length], dtype=torch.int32, device=device
            )
            if log_decay is not None and log_decay.ndim > 1:
                log_decay = log_decay[0]
            return verify_attention_varlen(
                q[0], k[0], v[0], log_decay, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=self.causal, backend=backend
            )
        if self.form == "last rows":
            q = q[:, -(length // 3) :]
        if self.form == "options":
            given |= {
                "window_size": (length // 2, 0), "sink": normal(heads, dtype=torch.float32),
                "bias": normal(heads, 1, length), "scale": normal(batch, length, heads, dtype=torch.float32),
            }
        if self.decay == "strong" and bool((visited_fraction(q, k, log_decay) == 1).any()):
            raise ArithmeticError("expected skipped keys, because most have nearly no weight, got none")
        if self.form == "timed":
            last = [(batch - 1, heads - 1)]
            return verify_attention(q, k, v, log_decay, heads=last, **given, **TIMED_OPTIONS)
        return verify_attention(q, k, v, log_decay, **given)


_DECAYS = {
    "none": "no decay",
    "constant": "constant decay",
    "scalar": "decay per token",
    "resets": "growth and resets",
    "strong": "strong decay",
}


def _compare_decoding(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, backend: BackendName
) -> list[Comparison]:
    """The newest token's output from a DecayCache that holds the others, judged as the last row of a call."""
    batch, length, kv_heads, head_dim = k.shape
    cache = DecayCache(
        batch, length, num_heads=q.shape[2], num_kv_heads=kv_heads, head_dim=head_dim, value_dim=v.shape[3],
        device=q.device, dtype=q.dtype,
    )
    past, newest = None, log_decay
    if log_decay is not None and log_decay.ndim == 3:
        past, newest = log_decay[:, :-1], log_decay[:, -1:]
    with torch.no_grad():
        cache.append(k[:, :-1], v[:, :-1], past)
        out = cache.attend(q[:, -1:], k[:, -1:], v[:, -1:], newest, backend=backend)
    return _judged({"out": out}, q[:, -1:], k, v, log_decay)


def _compare_pages(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, backend: BackendName) -> list[Comparison]:
    """_compare_decoding for pages in arbitrary order; the first call fills all slots but one."""
    batch, length = k.shape[:2]
    blocks = -(-length // _PAGE)
    wide = torch.empty(*log_decay.shape, dtype=torch.float64, device=q.device)
    pages = [x.new_zeros(batch * blocks, _PAGE, *x.shape[2:]) for x in (k, v, wide)]
    table = torch.randperm(batch * blocks, device=q.device).int().view(batch, blocks)
    first = torch.zeros(batch, q.shape[2], dtype=torch.int32, device=q.device)
    with torch.no_grad():
        for begin, end in ((0, length - 1), (length - 1, length)):
            new_q, new_k, new_v, rates = (x[:, begin:end] for x in (q, k, v, log_decay))
            out = decay_attention_paged(
                new_q, pages[0], pages[1], rates, k=new_k, v=new_v, alpha_pages=pages[2], first=first, backend=backend,
                block_table=table, cache_seqlens=torch.full((batch,), begin, device=q.device),
            )
    return _judged({"out": out}, q[:, -1:], k, v, log_decay)


def _compare_halo(
    case: Case, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, backend: BackendName
) -> list[Comparison]:
    """Every result of a sequence in two slices; this process has one of them."""
    from decayattn.distributed import context_parallel_attention  # not every build of PyTorch has torch.distributed

    if q.is_cuda:
        torch.cuda.set_device(q.device)
    dist.init_process_group(
        "nccl" if q.is_cuda else "gloo", init_method=f"file://{case.store}", rank=case.rank, world_size=2,
        timeout=timedelta(seconds=_PATIENCE),
    )
    try:
        mine = slice(case.rank * case.length // 2, (case.rank + 1) * case.length // 2)
        leaves = [x[:, mine].detach().requires_grad_() for x in (q, k, v, log_decay)]
        out, lse = context_parallel_attention(*leaves, group=dist.group.WORLD, return_lse=True, backend=backend)
        given = torch.ones_like(out), torch.ones_like(lse)
        own = [out.detach(), lse.detach().mT, *torch.autograd.grad([out, lse], leaves, given)]
        found = {}
        for name, x in zip(("out", "lse", "dq", "dk", "dv", "dlog_decay"), own, strict=True):
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
            dist.all_gather(parts, x.contiguous())
            found[name] = torch.cat(parts, 1)
    finally:
        dist.destroy_process_group()
    return _judged(found | {"lse": found["lse"].mT}, q, k, v, log_decay)


def _judged(found: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None) -> list[Comparison]:
    """Compare results of a causal call, with output gradients of 1, with their budgets."""
    problem = AttentionProblem.of(q, v, log_decay, None, True)
    all_bounds = bounds_of(problem, None)
    pairs = tuple((bounds, head) for bounds in all_bounds for head in range(problem.num_heads))
    grad_out = torch.ones_like(found["out"])
    grad_lse = torch.ones_like(grad_out[..., 0].mT, dtype=problem.accumulator_dtype)
    call = Call(Arguments(q, k, v, log_decay, None, None, None), grad_out, grad_lse, all_bounds, pairs, problem)
    exact = call.oracle()
    return Budget(call, {name: exact[name] for name in found}).judge(found)


def timed(dtype: torch.dtype, head_dim: int, decay: str) -> Case:
    batch, heads, length = TIMED_SHAPE
    return Case(dtype, head_dim, decay, "timed", length=length, batch=batch, heads=heads, kv_heads=heads)


def cases(device: torch.device, unchecked: Iterable[str] = ()) -> list[tuple[BackendName, Case]]:
    """(backend, case) for all cases that the available backends can run.

    On a GPU every case compiles its own kernels; none repeats another's. The longest begin first. The comments give the
    seconds that one core compiles for sm_90 with Triton 3.6.
    """
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    if device.type == "cpu":
        small = functools.partial(Case, length=70, batch=1, heads=2, kv_heads=1)
        interpreted = [
            small(f32, 16, "strong", length=700, heads=1), small(f32, 16, "resets"), small(f16, 64),
            small(f32, 24, "constant", causal=False), small(f32, 16, "none", "last rows"),
            small(f32, 16, "scalar", "options", value_dim=8), small(f16, 64, "resets", "decode"),
            small(f32, 16, "scalar", "paged", length=40),
        ]
        eager = [small(f32, 64, decay) for decay in _DECAYS if decay != "strong"]
        eager += [small(f32, 64, "scalar", causal=False), small(f32, 64, "resets", "packed")]
        here: list[tuple[BackendName, Case]] = [("reference", case) for case in eager]
        here += [("triton", case) for case in interpreted]
        return [(name, case) for name, case in here if name not in unchecked]
    fast = half(device)
    is_timed = next((name for name in registry.AUTOMATIC if name not in unchecked), None)
    on_gpu: list[tuple[BackendName | None, Case]] = [
        (is_timed, timed(fast, 64, "scalar")),  # 12
        ("hopper", Case(f16, 128, "resets", "packed")),  # 12
        ("triton", Case(bf16, 80, "scalar", "options", value_dim=24)),  # 10
        ("hopper", Case(f16, 128, "constant", causal=False)),  # 10
        (is_timed, timed(fast, 128, "scalar")),  # 9
        (is_timed, timed(fast, 64, "none")),  # 9
        ("triton", Case(f32, 64, "strong", length=700)),  # 8
        ("hopper", Case(f16, 64, "strong", length=700)),  # 8
        ("triton", Case(f32, 64, "resets")),  # 8
        (is_timed, timed(fast, 128, "none")),  # 8
        ("triton", Case(f32, 64, "constant", causal=False)),  # 7
        ("triton", Case(bf16, 128, "scalar", causal=False)),  # 6
        ("triton", Case(f16, 128, "resets", "packed")),  # 6
        ("triton", Case(bf16, 256, "scalar")),  # 6
        ("triton", Case(f16, 64, "constant")),  # 4
        ("triton", Case(bf16, 128, "none", "last rows")),  # 4
        ("triton", Case(bf16, 64, "resets")),  # 4
        ("triton", Case(bf16, 128, "scalar", "decode")),  # 1
        ("triton", Case(bf16, 64, "constant", "decode")),  # 1
        ("triton", Case(bf16, 64, "resets", "paged")),  # 1
        ("reference", Case(f32, 64, "resets")),
        ("reference", Case(f32, 64, "constant")),
    ]
    if "halo" not in unchecked:
        store = os.path.join(tempfile.gettempdir(), f"decayattn-{uuid.uuid4().hex}")
        halves = [Case(f16, 64, "strong", "halo", length=700, rank=rank, store=store) for rank in range(2)]
        on_gpu = [*(("triton", half) for half in halves), *on_gpu]
    return [
        (name, case) for name, case in on_gpu
        if name is not None and name not in unchecked and (case.dtype != bf16 or fast == bf16)
    ]


@dataclass(frozen=True)
class Verdict:
    """Result of a case with the largest fraction of its budget."""

    backend: str
    case: Case
    passed: bool = False
    fraction: float = math.nan  # error / budget
    tensor: str = ""
    error: str | None = None
    seconds: float = math.nan  # including compilation
    fallbacks: tuple[str, ...] = ()  # of the process, as known from its launches so far


def judge(backend: BackendName, case: Case, device: str) -> Verdict:
    """Judge one case; any exception becomes an error of the verdict."""

    def closeness(comparison: Comparison) -> tuple[bool, float]:
        fraction = ratio(comparison.error, comparison.budget)
        return not comparison.passed, math.inf if math.isnan(fraction) else fraction

    begin = time.perf_counter()
    found: dict[str, Any]
    try:
        worst = max(case.compare(backend, torch.device(device)), key=closeness)
        if worst.verdict == "cannot tell":
            raise ArithmeticError(f"{worst.name} is no larger than its error budget")
        found = {"passed": worst.passed, "fraction": ratio(worst.error, worst.budget), "tensor": worst.name}
    except Exception as error:
        found = {"error": one_line(error)}
    seconds, fallbacks = time.perf_counter() - begin, (*compatibility.fallbacks(),)
    return Verdict(backend, case, **found, seconds=seconds, fallbacks=fallbacks)


@contextlib.contextmanager
def judging(
    tasks: Sequence[tuple[BackendName, Case]], device: torch.device, processes: int
) -> Iterator[Iterator[Verdict]]:
    """Verdicts on the cases, in order. Several processes start at once; a single one runs each on demand."""
    arguments = [(backend, case, str(device)) for backend, case in tasks]
    if processes == 1:
        yield (judge(*some) for some in arguments)
        return
    with in_processes(judge, arguments, processes) as answers:
        yield (
            Verdict(backend, case, error=found) if isinstance(found, str) else found
            for (backend, case), found in zip(tasks, answers, strict=True)
        )


def no_halo(device: torch.device, processes: int) -> str | None:
    """Reason why no sequence can be split in two here, or None."""
    if device.type != "cuda" or torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        return "it needs two GPUs and NCCL"
    return "it needs two processes" if processes == 1 else None


def default_processes(device: torch.device) -> int:
    """Number of processes. Compilation takes most of the time on a GPU; a CPU runs its tiny cases in this process."""
    if device.type == "cpu":
        return 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    in_memory = torch.cuda.mem_get_info(device)[0] // PROCESS_BYTES
    return max(1, min(MOST_PROCESSES, processors, in_memory))


def report(
    tasks: Sequence[tuple[BackendName, Case]], verdicts: Iterable[Verdict], unchecked: dict[str, str]
) -> tuple[list[str], set[str]]:
    """Print the section; return the faults, and the backends that have them."""
    wrong: list[str] = []
    concerned: set[str] = set()
    fallbacks: dict[str, None] = {}  # ordered
    with section("Errors against float64, as fractions of the error budget (above 1: FAIL)"):
        for name, reason in unchecked.items():
            row(f"{name} is not checked: {reason}")
        widths = (9, max(len(case.name) for _, case in tasks), 7, 6, 10)
        row("backend", "call", "seconds", "worst", "of", widths=widths)
        for verdict in verdicts:
            name, case, seconds = verdict.backend, verdict.case.name, f"{verdict.seconds:7.1f}"
            if verdict.error is not None:
                row(name, case, seconds, "ERROR", verdict.error, widths=widths)
                wrong.append(f"{name}, {case}: {verdict.error}")
            else:
                fraction = f"{verdict.fraction:.2f}"
                row(name, case, seconds, fraction, verdict.tensor, "ok" if verdict.passed else "FAIL", widths=widths)
                if not verdict.passed:
                    wrong.append(f"{name}, {case}: {verdict.tensor} is {fraction} times its error budget")
            if verdict.error is not None or not verdict.passed:
                concerned.add(name)
            fallbacks |= dict.fromkeys(verdict.fallbacks)
    print("Private names of PyTorch and Triton that are not used here")
    for name in fallbacks or ["none"]:
        row(name)
    print(flush=True)
    return wrong, concerned
