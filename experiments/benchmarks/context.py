"""Speed and bytes of a sequence over several GPUs, in both modes; correct first. Usage::

    python experiments/benchmarks/context.py                           # on all GPUs of a machine: tables and JSON
    python experiments/benchmarks/context.py --lengths                 # checks alone, no speeds

A causal layer's attention, forward and backward, over T tokens. "halo" and "heads" on all ranks are compared with one
GPU alone: without a decay, with one per token of a mean log-decay, and with ALiBi slopes. At --check-length every
tensor is held to the error budget, then out and every gradient of the timed inputs to within 2 eps of one GPU's. ms is
that of the slowest rank's mean of calls back to back (one call where that is longer than a round); "both" is a forward
and its backward in turns. received counts the bytes that all_to_all_single brings from others, not the gathered
summaries of the plan. A call adds the results that its --output lacks. Without a GPU two processes with gloo run.
"""

import argparse
import contextlib
import functools
import io
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared.ranks import on_ranks, whole_attention

from benchmarks import harness
from benchmarks.harness import DTYPES, Case, Prepared, Run, Timings
from decayattn import decay_attention
from decayattn.backends import registry
from decayattn.distributed import context_parallel_attention
from decayattn.testing import verify_attention

MODES = ("halo", "heads")
OPTIONS = {
    "ranks": (max(1, torch.cuda.device_count()), 2, "processes, one for each GPU"),
    "lengths": ([32768, 65536, 131072, 262144, 524288], [320], "sequence lengths T over all ranks; none: checks alone"),
    "heads": (32, 2, "query heads H"),
    "kv_heads": (8, 1, "key and value heads H_kv"),
    "head_dim": (128, 16, "head dimension D = D_v"),
    "dtype": harness.DTYPE,
    "decays": (["none", "-0.01", "-0.1", "alibi"], ["-2"], "none, alibi, or mean log-decays per token, natural log"),
    "backend": ("auto", "triton", "our backend", registry.NAMES),
    "check_length": (4096, 40, "tokens of the calls that are judged in float64"),
    "alone_up_to": (524288, 0, "longest sequence that one GPU runs alone, too", int),
    "seconds": (0.3, 0.3, "time that a round gives every call"),
    "limit": (300, 300, "seconds after which ranks that wait for another one end"),
    "rounds": (3, 3, "interleaved rounds"),
    "output": harness.output("benchmark_context.json"),
}
# options that all rows of a report share
SAME = ("ranks", "heads", "kv_heads", "head_dim", "dtype", "backend", "check_length", "alone_up_to", "rounds",
        "seconds")
RATES = ("none", "alibi")
ALONE = "one GPU"
FORWARD, BACKWARD, BOTH = TIMED = ("forward", "backward", "both")


def check_options(options: argparse.Namespace, cuda: bool) -> Iterator[str]:
    for decay in options.decays:
        if decay not in RATES:
            try:
                float(decay)
            except ValueError:
                yield f"--decays: expected none, alibi or a number, got {decay!r}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if anything is wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = harness.parse(sys.modules[__name__], argv)
    return on_ranks(work, options.ranks, harness.machine()[0], options.limit, options, argv)


def work(rank: int, options: argparse.Namespace, argv: list[str]) -> int:
    """Run one rank; the first one prints and writes."""
    with contextlib.redirect_stdout(io.StringIO()) if rank else contextlib.nullcontext():
        options.output = None if rank else options.output
        return harness.run_all(sys.modules[__name__], options, argv)


