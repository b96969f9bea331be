"""Calls of every backend, compared with float64 in processes of their own, and the time of one of them."""

import contextlib
import math
import multiprocessing
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from decayattn import compatibility, decay_attention, visited_fraction
from decayattn.backends import registry
from decayattn.nn.cache import DecayCache
from decayattn.problem import BackendName
from decayattn.testing import Comparison, verify_attention, verify_attention_varlen
from decayattn.testing.call import ratio

# spawned: a forked process cannot use a GPU that its parent has touched
CONTEXT = multiprocessing.get_context("spawn")
# B, T, H of the timed call, which is judged, too; it skips no keys, so that SDPA does the same work
TIMED_SHAPE = (4, 4096, 16)
KINDS = {
    "dense": "decay per token",
    "timed": "decay per token, as timed",
    "packed": "growth and resets, packed",
    "constant": "constant decay, two-sided window, sink",
    "plan": "strong decay, far keys skipped",
    "cache": "decay per token, DecayCache",
}


@dataclass(frozen=True)
class Case:
    """Judged call of one of `KINDS`: grouped queries and an odd length, but not if timed."""

    backend: BackendName
    kind: str
    dtype: torch.dtype
    head_dim: int
    length: int = 301
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2

    @property
    def name(self) -> str:
        return f"{str(self.dtype)[6:]} D{self.head_dim} T{self.length}, {KINDS[self.kind]}"

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator(device).manual_seed(0)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator, device=device)

        tokens = self.batch, self.length
        q, k, v = (
            torch.randn(*tokens, heads, self.head_dim, generator=generator, dtype=self.dtype, device=device)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        if self.kind == "constant":
            return q, k, v, -0.2 * uniform(self.heads)
        if self.kind == "packed":
            log_decay = 0.1 - 0.4 * uniform(*tokens, self.heads)
            return q, k, v, log_decay.masked_fill(uniform(*tokens, self.heads) < 0.02, -math.inf)
        return q, k, v, {"plan": -1.0, "timed": -0.02}.get(self.kind, -0.2) * uniform(*tokens, self.heads)

    def compare(self, device: torch.device) -> list[Comparison]:
        """Compare every result of the call with its error budget."""
        q, k, v, log_decay = self.inputs(device)
        if self.kind == "packed":
            ends = [0, self.length // 3, self.length // 3, self.length // 2, self.length]  # the second one is empty
            cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
            return verify_attention_varlen(
                q[0], k[0], v[0], log_decay[0], cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, backend=self.backend
            )
        if self.kind == "cache":
            return verify_attention(q[:, -1:], k, v, log_decay, attend=self.attend_by_cache)[:1]
        options: dict[str, Any] = {}
        if self.kind == "constant":
            options = {"causal": False, "window_size": (self.length // 2, self.length // 4)}
            options |= {"sink": torch.linspace(-1, 1, self.heads, device=device)}
        if self.kind == "timed":
            options = {"heads": [(self.batch - 1, self.heads - 1)], "skip_tolerance": None}  # one head: float64 is slow
        if self.kind == "plan" and bool((visited_fraction(q, k, log_decay) == 1).any()):
            raise ArithmeticError("expected skipped keys, because most have nearly no weight, got none")
        return verify_attention(q, k, v, log_decay, backend=self.backend, **options)

    def attend_by_cache(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The newest token's output from a cache that holds the others; lse and gradients are the reference's."""
        out, lse = decay_attention(q, k, v, log_decay, **options | {"backend": "reference"})
        with torch.no_grad():
            cache = DecayCache(
                self.batch, self.length, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
                device=q.device, dtype=q.dtype,
            )
            cache.append(k[:, :-1], v[:, :-1], log_decay[:, :-1])
            decoded = cache.attend(q, k[:, -1:], v[:, -1:], log_decay[:, -1:], backend=self.backend)
        return out + (decoded - out).detach(), lse


def cases(device: torch.device, unchecked: Iterable[str] = ()) -> dict[str, list[Case]]:
    """Cases of each checked backend. On a GPU every case compiles its own kernels, for about 10 s on one core."""
    # the fast 16-bit dtype of a GPU is bfloat16 from capability 8.0 on
    old = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    f16, f32, fast = torch.float16, torch.float32, torch.float16 if old else torch.bfloat16
    found: dict[str, list[Case]] = {}
    for name in [name for name in registry.AUTOMATIC if name not in unchecked]:
        if device.type == "cpu":
            found[name] = [
                *(Case(name, kind, f32, 24, 70, 1, 2, 1) for kind in ("dense", "constant")),
                *(Case(name, kind, f16, 64, 70, 1, 2, 1) for kind in ("packed", "cache")),
                Case(name, "plan", f32, 16, 700, 1, 1, 1),
            ]
            continue
        batch, length, heads = TIMED_SHAPE
        timed, dense = Case(name, "timed", fast, 128, length, batch, heads, heads), Case(name, "dense", fast, 128)
        other = f16 if name == "hopper" else f32  # Hopper's kernels take 16 bits
        found[name] = [
            dense if found else timed, Case(name, "packed", f16, 64), Case(name, "constant", other, 128),
            Case(name, "plan", other, 64, 700), *[Case(name, "cache", fast, 128)] * (name == "triton"),
        ]
    return found | {"reference": [Case("reference", kind, f32, 64, 70) for kind in ("dense", "packed", "constant")]}


class Verdict(NamedTuple):
    """Result of a case with the largest fraction of its budget."""

    passed: bool
    fraction: float  # error / budget
    tensor: str
    seconds: float  # including compilation
    fallbacks: tuple[str, ...]  # of the process, as known from its launches so far


def judge(case: Case, device: str) -> Verdict:
    begin = time.perf_counter()
    found = case.compare(torch.device(device))
    worst = max(found, key=lambda comparison: (not comparison.passed, ratio(comparison.error, comparison.budget)))
    if worst.verdict == "cannot tell":
        raise ArithmeticError(f"{worst.name} is no larger than its error budget")
    fraction, fallbacks = ratio(worst.error, worst.budget), (*compatibility.fallbacks(),)
    return Verdict(worst.passed, fraction, worst.name, time.perf_counter() - begin, fallbacks)


def measure(case: Case, device: str) -> list[str]:
    """Times of the forward, and of the forward with all gradients, compared with SDPA without a decay.

    The reason instead where memory is short.
    """
    q, k, v, log_decay = case.inputs(torch.device(device))
    leaves = {
        "decayattn": [x.requires_grad_() for x in (q, k, v, log_decay)],
        "SDPA": [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)],
    }

    def forward(name: str) -> Tensor:
        if name == "SDPA":
            q, k, v = leaves[name]
            return scaled_dot_product_attention(q, k, v, is_causal=True)
        return decay_attention(*leaves[name], skip_tolerance=None, return_lse=True)[0]

    def with_gradients(name: str) -> object:
        out = forward(name)
        return torch.autograd.grad(out, leaves[name], torch.ones_like(out))

    def milliseconds(call: object, name: str) -> float:
        timer = Timer("call(name)", globals={"call": call, "name": name})
        timer.timeit(3)  # compiles
        return 1e3 * timer.blocked_autorange(min_run_time=0.2).median

    parts = []
    with torch.cuda.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that SDPA does not choose
        try:
            for title, call in {"forward": forward, "with gradients": with_gradients}.items():
                ours, theirs = (milliseconds(call, name) for name in leaves)
                parts.append(f"{title} {ours:.3f} ms, {theirs / ours:.2f}x the speed of SDPA without decay")
        except torch.cuda.OutOfMemoryError as error:
            parts.append(f"not timed: {str(error).splitlines()[0]}")
    return parts


def one_line(error: BaseException) -> str:
    """Type of an exception and the most informative line of its message."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if name == "CompilationError" else lines[0]  # Triton prints the source first
    return f"{name}: {text[:200]}" if text else name


class Tasks:
    """Results of function(*task) for every task, in order; a str where it raised, died, or exceeded the time limit.

    The process starts at once. A kernel with an illegal memory access breaks the GPU context of its process, or kills
    the process, so the task after a failure gets a new one.
    """

    def __init__(self, function: Callable[..., Any], tasks: Iterable[tuple], seconds: float = 300.0) -> None:
        self.function, self.tasks, self.seconds = function, list(tasks), seconds
        self.start()

    def start(self) -> None:
        self.connection, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_work, args=(self.function, self.tasks, theirs), daemon=True)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: the parent ends this process
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, handler)
        theirs.close()

    def __iter__(self) -> Iterator[Any]:
        while self.tasks:
            answer = self.receive()
            del self.tasks[0]
            yield answer
            if isinstance(answer, str) and self.tasks:
                self.process.kill()
                self.start()
        self.process.kill()

    def receive(self) -> Any:
        try:
            if not self.connection.poll(self.seconds):
                return f"it took more than {self.seconds:.0f} s"
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with exit status {self.process.exitcode}"


def _work(function: Callable[..., Any], tasks: Iterable[tuple], connection: Any) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # the parent is gone
        for task in tasks:
            try:
                answer = function(*task)
            except Exception as error:
                return connection.send(one_line(error))
            connection.send(answer)
