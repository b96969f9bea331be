"""Gain and cost of skip_tolerance; correct first. Usage::

    python experiments/benchmarks/skipping.py                                # on a GPU: all of it; tables, JSON, a plot
    python experiments/benchmarks/skipping.py --studies pruning --head-dims 64       # part of it, quickly

Four studies. planning: shapes where no tile can be skipped, which show what the plan costs; the plan alone is timed
too. pruning: one decay per token at 32,768 tokens, with cuDNN without a decay and the official Forgetting Transformer
kernel, which prunes by another rule. constant: ALiBi slopes and RetNet rates at 131,072 tokens, with what the visited
tiles promise. lengths: time over T. Timed in bursts, as attention.py does. plan_us (forward) and that of its mirror
(backward) are of one of 20 in a CUDA graph, the decay prefix being there; plan_share is over ms. visited: tiles of 64
rows × 128 keys that are visited, per head; ideal: the gain of a kernel with a time in proportion to them.

Up to 32,768 tokens all rows of two heads are held to the error budget; beyond, the last rows may be no more than twice
as wrong as without skipping, plus rounding. Results that leave their budget get no speed, and the exit status is 1.
Without a GPU there are no speeds: the kernels run in Triton's interpreter on small shapes, for their errors and for how
much they skip.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared.plots import frame, kilo, length_axis

from benchmarks import harness, peers
from benchmarks.harness import DIRECTIONS, Case, Prepared, Run, Timer, Timings
from benchmarks.peers import BASELINE, Peer
from decayattn import decay_attention, visited_fraction
from decayattn.backends import registry
from decayattn.nn.decay import alibi_log_decay, retnet_log_decay
from decayattn.normalize import tolerance_of
from decayattn.problem import AttentionProblem
from decayattn.testing import format_table, verify_attention

STUDIES = ("planning", "pruning", "constant", "lengths")
SKIPPING, WHOLE, PRUNED = "skipping", "whole", peers.PRUNED.name
# λ that decays nothing within any length: no tile can be skipped, and α alone says so
_NO_DECAY = -1e-6
# the float64 oracle judges whole heads up to this length, and the last rows of longer ones
WHOLE_HEADS = 32768
# plans in one graph: launching it takes longer than one of them
COPIES = 20
OPTIONS = {
    "studies": (list(STUDIES), list(STUDIES), "what to run", STUDIES),
    "head_dims": ([128, 64], [16], "head dimensions D = D_v"),
    "heads": (16, 2, "heads H"),
    "dtype": harness.DTYPE,
    "backend": ("auto", "triton", "our backend", registry.NAMES),
    "mean_log_decay": (-0.01, -0.5, "mean log-decay per token, natural log (drawn from [2m, 0])", float),
    "planning": (8192, 200, "sequence length of the study"),
    "tokens": (32768, 200, "tokens in a batch of that study: B = max(1, tokens // T)"),
    "pruning": (32768, 700, "sequence length of the study"),
    "constant": (131072, 700, "sequence length of the study"),
    "lengths": ([2048, 8192, 32768, 131072, 524288], [300], "sequence lengths of the study"),
    "whole_up_to": (131072, 300, "longest length at which nothing is skipped for comparison"),
    "seconds": (0.015, 0.015, "time of one figure"),
    "rounds": (5, 5, "interleaved rounds"),
    "output": harness.output("benchmark_skipping.json"),
}


@dataclass(frozen=True)
class Workload:
    """One causal problem of a study; `gain` multiplies q and k, so that scores grow by its square.

    rates: "uniform" (per token, as Case draws them), "none to speak of" (per token, −10⁻⁶), "alibi" or "retnet"
    (constant, one per head).
    """

    study: str
    case: Case
    rates: str = "uniform"
    gain: float = 1.0

    def __str__(self) -> str:
        case, gain = self.case, "" if self.gain == 1.0 else f", q and k times {self.gain:g}"
        return f"{self.study}: B{case.batch} H{case.heads} T{case.length} D{case.head_dim}, decay {self.rates}{gain}"

    def inputs(self, device: str, seed: int) -> dict[str, Tensor]:
        """q, k, v, grad_out (B, T, H, D), and log_decay in natural log."""
        inputs = self.case.inputs(device, seed)
        if self.rates == "none to speak of":
            inputs["log_decay"] = torch.full_like(inputs["log_decay"], _NO_DECAY)
        elif self.rates != "uniform":
            rates = alibi_log_decay if self.rates == "alibi" else retnet_log_decay
            inputs["log_decay"] = torch.tensor(rates(self.case.heads), device=device)
        for name in ("q", "k"):
            inputs[name] = inputs[name] * self.gain
        return inputs


def workloads(options: Any) -> list[Workload]:
    """The workloads of the four studies."""

    def case(length: int, head_dim: int, decay: str = "scalar", batch: int = 1) -> Case:
        return Case(batch, options.heads, length, head_dim, options.dtype, decay, options.mean_log_decay)

    found = []
    for dim in options.head_dims:
        unskipped = case(options.planning, dim, batch=max(1, options.tokens // options.planning))
        found += [
            Workload("planning", unskipped, "none to speak of"), Workload("planning", unskipped, gain=4.0),
            Workload("pruning", case(options.pruning, dim)),
            *(Workload("constant", case(options.constant, dim, "constant"), rates) for rates in ("alibi", "retnet")),
        ]
    return found + [Workload("lengths", case(length, max(options.head_dims))) for length in options.lengths]


def peers_of(study: str, backend: str) -> list[Peer]:
    """Calls of a study: without and with skipping, and in "pruning" those that compete."""
    chosen = [
        dataclasses.replace(peers.ours(backend, skip_tolerance=tolerance), name=name)
        for name, tolerance in ((WHOLE, None), (SKIPPING, "auto"))
    ]
    return [peers.OTHERS[BASELINE], peers.PRUNED, *chosen] if study == "pruning" else chosen


def measure(run: Run) -> None:
    """Check every workload, then time all calls on it."""
    options = run.options
    timer = harness.burst_timer(options.seconds)
    for workload in workloads(options):
        if workload.study not in options.studies:
            continue
        print(f"\n{workload}", flush=True)
        inputs = workload.inputs(run.device, options.seed)
        visited = visited_fraction(inputs["q"], inputs["k"], inputs["log_decay"])
        print(f"  visits {float(visited.mean()):.3f} of the tiles (heads {visited.min():.3f} to {visited.max():.3f})")
        if run.right(*compared(workload, inputs, options.backend), case=str(workload), peer=SKIPPING) and run.timed:
            run.report["rows"] += timed(workload, inputs, visited, run, timer)
            run.save()
            torch.cuda.empty_cache()


def timed(
    workload: Workload, inputs: dict[str, Tensor], visited: Tensor, run: Run, timer: Timer
) -> list[dict[str, Any]]:
    """The rows of one workload, which was right."""
    options = run.options
    prepared: dict[str, Prepared] = {}
    for peer in peers_of(workload.study, options.backend):
        if peer.name == WHOLE and workload.case.length > options.whole_up_to:
            continue
        with run.attempt(peer.backend is not None, case=str(workload), peer=peer.name):
            call = peer.prepare(workload.case, inputs)
            call.backward(call.forward())
            prepared[peer.name] = call
    timings, failed = harness.time_rounds(prepared, options.rounds, timer)
    for name, why in failed.items():
        run.missing(name in (SKIPPING, WHOLE), "failed", why, case=str(workload), peer=name)
    plan_us = {}
    if workload.study == "planning" and run.device == "cuda":
        for direction, call in plans(workload, inputs).items():
            call()  # compiles
            torch.cuda.synchronize()
            replay = harness.captured(call, COPIES).replay
            plan_us[direction] = harness.spread([timer(replay) for _ in range(options.rounds)])[0] * 1e3 / COPIES
    found = list(rows(workload, timings, visited, plan_us))
    keys = ("ms", "speed_over_whole", "ideal", "speed_over_cudnn", "speed_over_fox_pruned", "plan_us", "plan_share")
    lines = ([f"{row['peer']} {row['direction']}", *map(row.get, keys)] for row in found)
    print(harness.table(["", *keys], lines), flush=True)
    return found


def plans(workload: Workload, inputs: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """By direction, what the plan adds to a call's launches; nothing where the workload is not planned."""
    from decayattn.backends.planning import prefix as decay_prefix  # imports Triton
    from decayattn.backends.planning import skipping

    q, k, log_decay = (inputs[name] for name in ("q", "k", "log_decay"))
    tolerance = tolerance_of("auto", q.dtype)
    problem = AttentionProblem.of(q, k, log_decay, None, True, (-1, -1), skip_tolerance=tolerance)
    if not skipping.is_planned(problem):
        return {}
    prefix = decay_prefix.build(problem, log_decay) if problem.decay == "scalar" else decay_prefix.allocate(problem, q)

    def plan() -> Tensor:
        return skipping.plan(problem, q, k, log_decay, workload.case.head_dim**-0.5, prefix, None)

    first_block = plan()
    return {"forward": plan, "backward": lambda: skipping.last_granules(problem, first_block, None)}


