"""Host time of a small call, and device time once it is captured in a CUDA graph. Usage::

    python experiments/benchmarks/overhead.py                        # on a GPU: a table and JSON
    python experiments/benchmarks/overhead.py --length 512 --peers fla
    python experiments/benchmarks/overhead.py --before ../before     # with a checkout of another commit
    python experiments/benchmarks/overhead.py --packed               # packed sequences, too: of one total, and of many

At B1 H8 T256 the kernels take microseconds, so a training step waits for Python: checking arguments, allocating,
launching. Host time is the clock over a series of forward and backward calls that nothing waits for. Every call is
made as training makes it, and once more in one thread. Autograd gives a backward on a GPU to a thread of that GPU,
and the difference is the cost of waking it and waiting for it. A CUDA graph replays the same launches without the
host; its time is the device's. Calls of ours have every default. --packed measures calls of one total, and "other
totals": in every call one token more than in the last. Interleaved rounds, medians with their range. Without a GPU the
host times of the eager reference are printed, which says nothing about kernels.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import decayattn
from benchmarks import harness, peers
from benchmarks.harness import Case, Run
from decayattn.backends import registry

OPTIONS = {
    "batch": (1, 1, "sequences B"),
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
} | harness.BEFORE
COLUMNS = ("host_us", "one_thread_us", "graph_us")
Step = Callable[[], object]


def measure(run: Run) -> None:
    """A row for every head dimension and call."""
    options = run.options
    run.report["before"] = harness.before_commit(options)
    versions = [None, peers.other_version(options.before)] if options.before else [None]
    for head_dim in options.head_dims:
        case = Case(options.batch, options.heads, options.length, head_dim, options.dtype, "scalar", -0.01)
        print(f"\n{case}", flush=True)
        inputs = case.inputs(run.device, run.options.seed)
        chosen = [peers.OTHERS[name] for name in options.peers]
        chosen += [peers.ours(b, version=v, skip_tolerance="auto") for v in versions for b in options.backends]
        steps: dict[str, dict[str, Step]] = {column: {} for column in COLUMNS}
        for peer in chosen:
            with run.attempt(peer.backend is not None, case=str(case), peer=peer.name):
                call = peer.prepare(case, inputs)
                add(steps, peer.name, lambda call=call: call.backward(call.forward()), run)
        steps["one_thread_us"] = dict(steps["host_us"])
        if options.packed:
            for backend in options.backends:
                for version in versions:
                    package = version or decayattn
                    for totals, what in ((1, "packed"), (options.calls * options.rounds + 3, "other totals")):
                        step = packed_step(case, totals, package.decay_attention_varlen, backend, run.device)
                        add(steps, f"decayattn {backend}, {what}{' before' if version else ''}", step, run, False)
        found = list(rows(case, head_dim, times_of(steps, run)))
        run.report["rows"] += found
        print(harness.table(["µs", *COLUMNS], ([row["peer"], *map(row.get, COLUMNS)] for row in found)), flush=True)


def add(steps: dict[str, dict[str, Step]], name: str, step: Step, run: Run, graph: bool = True) -> None:
    """A call to time, warm, and its launches as a CUDA graph."""
    for _ in range(3):
        step()
    if run.timed and graph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        steps["graph_us"][name] = harness.captured(step).replay
    steps["host_us"][name] = step


def packed_step(case: Case, totals: int, attend: Callable[..., torch.Tensor], backend: str, device: str) -> Step:
    """A call on one of the totals after the other; the last total is the longest."""
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
        return torch.autograd.grad(attend(*leaves, **bounds, backend=backend), leaves, gradient)

    return step


def times_of(steps: dict[str, dict[str, Step]], run: Run) -> dict[str, dict[str, list[float]]]:
    """By call and column, microseconds of every round."""
    times: dict[str, dict[str, list[float]]] = {name: {key: [] for key in COLUMNS} for name in steps["host_us"]}
    for _ in range(run.options.rounds):
        for column in ("host_us", "one_thread_us"):
            with torch.autograd.set_multithreading_enabled(column == "host_us"):
                for name, step in steps[column].items():
                    times[name][column].append(host_microseconds(step, run.options.calls, run.device))
        for name, replay in steps["graph_us"].items():
            times[name]["graph_us"].append(harness.burst_timer(0.006)(replay) * 1e3)
    return times


def host_microseconds(step: Step, calls: int, device: str) -> float:
    """The clock per call of a series that nothing waits for."""
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    elapsed = time.perf_counter() - start
    synchronise()
    return elapsed / calls * 1e6


def rows(case: Case, head_dim: int, times: dict[str, dict[str, list[float]]]) -> Any:
    """A row for every call: medians and ranges of the columns that it has."""
    for name, series in times.items():
        row: dict[str, Any] = {"case": str(case), "head_dim": head_dim, "peer": name}
        for key, own in series.items():
            if own:
                row[key], row[f"{key}_range"] = harness.spread(own)
        yield row


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
