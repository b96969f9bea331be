"""What a small call costs the host, and the device once it is captured in a CUDA graph.

    python experiments/benchmark_overhead.py                        # on a GPU: a table and JSON
    python experiments/benchmark_overhead.py --length 512 --peers fla
    python experiments/benchmark_overhead.py --before ../before     # beside a checkout of another commit
    python experiments/benchmark_overhead.py --packed               # packed sequences, too: of one total, and of many
    python experiments/benchmark_overhead.py --profile              # and in which functions a call of ours spends it

At B1 H8 T256 the kernels take microseconds, so what a training step waits for is Python: checking arguments,
allocating, launching. Host time is the clock over a series of forward and backward calls that nothing waits for; every
call is made as training makes it, and once more in one thread: autograd gives a backward on a GPU to a thread of that
GPU, and the difference is what waking it and waiting for it cost. A CUDA graph replays the same launches without the
host; its time is the device's. Interleaved rounds, medians with their range. Without a GPU the host times of the eager
reference are printed, which says nothing about kernels.
"""

import argparse
import cProfile
import dataclasses
import itertools
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from shared import other_versions, peers
from shared.calls import Prepared, prepare
from shared.cases import DTYPES, Case, random_inputs
from shared.options import before_commit, declare, declare_before, declare_output, positive
from shared.peers import BASELINE, Absent, reason
from shared.provenance import ROOT, provenance
from shared.report import write
from shared.timing import cuda_timer

import decayattn
from decayattn.backends import registry

