"""Times compared with other attention kernels, for calls already judged."""

import contextlib
import functools
import importlib
import importlib.util
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from decayattn import decay_attention
from decayattn.backends import registry
from decayattn.check import errors
from decayattn.check.choice import half
from decayattn.check.text import one_line, row, section, short
from decayattn.check.versions import NOT_INSTALLED
from decayattn.problem import AttentionProblem, Inputs

# rounds over all kernels, and the time of each kernel in a round
ROUNDS, ROUND_MILLISECONDS = 7, 10.0
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Peer:
    """An attention kernel: attend(q, k, v, log_decay) -> out on tensors in its layout, "BTHD" or "BHTD"."""

    name: str
    layout: str
    decay: bool
    load: Callable[[], Callable[..., Any]]  # raises if the kernel cannot be called
    sdpa: bool = False
    ours: bool = False


def _ours(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return decay_attention(q, k, v, log_decay, **errors.TIMED_OPTIONS)


def _sdpa(backend: SDPBackend | None) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


class NotInstalled(Exception):
    """A peer is not installed on this machine."""


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
)
DIRECTIONS = ("forward", "forward + backward")


@dataclass
class Speed:
    """Milliseconds of one kernel: a median for every round, by direction; or the reason why there are none."""

    peer: Peer
    rounds: dict[str, list[float]]
    reason: str | None = None
    absent: bool = False  # not installed, or does not fit: no fault

    def median(self, direction: str) -> float:
        return statistics.median(self.rounds[direction])


def speeds(head_dim: int, device: torch.device, wrong: set[str], peers: Sequence[Peer] = PEERS) -> list[Speed]:
    """Time every peer on one shape in interleaved rounds, but not ours if "auto" chooses a faulty backend."""
    (q, k, v, grad_out), log_decay = _tensors(head_dim, device)
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
                _milliseconds(call, 3)  # compiles and tunes
    for number in range(ROUNDS):
        for speed in found[:: -1 if number % 2 else 1]:
            for direction in DIRECTIONS:
                if speed.reason is None:
                    with _reason_of_failure(speed):
                        call = calls[speed.peer.name][direction]
                        repeats = ROUND_MILLISECONDS / _milliseconds(call, 1)
                        speed.rounds[direction].append(_milliseconds(call, max(2, min(100, int(repeats)))))
    return found


def load(device: torch.device, peers: Sequence[Peer] = PEERS) -> None:
    """Call each of PyTorch's kernels once, while the processes judge: cuDNN's first call of a shape is slow. Other
    peers wait, because some choose kernels by timing and need the GPU alone."""
    with torch.cuda.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for head_dim, peer in itertools.product(HEAD_DIMS, (peer for peer in peers if peer.sdpa)):
            with contextlib.suppress(Exception):  # `speeds` reports the reason
                for call in _calls(peer, *_tensors(head_dim, device)).values():
                    call()


def _tensors(head_dim: int, device: torch.device) -> tuple[Sequence[Tensor], Tensor]:
    """q, k, v and a gradient of the output; and a log-decay."""
    batch, heads, length = errors.TIMED_SHAPE
    several = torch.randn(4, batch, length, heads, head_dim, device=device, dtype=half(device))
    return several.unbind(), -0.02 * torch.rand(batch, length, heads, device=device)


def _not_to_be_timed(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, wrong: set[str]) -> str | None:
    problem = AttentionProblem.of(q, v, log_decay, None, True)
    chosen: str = registry.select(problem, "auto")
    if chosen == "auto":
        chosen = registry.resolve(problem, "auto", Inputs(q, k, v, log_decay, scale=q.shape[3] ** -0.5))
    if chosen in wrong:
        return f"not timed: {chosen}, which takes this call, is wrong (above)"
    return "not timed: no kernel takes this call" if chosen == "reference" else None


@contextlib.contextmanager
def _reason_of_failure(speed: Speed) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        speed.reason = NOT_INSTALLED if isinstance(error, NotInstalled) else one_line(error)
        speed.absent = not speed.peer.ours or isinstance(error, torch.cuda.OutOfMemoryError)


def _calls(peer: Peer, tensors: Sequence[Tensor], log_decay: Tensor) -> dict[str, Callable[[], object]]:
    """A peer's forward as in training, and with all gradients, on tensors in its layout."""
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
    """Time of one call, averaged over `repeats` consecutive ones."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def report(device: torch.device, concerned: set[str]) -> list[str]:
    batch, heads, length = errors.TIMED_SHAPE
    wrong = []
    for head_dim in HEAD_DIMS:
        shape = f"{short(half(device))} B{batch} H{heads} T{length} D{head_dim}"
        title = f"Speed: {shape}, causal; ms, median [range] of {ROUNDS} rounds, multiple of the fastest SDPA's speed"
        with section(title):
            with torch.cuda.device(device), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SDPA's exception has the reason
                found = speeds(head_dim, device, concerned)
            timed = [speed for speed in found if speed.reason is None]
            sdpa = [speed for speed in timed if speed.peer.sdpa]
            best = {direction: min((s.median(direction) for s in sdpa), default=math.nan) for direction in DIRECTIONS}
            widths = (max(len(speed.peer.name) for speed in found), 27, 27)
            row("", *DIRECTIONS, widths=widths)
            for speed in timed:
                cells = []
                for direction in DIRECTIONS:
                    median, rounds = speed.median(direction), speed.rounds[direction]
                    times = f"{median:.3f} [{min(rounds):.3f}, {max(rounds):.3f}]"
                    cells.append(f"{times} {best[direction] / median:.2f}x")
                row(speed.peer.name, *cells, widths=widths)
            for speed in found:
                if speed.reason not in (None, NOT_INSTALLED):
                    row(speed.peer.name, speed.reason, widths=widths)
                if speed.reason is not None and not speed.absent:
                    wrong.append(f"{speed.peer.name}, {shape}: {speed.reason}")
            absent = [speed.peer.name.split(",")[0] for speed in found if speed.reason == NOT_INSTALLED]
            if absent:
                row(f"{NOT_INSTALLED}: {', '.join(absent)}")
    print("  Short bursts at the GPU's current power state; for measurements use the benchmarks in experiments/.")
    return wrong
