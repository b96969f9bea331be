"""Calls on a device: a peer set up with its tensors, timed in interleaved rounds, its kernel launches counted."""

import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention_benchmark.cases import DIRECTIONS, Case
from attention_benchmark.peers import Attend, Peer, reason

# categories under which the profiler's trace files what the device was asked to do
_LAUNCHES = ("kernel", "gpu_memset", "gpu_memcpy")
# milliseconds of a call
Timer = Callable[[Callable[[], object]], float]
# what reports say of figures in ms
MILLISECONDS = (
    "median over interleaved rounds, each a median by CUDA events with a cleared L2 cache, the host ahead of the "
    "device; ms_range: min, max"
)
# bytes, more than any L2 cache has
_CACHE = 1 << 28
# calls of a graph: between two graphs the device waits a few microseconds
_CAPTURED = 8
# clock cycles: 15 ms of an H200
_HEAD_START = 30_000_000


@dataclass
class Prepared:
    """A peer's call for one case, with its tensors in its own layout; those in `wanted` require a gradient."""

    attend: Attend
    tensors: dict[str, Tensor]
    wanted: dict[str, Tensor]
    grad_out: Tensor
    layout: str

    def forward(self) -> Tensor:
        """One forward call as in training: the graph is built, outputs are allocated."""
        return self.attend(*(self.tensors.get(name) for name in ("q", "k", "v", "log_decay")))

    def backward(self, out: Tensor, grad_out: Tensor | None = None) -> tuple[Tensor, ...]:
        """Every gradient of that call, fresh tensors; the graph stays for the next one."""
        grad_out = self.grad_out if grad_out is None else grad_out
        return torch.autograd.grad(out, list(self.wanted.values()), grad_out, retain_graph=True)


def prepare(peer: Peer, case: Case, inputs: dict[str, Tensor]) -> Prepared:
    """The peer's call on these inputs; raises Absent where the peer cannot be had."""
    attend = peer.build(case, inputs["q"].device)
    tensors = {name: in_layout(x, peer.layout).contiguous() for name, x in inputs.items()}
    grad_out = tensors.pop("grad_out")
    if peer.decay == "none":
        tensors.pop("log_decay", None)
    tensors = {name: x.detach() for name, x in tensors.items()}
    wanted = {name: x for name, x in tensors.items() if name != "log_decay" or peer.decay == "learned"}
    for x in wanted.values():
        x.requires_grad_()
    return Prepared(attend, tensors, wanted, grad_out, peer.layout)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """A tensor of the contract's layout (B, T, H, …) as a view in `layout`, and back: the two are their own inverse."""
    return x.transpose(1, 2) if layout == "BHTD" and x.ndim > 1 else x


@dataclass
class Timing:
    """Milliseconds of one call: a median for every round."""

    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def time_rounds(
    prepared: dict[str, Prepared], rounds: int, timer: Timer
) -> tuple[dict[tuple[str, str], Timing], dict[str, str]]:
    """(timings by (peer, direction), reasons of the peers that failed).

    Every round times every peer shortly, forward and backward, so that a drifting clock or temperature meets all alike;
    every second round goes the other way round. Only one peer's graph is alive at a time.
    """
    timings = {(name, direction): Timing([]) for name in prepared for direction in DIRECTIONS}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for name in list(prepared)[:: -1 if number % 2 else 1]:
            if name in failed:
                continue
            call = prepared[name]
            try:
                timings[name, "forward"].rounds.append(timer(call.forward))
                out = call.forward()
                timings[name, "backward"].rounds.append(timer(lambda call=call, out=out: call.backward(out)))
                del out
            except Exception as error:  # out of memory, say: the other peers go on
                failed[name] = reason(error)
    return {key: timing for key, timing in timings.items() if key[0] not in failed}, failed


def device_and_timer(round_ms: float, without_gpu: str) -> tuple[str, Timer | None]:
    """Where a benchmark runs, and its timer; without a GPU the kernels are interpreted, nothing is timed, and it says
    so."""
    if torch.cuda.is_available():
        return "cuda", cuda_timer(warmup=round_ms / 3, duration=round_ms)
    os.environ.setdefault("TRITON_INTERPRET", "1")  # in time: decayattn imports Triton when a kernel is first asked for
    print(without_gpu)
    return "cpu", None


def cuda_timer(warmup: float, duration: float) -> Timer:
    """A timer by CUDA events: the median of calls that together take `duration` ms, the L2 cache cleared before each.

    It measures the device, even of calls that keep a slow host busy for longer: the device sleeps first, for all peers
    alike, and the host is ahead of it. benchmark_overhead.py measures the host.
    """

    def timer(call: Callable[[], object]) -> float:
        each = statistics.median(_milliseconds(call, 5, asleep=0))
        _milliseconds(call, max(1, int(warmup / each)), asleep=0)
        return statistics.median(_milliseconds(call, max(1, int(duration / each)), asleep=_HEAD_START))

    return timer


def sustained_timer(seconds: float) -> Timer:
    """A timer of calls back to back, as in training: mean over as many as fill `seconds`, after a quarter of them.

    The host only launches, so it stays ahead of the device wherever a call takes the device longer than the host.
    """

    def timer(call: Callable[[], object]) -> float:
        each = _back_to_back(call, 3)
        count = max(3, int(seconds * 1e3 / each))
        _back_to_back(call, max(2, count // 4))
        return _back_to_back(call, count)

    return timer


def captured_timer(seconds: float) -> Timer:
    """The same of CUDA graphs that replay calls: the device alone, also where a slow host could not keep it busy.

    It captures on the current stream, which may not be the default one.
    """
    sustained = sustained_timer(seconds)

    def timer(call: Callable[[], object]) -> float:
        call()  # compiled, and its workspaces allocated, before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for _ in range(_CAPTURED):
                call()
        return sustained(graph.replay) / _CAPTURED

    return timer


def _back_to_back(call: Callable[[], object], count: int) -> float:
    """Milliseconds per call of so many, between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def _milliseconds(call: Callable[[], object], count: int, asleep: int) -> list[float]:
    """Of so many calls, after the device has slept for so many of its clock cycles."""
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


def count_launches(call: Callable[[], object]) -> list[str]:
    """Names of everything that one call puts on the device: kernels, memsets and copies."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    names: list[str] = []
    for _ in range(2):  # the first profile of a process may miss launches while the tracer starts
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            result = call()
            torch.cuda.synchronize()
        del result
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            names = launches_in_trace(json.loads(path.read_text()))
    return names


def launches_in_trace(trace: dict) -> list[str]:
    """The device's kernels, memsets and copies of a Chrome trace, in the order of their start."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in _LAUNCHES and event.get("ph") == "X"]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
