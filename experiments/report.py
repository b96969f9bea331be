"""Write the tables of README.md and experiments/README.md, and the picture of speeds, from the JSON in results/.

    python experiments/report.py            # rewrites the blocks from <!-- table: NAME --> to <!-- end -->
    python experiments/report.py --check    # changes nothing; exit status 1 and a diff where page and JSON disagree

A JSON file must name its commit, its GPU, the versions of torch and Triton, and the command. It is refused without
them, or if its code differed from its commit, by git's status then or by the trees that it names: exit status 1. The
picture holds the digest of its figures, by which --check finds an old one.
"""

import argparse
import difflib
import functools
import hashlib
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib
from benchmarks.sequences import PAGE, PAGED
from benchmarks.training import BASELINE, IDENTITY, setting_of
from language_models.schemes import SCHEMES
from matplotlib.figure import Figure
from shared.provenance import ROOT, trees_of
from studies.length_extrapolation import DEPTHS, bits_of, cells_of_table, kilo, runs_of, sizes_of
from studies.recall import in_order, selected

# the pages, and the folder of results as each links to it
PAGES = {"README.md": "results/", "experiments/README.md": "../results/"}
PICTURE = "speed.svg"
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ORIGIN = ("commit", "torch", "triton", "command")  # and the GPU
WAYS = ("forward", "backward")
Report = dict[str, Any]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite the pages, or compare them; the exit status is 1 if they disagree or a file is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check, same = parser.parse_args(argv).check, True
    picture = root / "results" / PICTURE
    try:
        new = {root / name: rewritten(root / name, Results(root / "results", at)) for name, at in PAGES.items()}
        bars = bars_of(Results(root / "results"))
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    if not (picture.exists() and digest_of(bars) in picture.read_text(encoding="utf-8")):
        new[picture] = svg(bars)
    for path, text in new.items():
        old, name = path.read_text(encoding="utf-8") if path.exists() else "", str(path.relative_to(root))
        if old != text:
            same = False
            lines = (old.splitlines(keepends=True), text.splitlines(keepends=True))
            difference = difflib.unified_diff(*lines, name, f"{name} from the JSON")
            sys.stdout.writelines([f"{name} is not of the JSON\n"] if path == picture else difference)
            if not check:
                path.write_text(text, encoding="utf-8")
    return int(check and not same)


def rewritten(path: Path, results: "Results") -> str:
    """The page with all of its blocks made again."""

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in BLOCKS:
            raise Refused(f"{path.name}: expected one of {', '.join(BLOCKS)}, got table {name}; correct its name")
        return begin + "\n".join(BLOCKS[name](results)) + "\n" + end

    return _BLOCK.sub(block, path.read_text(encoding="utf-8"))


class Refused(Exception):
    """A file in results/ that may not be quoted; the message gives the reason."""


@dataclass(frozen=True)
class Results:
    """A folder of results, and its name in links of a page ("results/", or "../results/")."""

    folder: Path
    prefix: str = "results/"

    def link(self, name: str, text: str = "JSON") -> str:
        return f"[{text}]({self.prefix}{name})"

    def load(self, name: str) -> Report:
        """The JSON file of that name with its origin. Raises Refused unless the origin is complete, and for code that
        was not the commit's: by git's status then ("dirty"), or by the code's trees, where git knows the commit."""
        if not (self.folder / name).exists():
            raise Refused(f"results/{name}: not found; run its script, or remove its block from the page")
        report = json.loads((self.folder / name).read_text(encoding="utf-8"))
        report |= report.pop("provenance", {})  # some files keep it apart
        absent = [key for key in _ORIGIN if not report.get(key)]
        if not report.get("gpu") and "+cpu" not in str(report.get("torch")):
            absent.append("gpu")  # without one, only a torch for CPUs is believed
        if absent:
            raise Refused(f"results/{name}: lacks {', '.join(absent)}; it cannot be measured again")
        trees = {folder: tree for folder, tree in report.get("trees", {}).items() if tree}
        known = trees_of(report["commit"], self.folder) if trees else None
        differ = [folder for folder in trees if known is not None and trees[folder] != known.get(folder)]
        if report.get("dirty") or differ:
            raise Refused(f"results/{name}: {' and '.join(differ) or 'the code'} differed from commit "
                          f"{report['commit'][:9]} when it was measured")
        return report


BLOCKS: dict[str, Callable[[Results], list[str]]] = {}


def block(*names: str) -> Callable[[Callable[..., list[str]]], Callable[[Results], list[str]]]:
    """Register a block under its function's name; the function takes the results and the reports of these files."""

    def register(lines: Callable[..., list[str]]) -> Callable[[Results], list[str]]:
        return BLOCKS.setdefault(lines.__name__, lambda results: lines(results, *map(results.load, names)))

    return register