METHOD = {
    "host_us": "microseconds of the clock per forward and backward, over a series of calls between two "
    "synchronisations: median over interleaved rounds, and [least, largest]",
    "one_thread_us": "as host_us, under torch.autograd.set_multithreading_enabled(False): the backward in the thread "
    "that calls it; not of packed calls",
    "graph_us": "microseconds of the device per replay of one captured forward and backward, by CUDA events, as above",
    "ours": "with every default, skip_tolerance among them",
    "packed": "two sequences in one, T tokens in all; other totals: in every call one token more than in the last",
}
GPU_DEFAULTS = {
    "dtype": "bfloat16", "head_dims": [64, 128], "backends": ["auto", "triton"], "calls": 50,
    "output": ROOT / "results/benchmark_overhead.json",
}
CPU_DEFAULTS = {"dtype": "float32", "head_dims": [16], "backends": ["reference"], "calls": 2}
# of the printed table: what a column is called, and its decimals
COLUMNS = {"host_us": ("host µs", 0), "one_thread_us": ("one thread", 0), "graph_us": ("graph µs", 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a call of ours fails."""
    argv = sys.argv[1:] if argv is None else list(argv)
    cuda = torch.cuda.is_available()
    options = parse(argv, cuda)
    result = provenance("experiments/benchmark_overhead.py", argv, options.commit)
    result |= {"before": before_commit(options), "method": METHOD, "rounds": options.rounds, "missing": [], "rows": []}
    for head_dim in options.head_dims:
        case = Case(options.batch, options.heads, options.length, head_dim, options.dtype, "scalar", -0.01)
        print(f"\n{case}", flush=True)
        result["rows"] += run(case, options, result["missing"], "cuda" if cuda else "cpu")
    if options.output:
        write(result, options.output)
        print(f"\nwrote {options.output}")
    return int(any(entry["ours"] for entry in result["missing"]))


def parse(argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options, defaults filled in for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = declare(parser, GPU_DEFAULTS if cuda else CPU_DEFAULTS)
    option("--batch", "sequences B", type=positive, default=1)
    option("--heads", "heads H", type=positive, default=8)
    option("--length", "sequence length T", type=positive, default=256)
    option("--head-dims", "head dimensions D = D_v", type=positive, nargs="+", metavar="D")
    option("--dtype", "dtype of q, k, v", choices=tuple(DTYPES))
    option("--backends", "our backends", choices=registry.NAMES, nargs="+")
    option(
        "--peers",
        "calls to compare with",
        choices=tuple(peers.OTHERS),
        nargs="*",
        default=[BASELINE, "flex-grad", "fla"],
    )
    declare_before(option)
    option("--packed", "decay_attention_varlen, too", action="store_true", default=False)
    option("--profile", "print the functions with the most time of their own", action="store_true", default=False)
    option("--rounds", "interleaved rounds", type=positive, default=7)
    option("--calls", "calls of a round", type=positive)
    declare_output(option, "JSON file; None writes none")
    return parser.parse_args(argv)


def ours(backend: str, version: ModuleType = decayattn) -> peers.Peer:
    """decay_attention with every default but the backend."""

    def build(case: Case, device: torch.device) -> peers.Attend:
        return lambda q, k, v, log_decay: version.decay_attention(q, k, v, log_decay, backend=backend)

    return peers.Peer(f"decayattn {backend}", "decay and its gradient", "BTHD", "learned", build, backend)


def before(tree: Path, backend: str) -> peers.Peer:
    """The same of another version of the package; one that fails is reported and does not fail the run."""
    peer = ours(backend, other_versions.load(tree))
    return dataclasses.replace(peer, name=f"{peer.name} before", backend=None)


def run(case: Case, options: argparse.Namespace, missing: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """A row for every call that can be made."""
    inputs = random_inputs(case, device, seed=0)
    host, graphs = {}, {}
    measured = [*(peers.OTHERS[name] for name in options.peers), *map(ours, options.backends)]
    if options.before:
        measured += [before(options.before, backend) for backend in options.backends]
    for peer in measured:
        try:
            call = prepare(peer, case, inputs)
            step = _step(call)
            for _ in range(3):
                step()
            host[peer.name] = step
            if device == "cuda":
                graphs[peer.name] = captured(step)
        except Exception as error:  # one call that fails must not take the others with it; ours fails the run
            kind = "absent" if isinstance(error, Absent) else "failed"
            entry = {"case": str(case), "peer": peer.name, "ours": peer.backend is not None}
            missing.append(entry | {"kind": kind, "reason": reason(error)})
            print(f"  {peer.name}: {kind}: {reason(error)}", flush=True)
    in_one_thread = dict(host)
    if options.packed:
        host |= packed_steps(case, options, device)
    times: dict[str, dict[str, list[float]]] = {name: {key: [] for key in COLUMNS} for name in host}
    for _ in range(options.rounds):
        for name, step in host.items():
            times[name]["host_us"].append(host_microseconds(step, options.calls, device))
        with torch.autograd.set_multithreading_enabled(False):
            for name, step in in_one_thread.items():
                times[name]["one_thread_us"].append(host_microseconds(step, options.calls, device))
        for name, replay in graphs.items():
            times[name]["graph_us"].append(cuda_timer(2.0, 6.0)(replay) * 1e3)
    rows = []
    for name, series in times.items():
        row: dict[str, Any] = {"case": str(case), "head_dim": case.head_dim, "peer": name}
        for key, own in series.items():
            if own:
                row |= {key: statistics.median(own), f"{key}_range": [min(own), max(own)]}
        rows.append(row)
    print(table(rows), flush=True)
    if options.profile:
        own = tuple(ours(backend).name for backend in options.backends)
        for name, step in host.items():
            if name.startswith(own):
                print(f"\n{name}, µs per call:\n{profile(step, options.calls)}", flush=True)
    return rows


def packed_steps(case: Case, options: argparse.Namespace, device: str) -> dict[str, Callable[[], object]]:
    """Forward and backward on two packed sequences, by name: of the same total in every call, and of another one."""
    versions = {"": decayattn} | ({" before": other_versions.load(options.before)} if options.before else {})
    steps = {}
    for backend in options.backends:
        for suffix, version in versions.items():
            for totals, what in ((1, "packed"), (options.calls * options.rounds + 3, "other totals")):
                name = f"decayattn {backend}, {what}{suffix}"
                steps[name] = packed_step(case, totals, version.decay_attention_varlen, backend, device)
                for _ in range(3):
                    steps[name]()
    return steps


def packed_step(
    case: Case, totals: int, attend: Callable[..., torch.Tensor], backend: str, device: str
) -> Callable[[], object]:
    """A call on one of so many totals after the other, the last of which is the longest."""
    longest = case.length + totals - 1
    inputs = random_inputs(dataclasses.replace(case, batch=1, length=longest), device, seed=0)
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


def _step(call: Prepared) -> Callable[[], object]:
    return lambda: call.backward(call.forward())


def host_microseconds(step: Callable[[], object], calls: int, device: str) -> float:
    """The clock per call of a series that nothing waits for."""

    def synchronise() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    synchronise()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    elapsed = time.perf_counter() - start
    synchronise()
    return elapsed / calls * 1e6


def profile(step: Callable[[], object], calls: int) -> str:
    """Functions by their own time per call; the profiler makes Python slower, and C not."""
    profiler = cProfile.Profile()
    # the backward in this thread, or the profiler does not see it
    with torch.autograd.set_multithreading_enabled(False), profiler:
        for _ in range(calls):
            step()
    found = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])[:30]
    lines = []
    for (file, line, name), (_, count, own, cumulative, _) in found:
        where = f"{Path(file).parent.name}/{Path(file).name}:{line} {name}" if line else name
        microseconds = (1e6 * x / calls for x in (own, cumulative))
        lines.append("{:8.1f} {:8.1f} with callees {:7.1f} ×  {}".format(*microseconds, count / calls, where))
    return "\n".join(lines)


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The launches of one call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def table(rows: list[dict[str, Any]]) -> str:
    """A line per call."""
    lines = [" " * 40 + "".join(f"{title:>11} {'[range]':>13}" for title, _ in COLUMNS.values())]
    for row in rows:
        cells = (
            f"{row[key]:11.{decimals}f} {_range(row[f'{key}_range']):>13}" if key in row else " " * 25
            for key, (_, decimals) in COLUMNS.items()
        )
        lines.append(f"  {row['peer']:38}{''.join(cells)}".rstrip())
    return "\n".join(lines)


def _range(bounds: list[float]) -> str:
    return f"[{bounds[0]:.0f}–{bounds[1]:.0f}]"


if __name__ == "__main__":
    sys.exit(main())