def rows(
    workload: Workload, timings: Timings, visited: Tensor, plan_us: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """One row per call and direction; speeds are ratios of medians, above 1 is faster than the one that it names."""
    for (name, direction), times in timings.items():
        ms, ms_range = harness.spread(times)
        of_plan = plan_us.get(direction) if name == SKIPPING else None
        other = {against: timings.get((against, direction)) for against in (WHOLE, BASELINE, PRUNED)}
        speed = {against: harness.spread(found)[0] / ms if found else None for against, found in other.items()}
        yield {"study": workload.study, **dataclasses.asdict(workload.case)} | {
            "rates": workload.rates, "gain": workload.gain, "peer": name, "direction": direction, "ms": ms,
            "ms_range": ms_range, "speed_over_whole": speed[WHOLE], "speed_over_cudnn": speed[BASELINE],
            "speed_over_fox_pruned": speed[PRUNED], "plan_us": of_plan,
            "plan_share": None if of_plan is None else of_plan / (1e3 * ms),
            "visited": [float(x) for x in visited.mean(0)] if name == SKIPPING else None,
            "ideal": 1 / float(visited.mean()) if name == SKIPPING else None,
        }


# -------------------------------------------------------------------------------------------- checks: right before fast


def compared(workload: Workload, inputs: dict[str, Tensor], backend: str) -> tuple[list[str], list[str]]:
    """(tensors that are wrong with skip_tolerance="auto"; what was compared)."""
    case = workload.case
    if case.length > WHOLE_HEADS:
        return _last_rows(workload, inputs, backend)
    comparisons = verify_attention(
        inputs["q"], inputs["k"], inputs["v"], inputs["log_decay"], grad_out=inputs["grad_out"], backend=backend,
        heads=[(0, 0), (case.batch - 1, case.heads - 1)], skip_tolerance="auto",
    )
    return [c.name for c in comparisons if not c.passed], format_table(comparisons).splitlines()


def _last_rows(workload: Workload, inputs: dict[str, Tensor], backend: str) -> tuple[list[str], list[str]]:
    """‖x − x64‖ ≤ 2 ‖whole − x64‖ + eps ‖x64‖: whole is the same kernel without skipping, on the last rows alone."""
    case, rows = workload.case, harness.oracle_rows(workload.case)
    expected = harness.oracle(case, inputs, decay=True)
    of_rows = expected | {"dq": expected["dq"].view(case.length, -1)[-rows:].flatten()}
    whole = harness.relative_errors(case, _prepared(inputs, rows, None, backend), of_rows)
    skipping = harness.relative_errors(case, _prepared(inputs, case.length, "auto", backend), expected)
    eps = torch.finfo(inputs["q"].dtype).eps
    lines = [f"{name}: {skipping[name]:.2e}, without skipping {error:.2e}" for name, error in whole.items()]
    return [name for name, error in whole.items() if not skipping[name] <= 2 * error + eps], lines


def _prepared(inputs: dict[str, Tensor], rows: int, tolerance: str | None, backend: str) -> Prepared:
    wanted = {name: inputs[name].detach() for name in ("q", "k", "v", "log_decay")}
    wanted["q"] = wanted["q"][:, -rows:]
    for x in wanted.values():
        x.requires_grad_()

    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
        return decay_attention(q, k, v, log_decay, skip_tolerance=tolerance, backend=backend)

    return Prepared(attend, wanted, wanted, inputs["grad_out"][:, -rows:])


# --------------------------------------------------------------------------------------------------------------- figure

# colour-blind safe (Okabe and Ito)
_COLOURS = {WHOLE: "#000000", SKIPPING: "#d55e00"}
_BARS = ("#0072b2", "#56b4e9")


def draw(report: dict[str, Any]) -> Figure:
    """A panel of times over T, and one of speeds over the kernel that visits every tile, where they were measured."""
    over_length = [row for row in report["rows"] if row["study"] == "lengths"]
    compared = [row for row in report["rows"] if row["peer"] == SKIPPING and row["speed_over_whole"] is not None]
    compared = [row for row in compared if row["study"] != "lengths"]
    panels = [(panel, rows) for panel, rows in ((_times, over_length), (_gains, compared)) if rows]
    if not panels:
        raise ValueError("report: has no rows to draw")
    figure = Figure(figsize=(1.0 + 6.0 * len(panels), 4.8), dpi=150, layout="constrained")
    for (panel, rows), axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes, rows)
        frame(axes)
    figure.suptitle(f"{report['gpu']}, torch {report['torch']}, triton {report['triton']}", fontsize="medium")
    return figure