def measure(run: Run) -> None:
    """The calls that are judged in float64, then every workload that the report lacks."""
    options, group = run.options, dist.group.WORLD
    # every rank goes on with the report of the first one, which may have written it
    if dist.get_rank() == 0:
        run.resume(**{name: getattr(options, name) for name in SAME})
    everyone = [run.report]
    dist.broadcast_object_list(everyone)
    run.report = everyone[0] | {"ranks": options.ranks}
    checked = {(check["dtype"], check["decay"]) for check in run.report["checks"]}
    for dtype, decay, mode in itertools.product(dict.fromkeys([options.dtype, "float32"]), options.decays, MODES):
        if (dtype, decay) not in checked:
            inputs = case_of(options.check_length, options, dtype, decay).inputs(run.device, options.seed)
            part, ranks = options.check_length // options.ranks, options.ranks
            attend = whole_attention(group, mode, [part] * (ranks - 1) + [options.check_length - part * (ranks - 1)])
            heads = [(0, 0), (0, options.heads - 1)]
            found = verify_attention(**inputs, attend=attend, backend=options.backend, heads=heads)
            run.passed(found, mode=mode, dtype=dtype, decay=decay)
            run.report["checks"][-1]["errors"] = {
                c.name: {"over_budget": c.error / c.budget if c.budget else None, "relative": c.relative_error}
                for c in found}
    run.save()
    measured = {(row["length"], row["decay"]) for row in run.report["rows"]}
    for length, decay in itertools.product(options.lengths, options.decays) if not run.report["missing"] else ():
        if (length, decay) not in measured:
            measure_one(case_of(length, options, options.dtype, decay), decay, run, group)


def case_of(length: int, options: argparse.Namespace, dtype: str, decay: str) -> Case:
    """One causal sequence; decay is one of RATES, or a mean log-decay per token, as text."""
    kind, mean = {"none": ("none", 0.0), "alibi": ("constant", 0.0)}.get(decay) or ("scalar", float(decay))
    return Case(1, options.heads, length, options.head_dim, dtype, kind, mean, kv_heads=options.kv_heads,
                rates="alibi" if decay == "alibi" else "uniform")


def slice_of(length: int, group: dist.ProcessGroup) -> slice:
    """This rank's tokens."""
    part = length // dist.get_world_size(group)
    return slice(dist.get_rank(group) * part, (dist.get_rank(group) + 1) * part)


def prepare(mode: str, inputs: dict[str, Tensor], group: dist.ProcessGroup, backend: str) -> Prepared:
    """A call on leaves of its own; ALONE has whole tensors, a mode this rank's slice."""
    if mode == ALONE:
        return harness.prepare(functools.partial(decay_attention, backend=backend), inputs)
    mine = slice_of(inputs["q"].shape[1], group)
    attend = functools.partial(context_parallel_attention, group=group, mode=mode, backend=backend)
    return harness.prepare(attend, {name: x[:, mine].clone() if x.ndim > 1 else x for name, x in inputs.items()})


def results(call: Prepared) -> dict[str, Tensor]:
    """out and every gradient of a call."""
    out = call.forward()
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(call.wanted, call.backward(out), strict=True)}}


def measure_one(case: Case, decay: str, run: Run, group: dist.ProcessGroup) -> None:
    """Check one case against one GPU, count the bytes, then time it; wrong modes get no speed."""
    options, ranks = run.options, dist.get_world_size(group)
    print(f"\n{case}, {decay}", flush=True)
    inputs = case.inputs(run.device, options.seed)
    whole = None
    if case.length <= options.alone_up_to or run.device == "cpu":
        whole = results(prepare(ALONE, inputs, group, options.backend))
    calls, received, found = {}, {}, {}
    for mode in MODES:
        if case.length % ranks or (mode == "heads" and case.heads % ranks):
            print(f"  {mode}: {ranks} ranks do not divide this")
            continue
        call = prepare(mode, inputs, group, options.backend)
        if whole is None:
            call.forward()  # counted is the second call: the first one has something to prepare
        else:
            found[mode] = differences(call, whole, group)
            if wrong := objection(found[mode], case.dtype):
                run.missing("wrong", f"differs from one GPU alone: {wrong}", case=f"{case}, {decay}: {mode}")
                continue
        calls[mode], received[mode] = call, received_bytes(call, group)
    del whole
    timings: Timings = {}
    if run.timed:
        if case.length <= options.alone_up_to:
            calls[ALONE] = prepare(ALONE, inputs, group, options.backend)
        del inputs
        parts = {name: lambda call=call: itertools.chain(call.parts(), [(BOTH, lambda: call.backward(call.forward()))])
                 for name, call in calls.items()}
        timings = run.time(parts, lambda call: _milliseconds(call, options.seconds, group))
    about = {key: getattr(case, key) for key in ("length", "heads", "kv_heads", "head_dim", "dtype")} | {"decay": decay}
    run.add((about | row for row in rows(ranks, received, found, timings)), "{mode} {direction}",
            ("ms", "speed_over_alone", "received"))
    del calls
    if run.timed:
        torch.cuda.empty_cache()


