"""What a rank does: its slice's call, checked, counted and timed."""

import contextlib
import statistics
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from shared.timing import back_to_back, interleaved
from torch import Tensor

from context_benchmark.checks import differences
from context_benchmark.workloads import Workload
from decayattn import decay_attention
from decayattn.distributed import context_parallel_attention

ALONE = "one GPU"
# what is timed; calls are counted in the first two
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
DIRECTIONS = (FORWARD, BACKWARD, BOTH)


class Call:
    """A forward and its backward on leaves of its own; ALONE has whole tensors, a mode this rank's slice."""

    def __init__(self, name: str, inputs: dict[str, Tensor], group: dist.ProcessGroup, backend: str) -> None:
        self.name, self.group, self.backend = name, group, backend
        length, ranks = inputs["q"].shape[1], dist.get_world_size(group)
        part = length if name == ALONE else length // ranks
        begin = 0 if name == ALONE else dist.get_rank(group) * part
        self.mine = slice(begin, begin + part)
        parts = {name: x[:, self.mine] if x.ndim > 1 else x for name, x in inputs.items()}
        self.grad_out = parts.pop("grad_out")
        self.leaves = {name: x.detach().clone().requires_grad_() for name, x in parts.items()}

    def forward(self) -> Tensor:
        if self.name == ALONE:
            return decay_attention(**self.leaves, backend=self.backend)
        return context_parallel_attention(**self.leaves, group=self.group, mode=self.name, backend=self.backend)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        """Every gradient; the graph stays for the next one."""
        return torch.autograd.grad(out, list(self.leaves.values()), self.grad_out, retain_graph=True)

    def results(self) -> dict[str, Tensor]:
        out = self.forward()
        gradients = dict(zip(self.leaves, self.backward(out), strict=True))
        shared = gradients.get("log_decay")
        if self.name != ALONE and shared is not None and shared.ndim == 1:
            dist.all_reduce(shared, group=self.group)
        return {"out": out.detach(), **{f"d{name}": x for name, x in gradients.items()}}


def errors(call: Call, whole: dict[str, Tensor]) -> dict[str, float]:
    """Of a mode's results against those of one GPU."""
    found = call.results()
    mine = {name: x[:, call.mine] if x.ndim > 1 else x for name, x in whole.items()}
    return differences(found, mine, call.group)


@contextlib.contextmanager
def counted(received: list[int]) -> Iterator[None]:
    """Bytes that all_to_all_single brings from other ranks, call by call."""
    exchange = dist.all_to_all_single

    def counting(
        output: Tensor, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup, **options: bool
    ) -> object:
        others = sum(receive) - receive[dist.get_rank(group)]
        width = output.nbytes // max(1, len(output))
        received.append(others * width)
        return exchange(output, rows, receive, send, group=group, **options)

    dist.all_to_all_single = counting
    try:
        yield
    finally:
        dist.all_to_all_single = exchange


def received_bytes(call: Call) -> dict[str, list[int]]:
    """direction → bytes that each rank receives in the exchanges of one call."""
    found: dict[str, list[int]] = {}
    forward: list[int] = []
    backward: list[int] = []
    with counted(forward):
        out = call.forward()
    with counted(backward):
        call.backward(out)
    for direction, numbers in ((FORWARD, forward), (BACKWARD, backward)):
        own = torch.tensor([sum(numbers)], device=out.device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(call.group))]
        dist.all_gather(everyone, own, group=call.group)
        found[direction] = [int(x) for x in everyone]
    return found


def time_rounds(calls: dict[str, Call], rounds: int, seconds: float) -> dict[tuple[str, str], list[float]]:
    """(call, direction) → milliseconds of the slowest rank, a mean of calls back to back for every round.

    Both are a forward and its backward in turns, as in a step of training. No rank begins before the others are ready.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for name in interleaved(calls, rounds):
        call = calls[name]
        out = call.forward()
        timed = {
            FORWARD: call.forward,
            BACKWARD: lambda call=call, out=out: call.backward(out),
            BOTH: lambda call=call: call.backward(call.forward()),
        }
        for direction, function in timed.items():
            found.setdefault((name, direction), []).append(_milliseconds(function, seconds, call.group))
        del out, timed
    return found


def _milliseconds(call: Callable[[], object], seconds: float, group: dist.ProcessGroup) -> float:
    each = _slowest(_back_to_back(call, 1), group)
    if each >= seconds * 1e3:
        return each  # seconds are minutes of a whole table
    each = _slowest(_back_to_back(call, 2), group)  # the first one may have had something to prepare
    return _slowest(_back_to_back(call, min(200, max(1, int(seconds * 1e3 / each)))), group)


def _slowest(milliseconds: float, group: dist.ProcessGroup) -> float:
    """Of all ranks, which wait for one another."""
    found = torch.tensor([milliseconds], device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def _back_to_back(call: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    return back_to_back(call, count)


def bandwidth(group: dist.ProcessGroup, megabytes: int = 256, calls: int = 10) -> float:
    """Bytes per second that the slowest rank receives from others in an all-to-all of so many megabytes."""
    ranks = dist.get_world_size(group)
    rows = torch.empty(ranks, megabytes * 2**20 // ranks, dtype=torch.uint8, device="cuda")
    received = torch.empty_like(rows)

    def exchange() -> None:
        dist.all_to_all_single(received, rows, group=group)

    for _ in range(2):
        exchange()
    milliseconds = _slowest(_back_to_back(exchange, calls), group)
    return (ranks - 1) * rows[0].nbytes / milliseconds * 1e3


def median(timings: dict[tuple[str, str], list[float]], name: str, direction: str) -> float | None:
    found = timings.get((name, direction))
    return statistics.median(found) if found else None


def describe(workload: Workload, received: dict[str, dict[str, list[int]]], ranks: int) -> str:
    """Bytes of a forward, in one line per mode."""
    everything = workload.everything(ranks)
    return "\n".join(
        f"  {mode}: a rank receives at most {max(of['forward']) / 1e6:.3g} MB forward and "
        f"{max(of['backward']) / 1e6:.3g} MB backward ({max(of['forward']) / everything:.2%} of all keys before it)"
        for mode, of in received.items()
    )