# ------------------------------------------------------------------------------------------------------ parts of tables


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of Markdown."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "|" + "---|" * (first.count(" | ") + 1), *others]


def pivot(
    corner: str, rows: Mapping[Any, str], columns: Mapping[Any, str], cell: Callable[[Any, Any], str]
) -> list[str]:
    """A table of cell(row, column), the labels of both by their keys; a dash where it is empty."""
    lines = ([label, *(cell(row, column) or "–" for column in columns)] for row, label in rows.items())
    return table([corner, *columns.values()], lines)


def index(rows: Iterable[Report], *names: str) -> dict[Any, Report]:
    """The rows by these values of theirs."""
    return {tuple(row[name] for name in names): row for row in rows}


def each(found: dict[Any, Report], figure: str, *key: Any) -> list[float | None]:
    """A figure of both directions, of rows with the direction as their last key."""
    return [found.get((*key, way), {}).get(figure) for way in WAYS]


def both(values: Iterable[float | None], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """The values in a cell, such as those of forward and backward."""
    return " / ".join("–" if x is None else form(x) for x in values)


def three_digits(x: float) -> str:
    """Three digits at least, and no exponent."""
    return f"{x:#.3g}".rstrip(".") if abs(x) < 999.5 else f"{x:,.0f}"


def where(report: Report, parts: int = 4) -> str:
    """The GPU and the first of the versions."""
    cudnn = int(report.get("cudnn") or 0)
    said = [report["gpu"], f"torch {report['torch'].split('+')[0]}", f"Triton {report['triton']}"]
    return ", ".join([*said, *[f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}"] * bool(cudnn)][:parts])


def wrapped(text: str) -> list[str]:
    """Lines of at most 119 characters."""
    return textwrap.wrap(text, 119, break_long_words=False, break_on_hyphens=False)


# --------------------------------------------------------------------------------------------------- speed of attention

SPEED_FILE = "benchmark_sustained.json"
# tables of their own: file, title, causal
MORE_SPEEDS = (
    ("benchmark_sustained_not_causal.json", "Not causal", False),
    ("benchmark_sustained_wide.json", "More than 128 columns (D, or D/D_v)", True),
    ("benchmark_sustained_scales.json", "A scale per row of ours, and its gradient", True),
    ("benchmark_sustained_logits.json", "Logits with a standard deviation of 16", True),
    ("benchmark_sustained_fla.json", "fla's kernels for Hopper", True),
)
_OURS = {"ours": "decayattn", "triton": "decayattn's Triton kernels"}
_DECAYS = {"": "decay and its gradient", ", no decay": "no decay", ", constant": "a constant per head and its gradient"}
_DECAYS |= {f"{name}, deterministic": f"{label}, deterministic" for name, label in _DECAYS.items()}
LABELS = {f"{name}{decay}": f"{label}, {gets}" for name, label in _OURS.items() for decay, gets in _DECAYS.items()} | {
    "flash_attn": "FlashAttention-4, no decay",
    "flex": "FlexAttention, decay without its gradient",
    "fox": "Forgetting Transformer, decay and its gradient",
    "fla": "flash-linear-attention, decay and its gradient",
    "fla tilelang": "flash-linear-attention (TileLang), decay and its gradient",
    "fla gluon": "flash-linear-attention (Gluon), decay and its gradient",
    "cudnn": "cuDNN (PyTorch SDPA), no decay",
}
# figures of every kernel (ms, ms_range, tflops, ratio_to_cudnn), by shape (D, D_v, T, B, H) and direction
Speeds = dict[tuple[tuple[int, ...], str], dict[str, Report]]


def speeds(report: Report, causal: bool = True) -> Speeds:
    """The rows of benchmarks/attention.py, causal or not."""
    return {
        ((row["head_dim"], row.get("value_dim") or row["head_dim"], row["length"], row["batch"], row["heads"]),
         row["direction"]): row["kernels"] for row in report["rows"] if row["causal"] == causal
    }


def speed_table(found: Speeds) -> list[str]:
    """A row per kernel, a column per shape."""
    columns = {
        shape: f"D{shape[0]}" + f"/{shape[1]}" * (shape[0] != shape[1]) + f" T{shape[2]} B{shape[3]}"
        for shape in sorted({shape for shape, _ in found})
    }
    (heads,) = {shape[-1] for shape in columns}
    names = [name for name in LABELS if any(name in kernels for kernels in found.values()) and name != "cudnn"]
    rows = {(name, "ratio_to_cudnn"): LABELS[name] for name in names}
    rows |= {(name, "tflops"): f"{LABELS[name]}, TFLOP/s" for name in ("cudnn", names[0])}
    mine = ("ours", "ratio_to_cudnn")  # readers look for it first

    def cell(row: tuple[str, str], shape: tuple[int, ...]) -> str:
        values = (found.get((shape, way), {}).get(row[0], {}).get(row[1]) for way in WAYS)
        text = both(values, "{:.0f}".format if row[1] == "tflops" else "{:.2f}".format)
        return f"**{text}**" if row == mine else text

    rows |= {mine: f"**{rows[mine]}**"} if mine in rows else {}
    return pivot(f"forward / backward, H{heads}", rows, columns, cell)


@block(SPEED_FILE)
def attention(results: Results, report: Report) -> list[str]:
    """Speeds relative to cuDNN; then the tables of other calls."""
    replayed = ", replayed by CUDA graphs" * bool(report.get("captured"))
    said = (f"{where(report)}; bfloat16, causal; sustained: calls back to back{replayed}, at the power limit "
            f"({results.link(SPEED_FILE)}).")
    lines = [*speed_table(speeds(report)), "", said]
    for name, title, causal in MORE_SPEEDS:
        more = results.load(name)
        said = f"{title}, Triton {more['triton']} ({results.link(name)}):"
        lines += ["", said, "", *speed_table(speeds(more, causal))]
    return lines


_INK = "#1f2328"  # becomes light on a dark page
_BARS = {"ours": "#d55e00", "ours, no decay": "#e69f00", "flash_attn": "#999933", "flex": "#56b4e9", "fla": "#009e73",
         "fox": "#cc79a7"}
_STYLE = f"<style>svg {{ color: {_INK} }} @media (prefers-color-scheme: dark) {{ svg {{ color: #e6edf3 }} }}</style>"
Bars = list[list[Any]]  # kernel, shape, direction, speed relative to cuDNN


def bars_of(results: Results) -> Bars:
    """Bars of the picture; all of one process."""
    return [
        [kernel, f"D = {shape[0]}\nT = {shape[2]}\nB = {shape[3]}", way, figures["ratio_to_cudnn"]]
        for (shape, way), kernels in sorted(speeds(results.load(SPEED_FILE)).items())
        for kernel, figures in kernels.items() if kernel in _BARS and figures["ratio_to_cudnn"] is not None
    ]


def title_of(bars: Bars) -> str:
    own = {way: [ratio for kernel, _, at, ratio in bars if (kernel, at) == ("ours", way)] for way in WAYS}
    said = ", ".join(f"{way} {min(ratios):.2f} to {max(ratios):.2f}" for way, ratios in own.items())
    return f"Speed of attention with a decay, relative to cuDNN without one: {said}"


def digest_of(bars: Bars) -> str:
    """Digest of the title and the figures."""
    return hashlib.sha256(json.dumps([title_of(bars), bars], sort_keys=True).encode()).hexdigest()[:16]


def svg(bars: Bars) -> str:
    """A panel per direction, a group of bars per shape; the same text for the same figures with one matplotlib."""
    figure, file = Figure(figsize=(10, 3.4), layout="constrained"), StringIO()
    kernels = [name for name in LABELS if any(kernel == name for kernel, *_ in bars)]
    shapes = list(dict.fromkeys(shape for _, shape, *_ in bars))
    width = 0.84 / len(kernels)
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "decayattn", "font.size": 9, **ink}):
        for panel, way in zip(figure.subplots(1, 2, sharey=True), WAYS, strict=True):
            for at, name in enumerate(kernels):
                ratios = {shape: x for kernel, shape, direction, x in bars if (kernel, direction) == (name, way)}
                places = [shapes.index(shape) + (at - (len(kernels) - 1) / 2) * width for shape in ratios]
                label = LABELS[name].replace("and its", "+").replace("without its", ", no").replace(" ,", ",")
                drawn = panel.bar(places, list(ratios.values()), 0.9 * width, color=_BARS[name], label=label)
                if name == "ours":
                    panel.bar_label(drawn, fmt="%.2f", rotation=90, padding=-18, color="#ffffff", fontsize=7)
            panel.axhline(1.0, color=_INK, linewidth=0.8)
            panel.text(len(shapes) - 0.5, 1.01, "cuDNN", ha="right", fontsize=7)
            panel.set_xticks(range(len(shapes)), shapes, fontsize=7)
            panel.set_title(way, fontsize="medium")
            panel.grid(axis="y", alpha=0.2, color=_INK)
            panel.spines[["top", "right"]].set_visible(False)
        figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
        about = {"Date": None, "Title": title_of(bars), "Description": f"figures {digest_of(bars)}"}
        figure.savefig(file, format="svg", transparent=True, metadata=about)
    return file.getvalue().replace("<defs>", f"{_STYLE}\n <defs>", 1).replace(_INK, "currentColor").replace(
        "color: currentColor", f"color: {_INK}", 1)


@block(SPEED_FILE)
def pictures(results: Results, report: Report) -> list[str]:
    """The picture of speeds, with one line on their source."""
    gpu = report["gpu"].removeprefix("NVIDIA ").split()[0]
    said = f"cuDNN attention without a decay: all kernels in one process, on an {gpu} ([method](#how-fast))."
    return [f"![{title_of(bars_of(results))}]({results.prefix}{PICTURE})", "", f"Speed relative to {said}"]


# ------------------------------------------------------------------------------- skipping, sequences, time of the host

SKIPPING_FILE = "benchmark_skipping.json"


@block(SKIPPING_FILE)
def skipping(results: Results, report: Report) -> list[str]:
    """Milliseconds with and without the tiles that cannot matter."""
    peers = {
        "skipping": "**decayattn, what is skipped ≤ 2⁻²⁴ of any row**", "whole": "decayattn, nothing skipped",
        "fox pruned": "Forgetting Transformer, pruned at e⁻¹⁰", "cudnn": "cuDNN, no decay, nothing skipped",
        "": "fraction of the tiles that is visited",
    }
    found = index(report["rows"], "study", "rates", "head_dim", "length", "peer", "direction")
    columns = {
        (study, rates, dim, length): f"{label}, T{length} D{dim}"
        for study, rates, label in (("pruning", "uniform", "mean λ −0.01"), ("constant", "alibi", "ALiBi"))
        for dim, length in sorted({key[2:4] for key in found if key[:2] == (study, rates)})
    }

    def cell(peer: str, column: tuple) -> str:
        if not peer:
            return f"{1 / found[(*column, 'skipping', 'forward')]['ideal']:.2f}"
        return both(each(found, "ms", *column, peer), three_digits)

    corner = f"ms forward / backward; {report['gpu']}, bfloat16, causal, B1 H16 ({results.link(SKIPPING_FILE)})"
    return pivot(corner, peers, columns, cell)


@block(SKIPPING_FILE)
def planning(results: Results, report: Report) -> list[str]:
    """Cost of looking for tiles to skip where there are none."""
    rows = []
    for row in report["rows"]:
        if (row["study"], row["peer"], row["direction"]) == ("planning", "skipping", "forward"):
            reads = "decays" if row["rates"] == "none to speak of" else "decays, q and k"
            whole = row["ms"] * row["speed_over_whole"]  # a speed over another is the other's time over its own
            rows.append([f"B{row['batch']} T{row['length']} D{row['head_dim']}", reads, f"{row['plan_us']:.0f} µs",
                         f"{whole:.2f} ms", f"{row['ms']:.2f} ms ({row['ms'] / whole - 1:+.1%})"])
    return table(["shape", "the plan reads", "the plan", "forward without a plan", "forward with a plan"], rows)


@block(SKIPPING_FILE)
def lengths(results: Results, report: Report) -> list[str]:
    """Time over the length, with and without skipping."""
    own = [row for row in report["rows"] if row["study"] == "lengths"]
    found = index(own, "length", "peer", "direction")
    rows = {row["length"]: f"T{row['length']}" for row in own}
    columns = {"skipping": "decayattn", "whole": "nothing skipped"}

    def cell(*key: Any) -> str:
        return both(filter(None, each(found, "ms", *key)), three_digits)

    return [*pivot("ms forward / backward", rows, columns, cell), "",
            f"B1 H16 D{own[-1]['head_dim']}, mean λ −0.01, {where(report)} ({results.link(SKIPPING_FILE)})."]


@block("benchmark_sequences.json", "benchmark_sequences_cpu.json")
def sequences(results: Results, report: Report, on_cpu: Report) -> list[str]:
    """Packed documents and a dense batch of the same work, decoding and a copy of memory, generation, eviction."""
    packed = index(report["packed"], "head_dim", "workload", "direction")
    dims = dict.fromkeys(dim for dim, workload, _ in packed if workload == "packed")
    fraction = ", ".join(f"{both(each(packed, 'ratio_to_alike', dim, 'packed'))} (D{dim})" for dim in dims)
    labels = {"cache": "with the cache", "captured": "captured in a CUDA graph", "evict": "evicting",
              "recompute": "without a cache"}
    written, first = {row["mode"]: row["tokens_per_second"] for row in report["generate"]}, report["generate"][0]
    said = ", ".join(f"{written[mode]:.0f} {label}" for mode, label in labels.items() if mode in written)
    steps = [row for row in report["decode"] if row["decay"] != "copy"]
    paged = [row["ratio_to_copy"] for row in steps if row["decay"].endswith(PAGED)]
    ratio = min(row["ratio_to_copy"] for row in steps if not row["decay"].endswith(PAGED))
    in_pages = f"; in pages of {PAGE} tokens, {min(paged):.2f}" if paged else ""
    case = "{batch} × {tokens:,} tokens, H{heads} H_kv{kv_heads} D{head_dim}".format(**steps[0])
    return [
        "* Packed documents of mixed length, TFLOP/s over those of a dense batch of the same work, forward / "
        f"backward: {fraction}.",
        f"* One new token over {case} cached: the cache is read at {ratio:.2f} times the speed of a copy of memory, or "
        f"more, in every decay mode{in_pages}.",
        f"* Tokens per second that a toy model of {first['case'].split(', half')[0]} writes after {first['prompt']:,} "
        f"tokens: {said}. Without a graph so small a model waits for Python.",
        "* Where λ ≤ 0 and scores are bounded, as by `qk_norm`, memory follows the half-lives: a text of "
        f"{on_cpu['stream']['count']:,} tokens by heads that forget half in 1 and 2 tokens never had more than "
        f"{max(on_cpu['stream']['before'])} in a cache ({results.link('benchmark_sequences_cpu.json')}).",
        "", f"{where(report)} ({results.link('benchmark_sequences.json')}).",
    ]


@block("benchmark_overhead.json")
def overhead(results: Results, report: Report) -> list[str]:
    """Cost of a small call on the host, without autograd's threads, and on the device in a CUDA graph."""
    labels = {
        "decayattn auto": "decayattn", "decayattn auto, packed": "decayattn, two packed sequences",
        "decayattn auto, other totals": "decayattn, packed, in every call one token more",
        "flex-grad": "FlexAttention, decay and its gradient", "fla": LABELS["fla"], "cudnn": LABELS["cudnn"],
    }
    found = index(report["rows"], "peer", "head_dim")
    titles = {"host_us": "host, D{} (range)", "one_thread_us": "host, all in one thread, D{} (range)",
              "no_launch_us": "that without launches, D{} (range)", "graph_us": "GPU in a CUDA graph, D{}"}
    titles = {key: title for key, title in titles.items() if any(key in row for row in report["rows"])}

    def cell(peer: str, column: tuple[str, int]) -> str:
        key, dim = column
        row = found[peer, dim]
        spread = "" if key == "graph_us" else " ({:.0f} to {:.0f})"
        return f"{row[key]:.0f}" + spread.format(*row[f"{key}_range"]) if key in row else ""

    rows = {peer: label for peer, label in labels.items() if any(peer == name for name, _ in found)}
    columns = {(key, dim): title.format(dim) for key, title in titles.items() for dim in sorted({d for _, d in found})}
    return [*pivot("µs per forward and backward", rows, columns, cell), "",
            f"B1 H8 T256, {where(report)} ({results.link('benchmark_overhead.json')})."]


# ------------------------------------------------------------------------------------------------- training and studies

TRAINING_FILE, RECALL_FILE = "benchmark_training.json", "recall.json"
EXTRAPOLATION_FILE, EVIDENCE_FILE, FOX_FILE = "length_extrapolation.json", "evidence_121m.json", "benchmark_fox.json"


@block("train_cpu.json", "train_h200/summary.json")
def training(results: Results, on_cpu: Report, on_gpu: Report) -> list[str]:
    """Losses of the toy model, and the time that it took."""
    runs = {"train_cpu.json": on_cpu, "train_h200/summary.json": on_gpu}
    return [
        f"* {run['gpu'] or '2 CPU cores'}: {run['parameters'] / 1e6:.1f} M parameters, {run['steps']} steps in "
        f"{run['seconds']:.0f} s, {run['validation_bits_before']:.2f} → {run['validation_bits_after']:.2f} bits per "
        f"byte ({results.link(name)})." for name, run in runs.items()
    ]


def loss_over_position(results: Results, name: str) -> list[str]:
    """The figure, the table, and their source; then the needles, a row per length and scheme, a column per depth."""
    report = results.load(name)
    settings, corpus, runs = report["settings"], report["corpus"], runs_of(report)
    context, trained = settings["context"], settings["steps"] * settings["batch_size"] * settings["context"]
    crops = sorted({row["length"]: row["crops"] for run in runs for row in run["reading"]}.items())
    texts = " and ".join(f"{number} texts of {kilo(length)}" for length, number in crops)
    head, *rows = cells_of_table(report)
    title = f"Bits per byte over the position for every scheme, trained at {kilo(context)} bytes"
    (least, most), seeds = sizes_of(report), len({run["seed"] for run in runs})
    lines = [
        f"!{results.link(str(Path(name).with_suffix('.png')), title)}", "", *table(head, rows), "",
        f"{f'Mean of {seeds} seeds (and their range)' if seeds > 1 else 'One seed'}. {least:.1f} to {most:.1f} M "
        f"parameters, {trained / 1e6:.0f} MB of Python source at {kilo(context)} bytes; {texts} bytes read, of "
        f"{corpus['held out']['packages']} packages that are not among the {corpus['training']['packages']} of the "
        f"training; {where(report, 3)} ({results.link(name)}).",
    ]
    found: dict[Any, list[Any]] = {}
    for run in runs:
        for row in run.get("needles", ()):
            found.setdefault((row["length"], run["scheme"]), []).append([row["found"], row["bits"]])

    def cell(case: tuple, at: int) -> str:
        share, bits = (statistics.fmean(figures[at] for figures in of_seeds)
                       for of_seeds in zip(*found[case], strict=True))
        return f"{share:.0%} ({bits:.2f})"

    cases = {case: f"{kilo(case[0])}, {SCHEMES[case[1]].label}" for case in sorted(found)}
    depths = {at: f"depth {depth:g}" for at, depth in enumerate(DEPTHS)}
    corner = "digits found (bits of a digit; 4 by chance)"
    return [*lines, *(["", *pivot(corner, cases, depths, cell)] if found else [])]


BLOCKS["extrapolation"] = functools.partial(loss_over_position, name=EXTRAPOLATION_FILE)
BLOCKS["evidence"] = functools.partial(loss_over_position, name=EVIDENCE_FILE)


@block(RECALL_FILE)
def recall(results: Results, report: Report) -> list[str]:
    """Accuracy by shape: a table per task, a row per width and mode."""
    lines, found = [], in_order(report["rows"])
    for task in dict.fromkeys(row["task"] for row in found):
        own = {number: row for number, row in enumerate(found) if row["task"] == task}
        shapes = selected(next(iter(own.values()))).shapes

        def cell(number: int, shape: int) -> str:
            chosen = selected(found[number])
            mean, least, most = (f"{100 * x[shape]:.0f}" for x in (chosen.mean, chosen.least, chosen.most))
            return mean if least == most else f"{mean} ({least}–{most})"

        rows = {number: f"d{row['width']}, {SCHEMES[row['mode']].label}" for number, row in own.items()}
        columns = {at: f"T{shape.length}, {shape.pairs} pairs" for at, shape in enumerate(shapes)}
        lines += [*pivot(f"{task}: queries answered rightly, %", rows, columns, cell), ""]
    seeds = len(report["setup"]["seeds"])
    return [*lines, f"Mean of {seeds} seeds (range), {where(report, 2)} ({results.link(RECALL_FILE)})."]


@block(TRAINING_FILE)
def training_speed(results: Results, report: Report) -> list[str]:
    """Tokens per second of a training step, relative to cuDNN's, a row per attention, a column per setting."""
    found = {(row["variant"], setting_of(row)): row for row in report["rows"]}
    columns = {
        (dim, length, compiled): f"D{dim} T{length}" + ", compiled" * compiled
        for dim, length, compiled in sorted({key[1] for key in found}, key=lambda s: (s[2], s[0], s[1]))
    }

    def cell(name: str, setting: tuple) -> str:
        row, base = found.get((name, setting)), found.get((BASELINE, setting))
        if row is None:
            return ""
        text = f"{row['tokens_per_second'] / 1e3:.0f}"
        text += f", {row['tokens_per_second'] / base['tokens_per_second']:.2f}" if base else ""
        shares = row["attention_share"] is not None and name != IDENTITY
        return text + (f" ({row['attention_share']:.0%})" if shares else "")

    rows = {name: label for name, label in report["variants"].items() if any(key[0] == name for key in found)}
    absent = sorted({entry["variant"] for entry in report["missing"] if entry["kind"] == "absent"})
    failed = ["{variant}, {setting}: {kind}".format(**e) for e in report["missing"] if e["kind"] != "absent"]
    said = [f"{where(report, 3)} ({results.link(TRAINING_FILE)})."]
    said += [f"{what}: {joined}." for what, joined in (("Absent", ", ".join(absent)), ("No speed", "; ".join(failed)))
             if joined]
    corner = "thousand tokens per second, × cuDNN with rotary (share of attention)"
    return [*pivot(corner, rows, columns, cell), "", " ".join(said)]


@block(FOX_FILE)
def fox(results: Results, report: Report) -> list[str]:
    """Speed and memory of the official 760M model, a row per setting, a column per variant."""
    found = index(report["rows"], "part", "batch", "length", "variant")
    labels = {"recomputed": "training, activations recomputed", "eager": "training", "compiled": "training, compiled",
              "generation": "generation (ms of the prompt)"}

    def cell(case: tuple, name: str) -> str:
        row, theirs = found.get((*case, name)), found.get((*case, "theirs"))
        if row is None:
            return ""
        prompt = f" ({three_digits(row['prefill_ms'])} ms)" if "prefill_ms" in row else ""
        ratio = f", {row['tokens_per_second'] / theirs['tokens_per_second']:.2f}×" if theirs and row != theirs else ""
        return f"{three_digits(row['tokens_per_second'])}{prompt}{ratio}, {row['peak_bytes'] / 1e9:.0f} GB"

    cases = {key[:3]: f"{labels[key[0]]}, B{key[1]} T{key[2]}" for key in found}
    failed = ["{variant}: {kind}".format(**e) for e in report["missing"] if "variant" in e]
    return [*pivot("tokens per second, × theirs, memory", cases, {key[3]: key[3] for key in found}, cell), "",
            f"{where(report, 3)} ({results.link(FOX_FILE)})." + f" No speed: {'; '.join(failed)}." * bool(failed)]


# ------------------------------------------------------------------------------------------------------- several GPUs

CONTEXT_FILE = "benchmark_context.json"


@block("benchmark_strategies.json")
def strategies(results: Results, report: Report) -> list[str]:
    """Loss and speed of the toy language model on several devices and on one."""
    head = ["run", "thousand tokens per second", "× one GPU", "validation, bits per byte", "training loss − one GPU's",
            "at most, in a step"]
    rows = [
        [row["run"], f"{row['tokens_per_second'] / 1e3:.0f}", f"{row['speed_over_one']:.2f}",
         f"{row['validation_bits']['bits'][-1]:.4f}", f"{row['difference']:+.4f}", f"{row['largest_difference']:.4f}"]
        for row in report["rows"]
    ]
    about = ("{devices} × {where}, {layers} layers, width {width}, context {context:,}, batch {batch_size}, {steps} "
             "steps").format(**report["setup"], where=where(report, 2))
    return [*table(head, rows), "", f"{about} ({results.link('benchmark_strategies.json')})."]


@block(CONTEXT_FILE)
def context(results: Results, report: Report) -> list[str]:
    """A layer's attention over several GPUs and on one: milliseconds, speed and bytes."""
    found = index(report["rows"], "length", "decay", "mode", "direction")
    timed = [way for way in (*WAYS, "both") if any(key[3] == way for key in found)]
    first = next(row for row in report["rows"] if row["mode"] != "one GPU")
    modes = [mode for mode in dict.fromkeys(key[2] for key in found) if mode != "one GPU"]
    names = {"none": "no decay", "alibi": "ALiBi"}
    rows = {(decay, mode): f"{names.get(decay) or 'mean λ ' + decay.replace('-', '−')}, {mode}"
            for decay in dict.fromkeys(key[1] for key in found) for mode in modes}

    def cell(row: tuple[str, str], length: int) -> str:
        own = [found.get((length, *row, way), {}) for way in timed]
        sent = [max(one["received"]) / 1e6 for one in own if one.get("received")]
        received = f" ({both(sent, three_digits)})" if sent else ""
        return both(one.get("speed_over_alone") or None for one in own) + received

    worst = max((error["over_budget"] for check in report["checks"] for error in check["errors"].values()
                 if error["over_budget"] is not None), default=None)
    checked = f" Largest error of {len(report['checks'])} checked cases over its budget: {worst:.2f}." if worst else ""
    shape = "H{heads} H_kv{kv_heads} D{head_dim} {dtype}".format(**first)
    columns = {length: f"T{length}" for length in sorted({key[0] for key in found})}
    return [*pivot(" / ".join(timed), rows, columns, cell), "",
            f"Speed over one GPU with the whole sequence (MB that a rank receives). {report['ranks']} × "
            f"{where(report, 2)}, {shape} ({results.link(CONTEXT_FILE)}).{checked}"]


@block()
def files(results: Results) -> list[str]:
    """Origin of each file of results/."""
    rows = []
    for path in sorted(results.folder.rglob("*.json")):
        name = str(path.relative_to(results.folder))
        if name != "train_h200/attention.json":  # another file has the report of this run
            report = results.load(name)
            rows.append([
                results.link(name, f"`{name}`"), f"`{report['command']}`",
                f"{report['gpu'] or 'CPU'}, torch {report['torch']}, Triton {report['triton']}",
                f"{report['commit'][:9]}, {report['date'][:10]}",
            ])
    return table(["file", "command", "where", "commit, date"], rows)


# ------------------------------------------------------------------------------------------------------- the front page

# schemes, with the layer's argument
CHOICES = {
    "scalar": '`decay="scalar"`, a forget gate', "alibi-learned": '`"alibi-learned"`', "alibi": '`"alibi"`',
    "retnet": '`"retnet"`', "rotary-scalar": '`"scalar"` and rotary embeddings',
    "rotary": '`"none"` and rotary embeddings', "none": '`"none"`',
}


@block(EXTRAPOLATION_FILE, RECALL_FILE)
def choice(results: Results, read: Report, recalled: Report) -> list[str]:
    """Bits per byte within and beyond the trained length, and accuracy of recall, a row per decay."""
    columns: dict[Any, str] = {(0, 1024): "bytes 0–1k", (4096, 16384): "bytes 4k–16k", "recall": "recall, %",
                               "forgetting": "overwritten keys, %"}
    means = {(name, (begin, end)): statistics.fmean(seeds) for (name, begin, end, key), seeds in bits_of(read).items()
             if key == "bits" and name in CHOICES}
    least = {column: min(x for (_, at), x in means.items() if at == column) for _, column in means}
    accuracy: dict[tuple[str, str], list[float]] = {}
    for row in sorted(recalled["rows"], key=lambda row: row["width"]):
        accuracy.setdefault((row["task"], row["mode"]), []).append(100 * selected(row).mean[-1])

    def cell(name: str, column: Any) -> str:
        if isinstance(column, str):
            return both(accuracy.get((column, name), [None]), "{:.0f}".format)
        mean = means.get((name, column))
        return "–" if mean is None else f"**{mean:.3f}**" if mean == least[column] else f"{mean:.3f}"

    widths = " / ".join(str(width) for width in sorted({row["width"] for row in recalled["rows"]}))
    length, pairs, _ = recalled["setup"]["shapes"][-1]
    page = f"{results.prefix.removesuffix('results/')}experiments/README.md"
    return [*pivot("decay", CHOICES, columns, cell), "", *wrapped(
        f"Bits per byte of a {sizes_of(read)[0]:.1f} M model, trained on {read['settings']['context']:,} bytes of "
        "Python source at a time; lower is better. Recall: percentage of the values that two layers of width "
        f"{widths} predict correctly. {length:,} tokens hold {pairs} pairs of key and value, then the keys again. "
        "Overwritten keys come with two values, and the later one counts. Means of 3 seeds "
        f"([extrapolation]({page}#length-extrapolation), [recall]({page}#associative-recall))."
    )]


@block(SPEED_FILE, TRAINING_FILE, SKIPPING_FILE)
def speed(results: Results, report: Report, trained: Report, skipped: Report) -> list[str]:
    """Attention and a training step relative to other libraries, and the gain of skipping, a column per length."""
    ratios = {(way, shape[2], shape[0]): kernels["ours"]["ratio_to_cudnn"] for (shape, way), kernels
              in speeds(report).items()}
    steps = {(row["variant"], *setting_of(row)): row["tokens_per_second"] for row in trained["rows"]}
    ratios |= {(name, length, dim): steps["ours", dim, length, False] / x for (name, dim, length, compiled), x
               in steps.items() if not compiled and ("ours", dim, length, False) in steps}
    rows = {way: f"attention, {way}, × cuDNN without a decay" for way in WAYS} | {
        BASELINE: "training step, × cuDNN with rotary embeddings",
        "cudnn": "training step, × cuDNN without position embeddings",
        "fox-pruned": "training step, × FoX's kernel, pruned at e⁻¹⁰",
        "skipping": "attention that skips, × the same without skipping",
    }
    gain = index(skipped["rows"], "study", "peer", "length", "direction")

    def cell(row: str, length: int) -> str:
        if row == "skipping":
            return both(each(gain, "speed_over_whole", "lengths", row, length))
        return both(ratios[row, length, dim] for dim in (64, 128) if (row, length, dim) in ratios)

    columns = {length: f"{length:,} tokens" for length in (2048, 8192, 32768)}
    links = ", ".join(results.link(file, name) for file, name in (
        (SPEED_FILE, "attention"), (TRAINING_FILE, "training"), (SKIPPING_FILE, "skipping")))
    return [*pivot(f"{report['gpu']}, bfloat16, causal", rows, columns, cell), "", *wrapped(
        "Cells are head dimension 64 / 128; in the last row, forward / backward at 128. Attention has its decay and "
        "the gradient, 16 heads, mean λ −0.01, and visits every key except in the last row. Training: 124 M "
        f"parameters, {trained['setup']['tokens']:,} tokens per step, eager, half-lives from 4 to 1,024 tokens. "
        f"{where(report)}; training: Triton {trained['triton']}; skipping: {skipped['triton']} ({links})."
    )]


if __name__ == "__main__":
    sys.exit(main())