def rows(
    ranks: int, received: dict[str, dict[str, list[int]]], found: dict[str, dict[str, float]], timings: Timings
) -> Iterator[dict[str, Any]]:
    """One row per mode and direction."""
    for name, direction in itertools.product([*received, *[ALONE] * ((ALONE, FORWARD) in timings)], TIMED):
        times, alone = timings.get((name, direction)), timings.get((ALONE, direction))
        yield (harness.spread(times) if times else {"ms": None, "ms_range": None}) | {
            "ranks": 1 if name == ALONE else ranks, "mode": name, "direction": direction,
            "speed_over_alone": statistics.median(alone) / statistics.median(times) if alone and times else None,
            "received": received.get(name, {}).get(direction), "difference": found.get(name),
        }


def received_bytes(call: Prepared, group: dist.ProcessGroup) -> dict[str, list[int]]:
    """direction → bytes that each rank receives from others in the exchanges of one call."""
    received: dict[str, int] = {FORWARD: 0, BACKWARD: 0}
    exchange, direction = dist.all_to_all_single, FORWARD

    def counting(
        output: Tensor, rows: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup, **options: bool
    ) -> object:
        others = sum(receive) - receive[dist.get_rank(group)]
        received[direction] += others * (output.nbytes // max(1, len(output)))
        return exchange(output, rows, receive, send, group=group, **options)

    with mock.patch.object(dist, "all_to_all_single", counting):
        out = call.forward()
        direction = BACKWARD
        call.backward(out)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, received, group=group)
    return {direction: [of_rank[direction] for of_rank in everyone] for direction in received}


def _milliseconds(call: Callable[[], object], seconds: float, group: dist.ProcessGroup) -> float:
    """Mean of calls back to back; no rank begins before the others are ready."""
    each = _slowest(call, 1, group)
    if each >= seconds * 1e3:
        return each  # seconds are minutes of a whole table
    each = _slowest(call, 2, group)  # the first one may have had something to prepare
    return _slowest(call, min(200, max(1, int(seconds * 1e3 / each))), group)


def _slowest(call: Callable[[], object], count: int, group: dist.ProcessGroup) -> float:
    """Milliseconds per call of the slowest rank; the ranks wait for one another."""
    torch.cuda.synchronize()
    found = torch.tensor([harness.back_to_back(call, count)], device="cuda", dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def differences(call: Prepared, whole: dict[str, Tensor], group: dist.ProcessGroup) -> dict[str, float]:
    """‖x − one GPU's‖ / ‖one GPU's‖ of the tensors of a mode, over the parts of all ranks."""
    result, mine = {}, slice_of(whole["out"].shape[1], group)
    for name, x in results(call).items():
        if x.ndim == 1:  # rates, which all ranks share
            dist.all_reduce(x, group=group)
        theirs = (whole[name][:, mine] if x.ndim > 1 else whole[name]).float()
        squares = torch.stack([(x.float() - theirs).square().sum(), theirs.square().sum()]).double()
        if x.ndim > 1:
            dist.all_reduce(squares, group=group)
        result[name] = math.sqrt(float(squares[0]) / max(float(squares[1]), 1e-300))
    return result


def objection(errors: dict[str, float], dtype: str) -> str:
    """Errors of over 2 eps, or "". In float32 sums that cancel, as those of dλ, lose more in any order."""
    allowed = 2 * max(torch.finfo(DTYPES[dtype]).eps, 16 * torch.finfo(torch.float32).eps)
    return ", ".join(f"{name} by {error:.1e}" for name, error in errors.items() if not error <= allowed)


if __name__ == "__main__":
    sys.exit(main())