def _times(panel: Any, rows: list[dict[str, Any]]) -> None:
    for name, colour in _COLOURS.items():
        for direction, style in zip(DIRECTIONS, ("-", "--"), strict=True):
            own = [row for row in rows if (row["peer"], row["direction"]) == (name, direction)]
            own.sort(key=lambda row: row["length"])
            if own:
                lengths, times = zip(*((row["length"], row["ms"]) for row in own), strict=True)
                panel.plot(lengths, times, style, marker="o", color=colour, label=f"{name}, {direction}")
    panel.set_yscale("log")
    length_axis(panel, sorted({row["length"] for row in rows}))
    first = rows[0]
    panel.set(xlabel="sequence length", ylabel="ms")
    title = f"H{first['heads']} D{first['head_dim']}, λ uniform with mean {first['mean_log_decay']:g}"
    panel.set_title(title, fontsize="medium")
    panel.legend(frameon=False)


def _gains(panel: Any, rows: list[dict[str, Any]]) -> None:
    def group_of(row: dict[str, Any]) -> tuple:
        return row["rates"], row["gain"], row["head_dim"], row["length"]

    groups = list(dict.fromkeys(map(group_of, rows)))
    for at, direction in enumerate(DIRECTIONS):
        own = {group_of(row): row for row in rows if row["direction"] == direction}
        places = [n + 0.4 * at - 0.2 for n in range(len(groups))]
        panel.bar(places, [own[group]["speed_over_whole"] for group in groups], 0.4, color=_BARS[at], label=direction)
        if not at:
            marks = {"marker": "_", "s": 400, "color": "#000000", "zorder": 3}
            panel.scatter(range(len(groups)), [own[group]["ideal"] for group in groups], label="visited tiles", **marks)
    names = [
        f"{rates}{f', q and k times {gain:g}' if gain != 1 else ''}\nD{dim} T{kilo(length)}"
        for rates, gain, dim, length in groups
    ]
    panel.set_xticks(range(len(groups)), names, fontsize="x-small", rotation=45, ha="right")
    panel.set_yscale("log")
    panel.axhline(1.0, color="#000000", linewidth=0.8)
    panel.set_ylabel("speed over the kernel that visits every tile")
    panel.legend(frameon=False)


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
