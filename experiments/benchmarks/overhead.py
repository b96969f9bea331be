"""Host time of a small call, and device time once it is captured in a CUDA graph. Usage::

    python experiments/benchmarks/overhead.py                        # on a GPU: a table and JSON
    python experiments/benchmarks/overhead.py --length 512 --peers fla
    python experiments/benchmarks/overhead.py --packed               # packed sequences, too: of one total, and of many

Host time is the clock over a series of forward and backward calls that nothing waits for. Every call is made as
training makes it, and once more in one thread: autograd gives a backward on a GPU to a thread of that GPU. Ours is made
once more without its launches. A CUDA graph replays them without the host; its time is the device's. Calls of ours have
every default. --packed measures calls of one total, and "other totals": in every call one token more than in the last.
Without a GPU the host times of the eager reference are printed.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import decayattn
from benchmarks import harness, peers
from benchmarks.harness import Case, Parts, Run
from decayattn.backends import registry

OPTIONS = {
    "heads": (8, 8, "heads H"),
    "length": (256, 256, "sequence length T"),
    "head_dims": ([64, 128], [16], "head dimensions D = D_v"),
    "dtype": harness.DTYPE,
    "backends": (["auto", "triton"], ["reference"], "our backends", registry.NAMES),
    "peers": ([peers.BASELINE, "flex-grad", "fla"],) * 2 + ("calls to compare with", peers.OTHERS),
    "packed": (False, False, "decay_attention_varlen, too: two sequences in one, T tokens in all"),
    "calls": (50, 2, "calls of a round"),
    "rounds": (7, 3, "interleaved rounds"),
    "output": harness.output("benchmark_overhead.json"),
}
COLUMNS = ("host_us", "one_thread_us", "no_launch_us", "graph_us")
Step = Callable[[], object]


def measure(run: Run) -> None:
    """A row for every head dimension and call."""
    options = run.options
    for head_dim in options.head_dims:
        case = Case(1, options.heads, options.length, head_dim, options.dtype, "scalar", -0.01)
        print(f"\n{case}", flush=True)
        inputs = case.inputs(run.device, options.seed)
        calls: dict[str, Parts] = {}
        ours = [peers.ours(backend, skip_tolerance="auto") for backend in options.backends]
        for peer in [*(peers.OTHERS[name] for name in options.peers), *ours]:
            with run.attempt(ours=peer.backend is not None, case=str(case), peer=peer.name):
                call = peer.prepare(case, inputs)
                step = functools.partial(lambda call: call.backward(call.forward()), call)
                calls[peer.name] = functools.partial(parts, step, run, warm(step, graph=run.timed), peer.backend)
        many = options.calls * options.rounds + 3
        kinds = ((1, "packed"), (many, "other totals")) if options.packed else ()
        for backend, (totals, what) in itertools.product(options.backends, kinds):
            step = packed_step(case, totals, backend, run.device)
            warm(step, graph=False)
            timed = functools.partial(host_microseconds, step, options.calls)
            calls[f"decayattn {backend}, {what}"] = functools.partial(iter, [("host_us", timed)])
        timings = run.time(calls, lambda timed: timed())
        rows: dict[str, Any] = {name: {"case": str(case), "head_dim": head_dim, "peer": name} for name in calls}
        for (name, column), microseconds in timings.items():
            rows[name] |= harness.spread(microseconds, column)
        run.add(rows.values(), "{peer}", COLUMNS)


def warm(step: Step, graph: bool) -> Step | None:
    """Three calls; then the replay of a call's launches as a CUDA graph, if asked for."""
    for _ in range(3):
        step()
    if not graph:
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    return harness.captured(step).replay


def parts(step: Step, run: Run, replay: Step | None, ours: str | None) -> Iterator[tuple[str, Callable[[], float]]]:
    """Functions that measure a call's microseconds, by column."""
    host = functools.partial(host_microseconds, step, run.options.calls)
    yield "host_us", host
    with torch.autograd.set_multithreading_enabled(False):
        yield "one_thread_us", host
        if ours and replay:
            from decayattn.backends.runtime.launching import DirectLaunch  # imports Triton

            with mock.patch.object(DirectLaunch, "__call__", lambda *_: None):  # noqa: PT008 (a mock takes time)
                yield "no_launch_us", host
    if replay:
        yield "graph_us", lambda: harness.burst_timer(0.006)(replay) * 1e3


def packed_step(case: Case, totals: int, backend: str, device: str) -> Step:
    """A call on `totals` numbers of tokens in turns, the last of which is the largest."""
    longest = case.length + totals - 1
    inputs = dataclasses.replace(case, batch=1, length=longest).inputs(device, seed=0)
    memory = [inputs[name].detach().squeeze(0) for name in ("q", "k", "v", "log_decay")]
    grad_out = inputs["grad_out"].squeeze(0)
    batches = []
    for total in range(case.length, longest + 1):
        ends = torch.tensor([0, total // 2, total], dtype=torch.int32, device=device)
        bounds = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)
        batches.append(([x[:total].requires_grad_() for x in memory], bounds, grad_out[:total]))
    order = itertools.cycle(batches)

    def step() -> object:
        leaves, bounds, gradient = next(order)
        out = decayattn.decay_attention_varlen(*leaves, **bounds, backend=backend)
        return torch.autograd.grad(out, leaves, gradient)

    return step


def host_microseconds(step: Step, calls: int) -> float:
    """The clock per call of a series that nothing waits for."""
    return harness.clock(step, calls, wait=False) / calls * 1e6


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
