"""The marked blocks about models and sequences over several GPUs."""

from typing import Any

from readme_tables.learning import NOT_MEASURED, table
from readme_tables.results import Results

STRATEGIES_FILE = "benchmark_strategies.json"
CONTEXT_FILE = "benchmark_context.json"
SIMULATION_FILE = "simulate_context.json"
_DIRECTIONS = ("forward", "backward")
_TIMED = (*_DIRECTIONS, "both")


def strategies(results: Results) -> list[str]:
    """Loss and speed of the toy language model on several devices beside one."""
    if not results.has(STRATEGIES_FILE):
        return [NOT_MEASURED]
    report = results.load(STRATEGIES_FILE)
    setup = report["setup"]
    head = ["run", "thousand tokens per second", "× one GPU", "validation, bits per byte", "training loss − one GPU's",
            "at most, in a step"]
    rows = []
    for row in report["rows"]:
        cells = [f"{row['tokens_per_second'] / 1e3:.0f}", f"{row['speed_over_one']:.2f}"]
        cells += [f"{row['validation_bits']['bits'][-1]:.4f}", f"{row['difference']:+.4f}"]
        rows.append([row["run"], *cells, f"{row['largest_difference']:.4f}"])
    about = "{layers} layers, width {width}, context {context:,}, batch {batch_size}, {steps} steps".format(**setup)
    where = f"{setup['devices']} × {report['gpu']}, torch {report['torch'].split('+')[0]}, {about}"
    return [f"![losses and speeds]({results.prefix}benchmark_strategies.png)", "", *table(head, rows), "",
            f"{where} ({results.link(STRATEGIES_FILE)})."]


def context(results: Results) -> list[str]:
    """A layer's attention over several GPUs beside one: milliseconds, speed and bytes."""
    if not results.has(CONTEXT_FILE):
        return [NOT_MEASURED]
    report = results.load(CONTEXT_FILE)
    rows = {(row["length"], row["decay"], row["mode"], row["direction"]): row for row in report["rows"]}
    lengths = sorted({row["length"] for row in report["rows"]})
    decays = list(dict.fromkeys(row["decay"] for row in report["rows"]))
    modes = [mode for mode in dict.fromkeys(row["mode"] for row in report["rows"]) if mode in ("halo", "heads")]
    timed = [direction for direction in _TIMED if direction in {row["direction"] for row in report["rows"]}]
    head = [" / ".join(timed), *(f"T{length}" for length in lengths)]
    lines = []
    for decay in decays:
        for mode in modes:
            cells = [[rows.get((length, decay, mode, direction)) for direction in timed] for length in lengths]
            lines.append([f"{_decay(decay)}, {mode}", *(_context_cell(pair) for pair in cells)])
    first = next(row for row in report["rows"] if row["mode"] in modes)
    worst = max(
        (error["over_budget"] for check in report["checks"] for error in check["errors"].values()
         if error["over_budget"] is not None), default=None,
    )
    checked = f" Largest error of {len(report['checks'])} checked cases over its budget: {worst:.2f}." if worst else ""
    shape = f"H{first['heads']} H_kv{first['kv_heads']} D{first['head_dim']} {first['dtype']}"
    where = f"{report['ranks']} × {report['gpu']}, {shape}, torch {report['torch'].split('+')[0]}"
    return [f"![bytes and speeds]({results.prefix}benchmark_context.png)", "", *table(head, lines), "",
            f"Speed over one GPU with the whole sequence (MB that a rank receives). {where} "
            f"({results.link(CONTEXT_FILE)}).{checked}"]


def _context_cell(pair: list[dict[str, Any] | None]) -> str:
    speeds = " / ".join("–" if not row or not row["speed_over_alone"] else f"{row['speed_over_alone']:.2f}"
                        for row in pair)
    sent = [max(row["received"]) / 1e6 for row in pair if row and row["received"]]
    return f"{speeds} ({' / '.join(map(_three_figures, sent))})" if sent else speeds


def _three_figures(x: float) -> str:
    """As many digits as it takes, and no exponent."""
    return f"{float(f'{x:.3g}'):,g}" if abs(x) < 1e5 else f"{x:,.0f}"


def simulation(results: Results) -> list[str]:
    """On paper: milliseconds on more GPUs than were measured."""
    if not results.has(SIMULATION_FILE):
        return [NOT_MEASURED]
    report = results.load(SIMULATION_FILE)
    ranks = list(dict.fromkeys(row["ranks"] for row in report["rows"]))
    rows = {(row["decay"], row["mode"], row["direction"], row["ranks"]): row for row in report["rows"]}
    head = ["ms forward / backward (× one GPU)", "one GPU", *(f"{number} GPUs" for number in ranks)]
    lines = []
    for decay, mode in dict.fromkeys((row["decay"], row["mode"]) for row in report["rows"]):
        found = [[rows[decay, mode, direction, number] for direction in _DIRECTIONS] for number in ranks]
        alone = " / ".join(_three_figures(row["one_gpu_ms"]) for row in found[0])
        cells = []
        for pair in found:
            if pair[0]["ms"] is None:
                cells.append("–")
                continue
            times = " / ".join(_three_figures(row["ms"]) for row in pair)
            speeds = " / ".join(f"{row['speed_over_one']:.0f}" for row in pair)
            cells.append(f"{times} ({speeds})")
        lines.append([f"{_decay(decay)}, {mode}", alone, *cells])
    said = (
        f"One layer, T = {report['length']:,}; not run: calculated from {results.link(CONTEXT_FILE, 'the measured')} "
        f"times and bytes, {report['bandwidth'] / 1e9:.0f} GB/s within {report['node']} GPUs (measured between "
        f"{report['measured_ranks']}) and {report['network'] / 1e9:.0f} GB/s beyond (assumed) "
        f"({results.link(SIMULATION_FILE)})."
    )
    return [*table(head, lines), "", said]


def _decay(decay: str) -> str:
    return {"none": "no decay", "alibi": "ALiBi"}.get(decay, f"mean λ {decay.replace('-', '−')}")


BLOCKS = {"strategies": strategies, "context": context, "simulation": simulation}
