"""`python -m decayattn.check`: is decayattn right and fast on this machine? What it prints is to be pasted into issues.

Its sections are functions that return data, printed line by line as it comes: the versions; which backend takes an
ordinary call, and why not a faster one; errors of small calls against float64, as fractions of the error budget
(`decayattn.testing`); for which private names of PyTorch and Triton public ones had to stand in meanwhile; times beside
other attention kernels. Whatever is wrong is repeated at the end.

Exit status: 0 if everything is right, 1 if anything is wrong (a budget exceeded, a kernel that fails, a backend that
cannot be imported), 2 for a wrong option, 130 if interrupted.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import multiprocessing
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from decayattn import backends, compatibility, decay_attention
from decayattn.nn.cache import DecayCache
from decayattn.problem import AttentionProblem
from decayattn.testing import Comparison, verify_attention, verify_attention_varlen
from decayattn.testing.attention import DRAWS, INPUTS, Call, places_of
from decayattn.testing.table import ratio

# processes that compile and judge at once on a GPU, and memory for the CUDA context of each
MOST_PROCESSES = 16
CONTEXT_BYTES = 2**30
# after which a case hangs
CASE_SECONDS = 300.0
# of the times: rounds over all kernels, and how long each of them runs in a round
ROUNDS, ROUND_MILLISECONDS = 7, 20.0
# B, H and T of the timed calls
TIMED_SHAPE = (4, 16, 4096)

# other names that a package is published by
_PUBLISHED_AS = {"triton": ("triton-rocm", "pytorch-triton-rocm", "triton-windows")}
_NOT_INSTALLED = "not installed"


# Versions


def versions(device: torch.device) -> list[tuple[str, str]]:
    """What a defect may depend on: (name, version) of the software, then the GPUs."""
    numpy = [("numpy", _version("numpy"))] if device.type == "cpu" else []  # the interpreter is made of it
    return [
        ("decayattn", _version("decayattn")),
        ("torch", f"{torch.__version__} ({_torch_build()})"),
        ("Triton", _version("triton")),
        *numpy,
        ("Python", platform.python_version()),
        ("OS", platform.platform()),
        ("driver", _driver()),
        *(("GPU", text) for text in _gpus()),
    ]


def _version(package: str) -> str:
    for name in (package, *_PUBLISHED_AS.get(package, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name) + ("" if name == package else f" ({name})")
    return _NOT_INSTALLED


def _torch_build() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is None:
        return "without CUDA"
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return f"CUDA {torch.version.cuda}, cuDNN {cudnn}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "no nvidia-smi, or it fails"


def _gpus() -> list[str]:
    """A line for each kind of GPU."""
    if not torch.cuda.is_available():
        return ["none that torch can use"]
    kinds: collections.Counter[str] = collections.Counter()
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = getattr(gpu, "gcnArchName", None) or f"{gpu.major}.{gpu.minor}"
        kinds[f"{gpu.name}, capability {capability}, {gpu.total_memory / 2**30:.1f} GiB"] += 1
    return [f"{count} x {kind}" for kind, count in kinds.items()]


# Backends


def missing_backends() -> dict[str, str]:
    """The kernel backends that cannot be imported, and why."""
    missing = {}
    for name in backends.KERNELS:
        try:
            found = backends.load(name)
        except Exception as error:
            found = one_line(error)
        if isinstance(found, str):
            missing[name] = found
    return missing


def triton_belongs_here(device: torch.device) -> bool:
    """Whether a machine without Triton is wrong: where there is a GPU, and where decayattn requires it."""
    return device.type == "cuda" or sys.platform == "linux"


def enable_interpreter(device: torch.device) -> None:
    """Have Triton interpret its kernels on a CPU, where it can: a program may ask for that before it imports Triton."""
    if device.type == "cpu" and "triton" not in sys.modules and _interpreter_is_broken() is None:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpreter_is_broken() -> str | None:
    if importlib.util.find_spec("numpy") is None:
        return "Triton's interpreter needs numpy, which is not installed"
    if _release(_version("triton")) < (3, 7) and _release(_version("numpy")) >= (2, 4):
        return "Triton before 3.7 cannot interpret loops with numpy 2.4 or later"
    return None


def unchecked_backends(device: torch.device, missing: dict[str, str]) -> dict[str, str]:
    """The kernel backends that cannot be judged here, and why."""
    if (reason := interpreted_on_a_gpu(device)) is not None:
        return dict.fromkeys(backends.KERNELS, reason)
    unchecked = dict(missing)
    for name in backends.KERNELS:
        if name not in missing:
            broken = _interpreter_is_broken() if (name, device.type) == ("triton", "cpu") else None
            # the interpreter takes no bfloat16, "hopper" nothing but 16 bits
            reason = broken or backends.load(name).refusal(torch.float16, device)
            unchecked |= {} if reason is None else {name: reason}
    return unchecked


def _release(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(int(number) for number in version.split(".")[:2] if number.isdigit())


def interpreted_on_a_gpu(device: torch.device) -> str | None:
    """What is wrong where the kernels of a GPU would be interpreted."""
    triton = sys.modules.get("triton")
    if device.type != "cuda" or triton is None or not triton.knobs.runtime.interpret:
        return None
    return "TRITON_INTERPRET is set: on a GPU, too, Triton would interpret its kernels instead of compiling them"


@dataclass(frozen=True)
class Choice:
    """What an ordinary call runs on, and why not on what would be faster."""

    call: str
    backend: str
    reasons: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class OrdinaryCall:
    name: str
    dtype: torch.dtype
    head_dim: int = 64
    query_length: int = 1024
    key_length: int = 1024
    bias: bool = False
    cache: bool = False  # one new token for a DecayCache

    def choose(self, device: torch.device) -> Choice:
        """What "auto" does with the call, causal and with a decay per token."""
        batch, heads = 2, 8
        q, k, v = (
            torch.empty(batch, length, heads, self.head_dim, dtype=self.dtype, device=device)
            for length in (self.query_length, self.key_length, self.key_length)
        )
        log_decay = torch.empty(batch, self.key_length, heads, device=device)
        bias = torch.empty(1, heads, 1, self.key_length, device=device) if self.bias else None
        problem = AttentionProblem.of(q, v, log_decay, None, True, bias=bias)
        scale = self.head_dim**-0.5
        chosen = backends.select(problem, "auto")
        if chosen == "auto":
            chosen = "triton" if self.cache else backends.resolve(problem, "auto", q, k, v, scale)
        names = (*backends.AUTOMATIC, "reference")
        reasons = [f"{name}: {self._why_not(name, problem, q, k, v, scale)}" for name in names[: names.index(chosen)]]
        return Choice(self.name, chosen, tuple(reasons))

    def _why_not(self, name: str, problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, scale: float) -> str:
        """Why "auto" does not take the backend, which is faster than what it takes."""
        loaded = backends.load(name)
        if isinstance(loaded, str):
            return loaded
        if problem.device.type == "cpu" and name == "triton":
            return "on a CPU it can only be interpreted, which is for debugging"
        reason = backends.refusal(problem, name)
        if reason is None and self.cache:
            return "every cache is decoded by the kernels of triton"
        return reason or loaded.misfit(problem, q, k, v, scale) or "it is slower for so few tokens"


def half(device: torch.device) -> torch.dtype:
    """The 16-bit dtype that a GPU computes fast: bfloat16 from capability 8.0 on."""
    old = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def ordinary_calls(device: torch.device) -> list[OrdinaryCall]:
    dtype = half(device)
    name = _short(dtype)
    return [
        OrdinaryCall(f"{name} D64", dtype),
        OrdinaryCall(f"{name} D128", dtype, 128),
        OrdinaryCall(f"{name} D256", dtype, 256),
        OrdinaryCall(f"{name} D64, T 256", dtype, 64, 256, 256),
        OrdinaryCall(f"{name} D64, with a bias", dtype, bias=True),
        OrdinaryCall("float32 D64", torch.float32),
        OrdinaryCall(f"{name} D64, 1 query of 4096 keys", dtype, 64, 1, 4096),
        OrdinaryCall(f"{name} D64, 1 token, DecayCache", dtype, 64, 1, 4096, cache=True),
    ]


def choices(device: torch.device) -> Iterator[Choice]:
    for call in ordinary_calls(device):
        try:
            yield call.choose(device)
        except Exception as error:
            yield Choice(call.name, "", error=one_line(error))


# Errors


@dataclass(frozen=True)
class Case:
    """A small call of grouped queries, of a length that divides nothing.

    decay is "none", "constant", "scalar" (one per token), or "resets": one per token that resets and grows.
    form is "dense", "last rows" (fewer queries than keys), "packed" (sequences, one of them empty), "options" (a
    window, a sink, a bias and a scale per row) or "decode" (one token for a cache: no gradient).
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

    @property
    def name(self) -> str:
        dims = f"D{self.head_dim}" + (f"/{self.value_dim}" if self.value_dim else "")
        words = [f"{_short(self.dtype)} {dims} T{self.length}", _DECAYS[self.decay]]
        words += [self.form] * (self.form != "dense") + ["not causal"] * (not self.causal)
        return ", ".join(words)

    def compare(self, backend: str, device: torch.device) -> list[Comparison]:
        """Every result of the call against its budget."""
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
        elif self.decay == "scalar":
            log_decay = -0.2 * uniform(batch, length, heads)
        elif self.decay == "resets":
            log_decay = 0.1 - 0.4 * uniform(batch, length, heads)
            log_decay[uniform(batch, length, heads) < 0.02] = -math.inf
        given = {"causal": self.causal, "backend": backend}
        if self.form == "decode":
            return _compare_decoding(q[:, -1:], k, v, log_decay, backend)
        if self.form == "packed":
            ends = [0, length // 3, length // 3, length // 2, length]
            ends = torch.tensor(ends, dtype=torch.int32, device=device)
            packed = (x[0] if x is not None and x.ndim > 1 else x for x in (q, k, v, log_decay))
            return verify_attention_varlen(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends, **given)
        if self.form == "last rows":
            q = q[:, -(length // 3) :]
        if self.form == "options":
            given |= {
                "window_size": (length // 2, 0), "sink": normal(heads, dtype=torch.float32),
                "bias": normal(heads, 1, length), "scale": normal(batch, length, heads, dtype=torch.float32),
            }  # fmt: skip
        return verify_attention(q, k, v, log_decay, **given)


_DECAYS = {
    "none": "no decay",
    "constant": "constant decay",
    "scalar": "decay per token",
    "resets": "growth and resets",
}


def _compare_decoding(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, backend: str) -> list[Comparison]:
    """The newest token's output by a DecayCache that holds the others, judged as the last row of a call."""
    batch, length, kv_heads, head_dim = k.shape
    cache = DecayCache(
        batch, length, num_heads=q.shape[2], num_kv_heads=kv_heads, head_dim=head_dim, value_dim=v.shape[3],
        device=q.device, dtype=q.dtype,
    )  # fmt: skip
    per_token = log_decay is not None and log_decay.ndim == 3
    with torch.no_grad():
        cache.append(k[:, :-1], v[:, :-1], log_decay[:, :-1] if per_token else None)
        newest = log_decay[:, -1:] if per_token else log_decay
        out = cache.attend(q, k[:, -1:], v[:, -1:], newest, backend=backend)
    problem = AttentionProblem.of(q, v, log_decay, None, True)
    places = places_of(problem, None)
    pairs = tuple((place, head) for place in places for head in range(problem.num_heads))
    grad_lse = torch.zeros_like(out[..., 0].transpose(1, 2), dtype=problem.accumulator_dtype)
    inputs = dict(zip(INPUTS, (q, k, v, log_decay, None, None, None), strict=True))
    call = Call(inputs, torch.zeros_like(out), grad_lse, places, pairs, problem)
    exact, size = call.oracle()["out"], call.sizes()["out"]
    eager_error = torch.stack([call.distance("out", call.draw(factor)["out"], exact) for factor in DRAWS]).amax(0)
    return [call.compare("out", out, exact, eager_error, size)]


def cases(device: torch.device) -> list[tuple[str, Case]]:
    """(backend, case) of all that is judged; what takes longest to compile comes first."""
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    if device.type == "cpu":
        small = functools.partial(Case, length=70, batch=1, heads=2, kv_heads=1)
        interpreted = [
            small(f32, 16), small(f32, 16, "resets"), small(f16, 64), small(f32, 24, "constant", causal=False),
            small(f32, 16, "none", "last rows"), small(f32, 16, "scalar", "options", value_dim=8),
            small(f16, 64, "resets", "decode"),
        ]  # fmt: skip
        eager = [small(f32, 64, decay) for decay in _DECAYS]
        eager += [small(f32, 64, "scalar", causal=False), small(f32, 64, "resets", "packed")]
        return [("reference", case) for case in eager] + [("triton", case) for case in interpreted]
    narrow = [
        Case(bf16, 128), Case(bf16, 64), Case(bf16, 128, "resets", "packed"), Case(bf16, 64, "resets"),
        Case(f16, 128, "scalar", causal=False), Case(f16, 64, "constant"), Case(bf16, 128, "none", "last rows"),
        Case(bf16, 64, "none", causal=False), Case(f16, 64, "scalar"),
    ]  # fmt: skip
    wide = [
        Case(f32, 64), Case(f32, 128, "resets"), Case(f32, 64, "constant", causal=False),
        Case(bf16, 80, "scalar", "options", value_dim=24), Case(bf16, 256, "scalar"),
        Case(bf16, 128, "scalar", "decode"), Case(bf16, 64, "constant", "decode"),
    ]  # fmt: skip
    if half(device) == f16:
        narrow, wide = ([c for c in some if c.dtype != bf16] for some in (narrow, wide))
    found = [("hopper", case) for case in narrow] + [("triton", case) for case in narrow + wide]
    return [*found, ("reference", Case(f32, 64, "resets")), ("reference", Case(f32, 64, "constant"))]


@dataclass(frozen=True)
class Verdict:
    """A case's result that comes closest to its budget, or exceeds it most."""

    backend: str
    case: Case
    passed: bool = False
    fraction: float = math.nan  # error / budget
    tensor: str = ""
    error: str | None = None
    fallbacks: tuple[str, ...] = ()  # of the process, as far as it had launched kernels


def judge(backend: str, case: Case, device: str) -> Verdict:
    """One case; whatever it raises is an error of the verdict."""
    try:
        comparisons = case.compare(backend, torch.device(device))
    except Exception as error:
        return Verdict(backend, case, error=one_line(error), fallbacks=(*compatibility.fallbacks(),))

    def closeness(comparison: Comparison) -> tuple[bool, float]:
        fraction = ratio(comparison.error, comparison.budget)
        return not comparison.passed, math.inf if math.isnan(fraction) else fraction

    worst = max(comparisons, key=closeness)
    passed = all(comparison.passed for comparison in comparisons)
    fraction = ratio(worst.error, worst.budget)
    return Verdict(backend, case, passed, fraction, worst.name, fallbacks=(*compatibility.fallbacks(),))


def verdicts(tasks: Sequence[tuple[str, Case]], device: torch.device, processes: int) -> Iterator[Verdict]:
    """The cases in their order, in so many processes of their own, or in this one."""
    arguments = [(backend, case, str(device)) for backend, case in tasks]
    if processes == 1:
        yield from (judge(*some) for some in arguments)
        return
    for (backend, case), found in zip(tasks, in_processes(judge, arguments, processes), strict=True):
        yield Verdict(backend, case, error=found) if isinstance(found, str) else found


def default_processes(device: torch.device) -> int:
    """Compiling is what takes the time on a GPU; a CPU interprets its tiny cases faster than it starts a process."""
    if device.type == "cpu":
        return 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    contexts = torch.cuda.mem_get_info(device)[0] // CONTEXT_BYTES
    return max(1, min(MOST_PROCESSES, processors, contexts))


def in_processes(
    function: Callable[..., Any], tasks: Iterable[tuple], count: int, seconds: float = CASE_SECONDS
) -> Iterator[Any]:
    """function(*task) for every task, in their order; a str for what ended its process, or took longer than seconds.

    A kernel that reads where it may not leaves its process without a GPU, or ends it. So what gives an `error` ends its
    process, too, and the next task gets a new one.
    """
    own, workers = threading.local(), []

    def ask(task: tuple) -> Any:
        worker = getattr(own, "worker", None)
        if worker is None or worker.ended:
            worker = own.worker = _Worker(function)
            workers.append(worker)
        return worker.ask(task, seconds)

    with ThreadPoolExecutor(count) as threads:
        try:
            yield from threads.map(ask, tasks)
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """A process that answers tasks one by one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_answer, args=(function, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.ended = False

    def ask(self, task: tuple, seconds: float) -> Any:
        try:
            self.connection.send(task)
            if not self.connection.poll(seconds):
                self.end()
                return f"it took more than {seconds:.0f} s"
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            self.end()
            return f"its process ended with exit status {self.process.exitcode}"
        if getattr(answer, "error", None) is not None:
            self.end()
        return answer

    def end(self) -> None:
        self.ended = True
        self.process.kill()


def _answer(function: Callable[..., Any], connection: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program that asks ends this process
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(function(*connection.recv()))


# Speed


@dataclass(frozen=True)
class Peer:
    """An attention kernel: attend(q, k, v, log_decay) -> out on tensors in its layout, "BTHD" or "BHTD"."""

    name: str
    layout: str
    decay: bool
    load: Callable[[], Callable[..., Any]]  # raises what keeps the kernel from being called
    sdpa: bool = False
    ours: bool = False


def _ours(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor:
    return decay_attention(q, k, v, log_decay, skip_tolerance=None)  # all work that is compared is done


def _sdpa(backend: SDPBackend | None) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


class NotInstalled(Exception):
    """A peer that is not on this machine."""


def _imported(module: str, function: str, **options: Any) -> Callable[..., Any]:
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        raise NotInstalled(package)
    return functools.partial(getattr(importlib.import_module(module), function), **options)


PEERS = (
    Peer("decayattn, decay per token", "BTHD", True, lambda: _ours, ours=True),
    Peer("decayattn, no decay", "BTHD", False, lambda: _ours, ours=True),
    Peer("SDPA, PyTorch's choice, no decay", "BHTD", False, lambda: _sdpa(None), sdpa=True),
    Peer("SDPA, cuDNN, no decay", "BHTD", False, lambda: _sdpa(SDPBackend.CUDNN_ATTENTION), sdpa=True),
    Peer("SDPA, FlashAttention, no decay", "BHTD", False, lambda: _sdpa(SDPBackend.FLASH_ATTENTION), sdpa=True),
    Peer("fla, decay per token", "BTHD", True,
         lambda: _imported("fla.ops.forgetting_attn.parallel", "parallel_forgetting_attn")),
    Peer("official FoX, decay per token", "BHTD", True,
         lambda: _imported("forgetting_transformer.ops.forgetting_attention", "forgetting_attention", head_first=True)),
    Peer("flash_attn 2, no decay", "BTHD", False, lambda: _imported("flash_attn", "flash_attn_func", causal=True)),
    Peer("flash_attn 3, no decay", "BTHD", False,
         lambda: _imported("flash_attn_interface", "flash_attn_func", causal=True)),
    Peer("flash_attn 4, no decay", "BTHD", False, lambda: _imported("flash_attn.cute", "flash_attn_func", causal=True)),
)  # fmt: skip
DIRECTIONS = ("forward", "forward + backward")


@dataclass
class Speed:
    """Milliseconds of one kernel, a median for every round by direction; or why there are none."""

    peer: Peer
    rounds: dict[str, list[float]]
    reason: str | None = None
    absent: bool = False  # it is not installed, or does not fit: nothing is wrong

    def median(self, direction: str) -> float:
        return statistics.median(self.rounds[direction])


def speeds(head_dim: int, device: torch.device, wrong: set[str], peers: Sequence[Peer] = PEERS) -> list[Speed]:
    """Every peer on one shape in interleaved rounds. Ours is not timed where "auto" takes a backend that is wrong."""
    batch, heads, length = TIMED_SHAPE
    dtype = half(device)
    q, k, v, grad_out = torch.randn(4, batch, length, heads, head_dim, device=device, dtype=dtype)
    log_decay = -0.02 * torch.rand(batch, length, heads, device=device)
    found, calls = [], {}
    for peer in peers:
        speed = Speed(peer, {direction: [] for direction in DIRECTIONS})
        found.append(speed)
        if peer.ours and (reason := _not_to_be_timed(q, k, v, log_decay if peer.decay else None, wrong)):
            speed.reason, speed.absent = reason, True
            continue
        with _reason_of_failure(speed):
            calls[peer.name] = _calls(peer, (q, k, v, grad_out), log_decay)
            for call in calls[peer.name].values():
                _milliseconds(call, 3)  # compiles, and tunes
    for number in range(ROUNDS):
        for speed in found[:: -1 if number % 2 else 1]:
            for direction in DIRECTIONS:
                if speed.reason is None:
                    with _reason_of_failure(speed):
                        call = calls[speed.peer.name][direction]
                        repeats = ROUND_MILLISECONDS / _milliseconds(call, 1)
                        speed.rounds[direction].append(_milliseconds(call, max(2, min(100, int(repeats)))))
    return found


def _not_to_be_timed(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, wrong: set[str]) -> str | None:
    problem = AttentionProblem.of(q, v, log_decay, None, True)
    chosen = backends.select(problem, "auto")
    if chosen == "auto":
        chosen = backends.resolve(problem, "auto", q, k, v, q.shape[3] ** -0.5)
    if chosen in wrong:
        return f"not timed: {chosen}, which takes this call, is wrong (above)"
    return "not timed: no kernel takes this call" if chosen == "reference" else None


@contextlib.contextmanager
def _reason_of_failure(speed: Speed) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        speed.reason = _NOT_INSTALLED if isinstance(error, NotInstalled) else one_line(error)
        speed.absent = not speed.peer.ours or isinstance(error, torch.cuda.OutOfMemoryError)


def _calls(peer: Peer, tensors: Sequence[Tensor], log_decay: Tensor) -> dict[str, Callable[[], object]]:
    """A peer's forward as in training, and with the gradient of everything, on tensors in its layout."""
    attend = peer.load()
    tensors = [*tensors, log_decay] if peer.decay else [*tensors]
    if peer.layout == "BHTD":
        tensors = [x.transpose(1, 2).contiguous() for x in tensors]
    q, k, v, grad_out, *decay = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *decay)]

    def forward() -> Tensor:
        out = attend(*leaves)
        return out[0] if isinstance(out, tuple) else out

    return dict(zip(DIRECTIONS, (forward, lambda: torch.autograd.grad(forward(), leaves, grad_out)), strict=True))


def _milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call among so many behind one another."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


# The report


def one_line(error: BaseException) -> str:
    """What kind of exception, and the line of its message that says most."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[-1] if name == "CompilationError" else lines[0]  # Triton shows the source first
    return f"{name}: {text[:200]}" if text else name


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).removeprefix("torch."))


def _print(*cells: str, widths: Sequence[int] = ()) -> None:
    """A line, now."""
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)] + [*cells[len(widths) :]]
    print("  " + "  ".join(padded).rstrip(), flush=True)


def report_versions(device: torch.device) -> list[str]:
    print("Versions", flush=True)
    for name, version in versions(device):
        _print(name, version, widths=(9,))
    return []


def report_backends(device: torch.device, missing: dict[str, str]) -> list[str]:
    print('\nThe backend of backend="auto" (B2 H8, T 1024 unless said, causal, decay per token)', flush=True)
    wrong = []
    for name, reason in missing.items():
        _print(f"{name} cannot be imported: {reason}")
        if triton_belongs_here(device):
            wrong.append(f"backend {name} cannot be imported: {reason}")
    if (reason := interpreted_on_a_gpu(device)) is not None:
        wrong.append(reason)
    widths = (max(len(call.name) for call in ordinary_calls(device)), 9)
    before, errors = (), {}  # an error, and the first call that it came from
    for choice in choices(device):
        if choice.error is not None:
            _print(choice.call, "ERROR", choice.error, widths=widths)
            errors.setdefault(choice.error, choice.call)
            continue
        same = choice.reasons and choice.reasons == before
        reasons = ["for the same reasons"] if same else [f"not {reason}" for reason in choice.reasons]
        first, *others = reasons or [""]
        _print(choice.call, choice.backend, first, widths=widths)
        for reason in others:
            _print("", "", reason, widths=widths)
        before = choice.reasons
    return wrong + [f'backend="auto", {call}: {error}' for error, call in errors.items()]


def report_errors(
    device: torch.device, missing: dict[str, str], processes: int | None = None
) -> tuple[list[str], set[str]]:
    """What is wrong, and the backends that it concerns."""
    print("\nErrors against float64, as fractions of the error budget (above 1: FAIL)", flush=True)
    unchecked = unchecked_backends(device, missing)
    tasks = [(name, case) for name, case in cases(device) if name not in unchecked]
    for name, reason in unchecked.items():
        _print(f"{name} is not checked: {reason}")
    widths = (9, max(len(case.name) for _, case in tasks), 8, 10)
    _print("backend", "call", "worst", "of", widths=widths)
    wrong, concerned, fallbacks = [], set(), {}
    for verdict in verdicts(tasks, device, default_processes(device) if processes is None else processes):
        name, case = verdict.backend, verdict.case.name
        if verdict.error is not None:
            _print(name, case, "ERROR", verdict.error, widths=widths)
            wrong.append(f"{name}, {case}: {verdict.error}")
        else:
            text = f"{verdict.fraction:.2f}"
            _print(name, case, text, verdict.tensor, "ok" if verdict.passed else "FAIL", widths=widths)
            if not verdict.passed:
                wrong.append(f"{name}, {case}: {verdict.tensor} is {text} times its error budget")
        if verdict.error is not None or not verdict.passed:
            concerned.add(name)
        fallbacks |= dict.fromkeys(verdict.fallbacks)
    print("\nPrivate names of PyTorch and Triton that are not used here", flush=True)
    for text in fallbacks or ["none"]:
        _print(text)
    return wrong, concerned


def report_speed(device: torch.device, concerned: set[str]) -> list[str]:
    batch, heads, length = TIMED_SHAPE
    wrong = []
    for head_dim in (64, 128):
        shape = f"{_short(half(device))} B{batch} H{heads} T{length} D{head_dim}"
        title = f"Speed: {shape}, causal; ms, median [range] of {ROUNDS} rounds, multiple of the fastest SDPA's speed"
        print(f"\n{title}", flush=True)
        with torch.cuda.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why SDPA refuses is told by its exception
            found = speeds(head_dim, device, concerned)
        timed = [speed for speed in found if speed.reason is None]
        sdpa = [speed for speed in timed if speed.peer.sdpa]
        best = {direction: min((s.median(direction) for s in sdpa), default=math.nan) for direction in DIRECTIONS}
        widths = (max(len(speed.peer.name) for speed in found), 27, 27)
        _print("", *DIRECTIONS, widths=widths)
        for speed in timed:
            cells = []
            for direction in DIRECTIONS:
                median, rounds = speed.median(direction), speed.rounds[direction]
                times = f"{median:.3f} [{min(rounds):.3f}, {max(rounds):.3f}]"
                cells.append(f"{times} {best[direction] / median:.2f}x")
            _print(speed.peer.name, *cells, widths=widths)
        for speed in found:
            if speed.reason not in (None, _NOT_INSTALLED):
                _print(speed.peer.name, speed.reason, widths=widths)
            if speed.reason is not None and not speed.absent:
                wrong.append(f"{speed.peer.name}, {shape}: {speed.reason}")
        absent = [speed.peer.name.split(",")[0] for speed in found if speed.reason == _NOT_INSTALLED]
        if absent:
            _print(f"{_NOT_INSTALLED}: {', '.join(absent)}")
    print("  A short burst on a GPU whose power state nobody controls: the benchmarks in experiments/ are the measure.")
    return wrong


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, torch.device]:
    parser = argparse.ArgumentParser(
        "python -m decayattn.check", description="Is decayattn right and fast on this machine?",
        epilog="exit status: 0 if everything is right, 1 if anything is wrong, 2 for a wrong option",
    )  # fmt: skip
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--no-speed", action="store_true", help="measure no times (a CPU never does)")
    parser.add_argument("--device", default=default, help="cpu, cuda or cuda:N (here: %(default)s)")
    parser.add_argument(
        "--processes", type=int, help="so many compile and judge at once (default: as many as pay); 1: none but this"
    )
    options = parser.parse_args(arguments)
    try:
        device = torch.device(options.device)
    except RuntimeError:
        parser.error(f"--device: expected cpu, cuda or cuda:N, got {options.device!r}")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"--device: expected cpu, cuda or cuda:N, got {options.device!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            parser.error(f"--device: torch can use {count} GPUs here, got {options.device!r}")
        device = torch.device("cuda", device.index or 0)
    if options.processes is not None and options.processes < 1:
        parser.error(f"--processes: expected at least 1, got {options.processes}")
    return options, device


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options, device = parse(arguments)
    begin = time.perf_counter()
    enable_interpreter(device)
    wrong = report_versions(device)
    missing = missing_backends()
    wrong += report_backends(device, missing)
    errors, concerned = report_errors(device, missing, options.processes)
    wrong += errors
    if device.type == "cuda" and not options.no_speed:
        wrong += report_speed(device, concerned)
    seconds = f"{time.perf_counter() - begin:.0f} s"
    print(f"\nWrong, {len(wrong)} in {seconds}:" if wrong else f"\nAll that was checked is right ({seconds}).")
    for text in wrong:
        _print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
