"""How long calls take: timers of a device, and interleaved rounds of several peers."""

import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from shared.calls import Prepared
from shared.cases import DIRECTIONS
from shared.peers import reason

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
class Timing:
    """Milliseconds of one call: a median for every round."""

    rounds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


def interleaved(names: Iterable[str], rounds: int) -> Iterator[str]:
    """The names, round by round, so that a drifting clock or temperature meets all alike; every second round goes the
    other way round."""
    order = list(names)
    for number in range(rounds):
        yield from order[:: -1 if number % 2 else 1]


def time_rounds(
    prepared: dict[str, Prepared], rounds: int, timer: Timer
) -> tuple[dict[tuple[str, str], Timing], dict[str, str]]:
    """(timings by (peer, direction), reasons of the peers that failed).

    Every round times every peer shortly, forward and backward. Only one peer's graph is alive at a time.
    """
    timings = {(name, direction): Timing([]) for name in prepared for direction in DIRECTIONS}
    failed: dict[str, str] = {}
    for name in interleaved(prepared, rounds):
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


def interpret_kernels() -> None:
    """The kernels run in Triton's interpreter. In time: decayattn imports Triton when a kernel is first asked for."""
    os.environ.setdefault("TRITON_INTERPRET", "1")


def device_and_timer(round_ms: float, without_gpu: str) -> tuple[str, Timer | None]:
    """Where a benchmark runs, and its timer; without a GPU the kernels are interpreted, nothing is timed, and it says
    so."""
    if torch.cuda.is_available():
        return "cuda", cuda_timer(warmup=round_ms / 3, duration=round_ms)
    interpret_kernels()
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
        each = back_to_back(call, 3)
        count = max(3, int(seconds * 1e3 / each))
        back_to_back(call, max(2, count // 4))
        return back_to_back(call, count)

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


def back_to_back(call: Callable[[], object], count: int) -> float:
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
