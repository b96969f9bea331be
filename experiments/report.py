"""Write the tables of README.md and experiments/README.md, and the picture of speeds, from the JSON in results/.

    python experiments/report.py            # rewrites the blocks from <!-- table: NAME --> to <!-- end -->
    python experiments/report.py --check    # changes nothing; exit status 1 and a diff where page and JSON disagree

JSON must say its commit, its GPU, the versions of torch and Triton, and the command. It is refused without them, or if
the code differed from its commit, by what git said then or by the trees that it names: exit status 1. A picture names
the digest of its figures, by which --check knows an old one.
"""

import argparse
import difflib
import hashlib
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from benchmarks.sequences import PAGE, PAGED
from benchmarks.training import BASELINE, IDENTITY, VARIANTS, setting_of
from matplotlib.figure import Figure
from shared.plots import kilo
from shared.provenance import ROOT, trees_of
from studies.length_extrapolation import cells_of_table, runs_of
from studies.recall import MODES, in_order, selected

# the pages, and how each calls the folder of results
PAGES = {"README.md": "results/", "experiments/README.md": "../results/"}
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# what a file has to say of its origin, besides its GPU
_ORIGIN = ("commit", "torch", "triton", "command")
# data of a run whose report is another file
_NO_REPORT = ("train_h200/attention.json",)
_DIRECTIONS = ("forward", "backward")
NOT_MEASURED = "Not measured yet."


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite the pages, or compare them; the exit status is 1 if they disagree or a file is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check, same = parser.parse_args(argv).check, True
    try:
        new = {root / name: rewritten(root / name, Results(root / "results", at)) for name, at in PAGES.items()}
        pictures = {root / "results" / name: picture(Results(root / "results")) for name, picture in PICTURES.items()}
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in new.items():
        old = path.read_text(encoding="utf-8")
        if old != text:
            same = False
            name = str(path.relative_to(root))
            lines = (old.splitlines(keepends=True), text.splitlines(keepends=True))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name} from the JSON"))
            if not check:
                path.write_text(text, encoding="utf-8")
    for path, picture in pictures.items():
        if not (path.exists() and picture.digest in path.read_text(encoding="utf-8")):
            same = False
            print(f"{path.name} is not of the JSON")
            if not check:
                path.write_text(picture.svg(), encoding="utf-8")
    return int(check and not same)


def rewritten(path: Path, results: "Results") -> str:
    """The page with all of its blocks made again."""

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in BLOCKS:
            raise Refused(f"{path.name}: there is no table {name}; expected one of {', '.join(BLOCKS)}")
        needed, lines = BLOCKS[name]
        found = lines(results) if needed is None or results.has(needed) else [NOT_MEASURED]
        return begin + "\n".join(found) + "\n" + end

    return _BLOCK.sub(block, path.read_text(encoding="utf-8"))


class Refused(Exception):
    """A file in results/ that may not be quoted; the message says why."""


@dataclass(frozen=True)
class Results:
    """A folder of results, and how a page that quotes it calls it ("results/", or "../results/")."""

    folder: Path
    prefix: str = "results/"

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def link(self, name: str, text: str = "JSON") -> str:
        return f"[{text}]({self.prefix}{name})"

    def load(self, name: str, on_gpu: bool = True) -> dict[str, Any]:
        """The JSON file of that name with its origin. Raises Refused unless the origin is complete, and for code that
        was not the commit's: by what git said then ("dirty"), or by the code's trees, where git knows the commit."""
        report = json.loads((self.folder / name).read_text(encoding="utf-8"))
        report |= report.pop("provenance", {})  # some files keep it apart
        absent = [key for key in (*_ORIGIN, *["gpu"] * on_gpu) if not report.get(key)]
        if not report.get("gpu") and "+cpu" not in str(report.get("torch")):
            absent.append("gpu")  # without one, only a torch for CPUs is believed
        if absent:
            raise Refused(f"results/{name}: lacks {', '.join(dict.fromkeys(absent))}; it cannot be measured again")
        if report.get("dirty"):
            raise Refused(f"results/{name}: the code differed from commit {report['commit'][:9]} when it was measured")
        trees = {folder: tree for folder, tree in report.get("trees", {}).items() if tree}
        known = trees_of(report["commit"], self.folder) if trees else None
        differ = [folder for folder in trees if known is not None and trees[folder] != known.get(folder)]
        if differ:
            raise Refused(f"results/{name}: {' and '.join(differ)} differed from commit {report['commit'][:9]} when it "
                          "was measured")
        return report


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "|" + "---|" * len(head), *others]


def _torch(report: dict[str, Any]) -> str:
    return f"torch {report['torch'].split('+')[0]}"


def _where(report: dict[str, Any]) -> str:
    cudnn = int(report.get("cudnn") or 0)
    versions = [_torch(report), f"Triton {report['triton']}"]
    return ", ".join([report["gpu"], *versions, *[f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}"] * bool(cudnn)])


# --------------------------------------------------------------------------------------------------- speed of attention

# has the speeds; kernels of others that it lacks come from the other file
SPEED_FILE = "benchmark_sustained.json"
OTHERS_FILE = "benchmark_sustained_flash_attn.json"
# tables of their own: file, what is special, whether causal
MORE_SPEEDS = (
    ("benchmark_sustained_not_causal.json", "Not causal", False),
    ("benchmark_sustained_wide.json", "More than 128 columns (D, or D/D_v)", True),
    ("benchmark_sustained_scales.json", "A scale per row of ours, and its gradient", True),
    ("benchmark_sustained_scales_256.json", "The same with 256 columns", True),
    ("benchmark_sustained_logits.json", "Logits with a standard deviation of 16", True),
    ("benchmark_sustained_before.json", "In one process with an earlier commit", True),
    ("benchmark_sustained_before_triton.json", "The Triton kernels in one process with an earlier commit", True),
)
_OURS = {"ours": "decayattn", "triton": "decayattn's Triton kernels"}
_DECAYS = {"": "decay and its gradient", ", no decay": "no decay", ", constant": "a constant per head and its gradient"}
_BEFORE = {"": "", ", no decay": ", no decay", ", constant": ", a constant per head"}
LABELS = {
    f"{kernel}{decay}{before}": f"the earlier commit{_BEFORE[decay]}" if before else f"{label}, {what}"
    for kernel, label in _OURS.items() for decay, what in _DECAYS.items() for before in ("", " before")
} | {
    "flash_attn": "FlashAttention-4, no decay",
    "flex": "FlexAttention, decay without its gradient",
    "fox": "Forgetting Transformer, decay and its gradient",
    "fla": "flash-linear-attention, decay and its gradient",
    "cudnn": "cuDNN (PyTorch SDPA), no decay",
}
_OTHERS = ("flash_attn", "flex", "fox", "fla")


class Shape(NamedTuple):
    """One attention problem."""

    head_dim: int
    value_dim: int
    length: int
    batch: int
    heads: int
    causal: bool


# of a shape and a direction, every kernel's figures: ms, ms_range, tflops, ratio_to_cudnn
Speeds = dict[tuple[Shape, str], dict[str, dict[str, Any]]]


def speeds(report: dict[str, Any]) -> Speeds:
    """The rows of benchmarks/attention.py."""
    found = {}
    for row in report["rows"]:
        value_dim = row.get("value_dim") or row["head_dim"]
        shape = Shape(row["head_dim"], value_dim, row["length"], row["batch"], row["heads"], row["causal"])
        found[shape, row["direction"]] = row["kernels"]
    return found


def _of_files(results: Results) -> tuple[Speeds, dict[str, str]]:
    """(causal speeds by shape and direction, and of every kernel the file that it is from)."""
    found = {key: dict(kernels) for key, kernels in speeds(results.load(SPEED_FILE)).items() if key[0].causal}
    source = {kernel: SPEED_FILE for kernels in found.values() for kernel in kernels}
    others = speeds(results.load(OTHERS_FILE)) if results.has(OTHERS_FILE) else {}
    lacking = [kernel for kernel in _OTHERS if kernel not in source]
    for key in found.keys() & others.keys():
        borrowed = {kernel: others[key][kernel] for kernel in lacking if kernel in others[key]}
        found[key] |= borrowed
        source |= dict.fromkeys(borrowed, OTHERS_FILE)
    return found, source


def _sources(results: Results, source: dict[str, str]) -> Iterator[str]:
    """The files of a comparison, the one of ours first."""
    report = results.load(SPEED_FILE)
    replayed = ", replayed by CUDA graphs" if report.get("captured") else ""
    regime = f"sustained: calls back to back{replayed}, at the power limit"
    yield f"{_where(report)}; bfloat16, causal; {regime} ({results.link(SPEED_FILE)})."
    borrowed = [LABELS[kernel].split(",")[0] for kernel in _OTHERS if source.get(kernel) == OTHERS_FILE]
    if borrowed:
        names = " and ".join([", ".join(borrowed[:-1]), borrowed[-1]] if len(borrowed) > 1 else borrowed)
        other = results.load(OTHERS_FILE)
        elsewhere = f" on an {other['gpu']}," if other["gpu"] != report["gpu"] else ""
        launched = " launched from Python," if replayed and not other.get("captured") else ""
        yield f"{names}:{elsewhere}{launched} against cuDNN in a process of its own ({results.link(OTHERS_FILE)})."


def attention(results: Results) -> list[str]:
    """A row per kernel, a column per shape."""
    found, source = _of_files(results)
    tables = [*_speed_table(found, source, True), "", " ".join(_sources(results, source))]
    for name, what, causal in MORE_SPEEDS:
        if results.has(name):
            report = results.load(name)
            before = f", {report['before'][:7]}" if report.get("before") else ""
            found = speeds(report)
            tables += ["", f"{what}{before} ({results.link(name)}):", ""]
            tables += _speed_table(found, set().union(*found.values()), causal)
    return tables


def _speed_table(found: Speeds, kernels: Any, causal: bool) -> list[str]:
    shapes = sorted({shape for shape, _ in found if shape.causal == causal})
    heads = {shape.heads for shape in shapes}
    assert len(heads) == 1, "one number of heads in a table"
    head = [f"forward / backward, H{heads.pop()}"]
    for shape in shapes:
        dims = f"{shape.head_dim}" + (f"/{shape.value_dim}" if shape.value_dim != shape.head_dim else "")
        head.append(f"D{dims} T{shape.length} B{shape.batch}")

    def row(name: str, key: str, digits: int) -> list[str]:
        cells = []
        for shape in shapes:
            both = (found.get((shape, direction), {}).get(name, {}).get(key) for direction in _DIRECTIONS)
            cells.append(" / ".join("–" if number is None else f"{number:.{digits}f}" for number in both))
        return [LABELS[name] + (", TFLOP/s" if key == "tflops" else ""), *cells]

    names = [name for name in LABELS if name in kernels and name != "cudnn"]
    # what others read first: ours in bold
    rows = [[f"**{cell}**" if name == "ours" else cell for cell in row(name, "ratio_to_cudnn", 2)] for name in names]
    return table(head, [*rows, *(row(name, "tflops", 0) for name in ("cudnn", names[0]))])


# ------------------------------------------------------------------------------------------------------------- pictures

_INK = "#1f2328"  # becomes light on a dark page
_BARS = {"ours": "#d55e00", "ours, no decay": "#e69f00", "flash_attn": "#999933", "flex": "#56b4e9", "fla": "#009e73",
         "fox": "#cc79a7"}
_STYLE = f"<style>svg {{ color: {_INK} }} @media (prefers-color-scheme: dark) {{ svg {{ color: #e6edf3 }} }}</style>"


@dataclass(frozen=True)
class Picture:
    """An SVG file: its title, the figures that it shows, and the function that draws them."""

    title: str
    figures: Any
    draw: Callable[[Any], Figure]

    @property
    def digest(self) -> str:
        """Digest of the title and the figures."""
        said = json.dumps([self.title, self.figures], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def svg(self) -> str:
        """The same text for the same figures with one matplotlib."""
        from io import StringIO

        ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
        file = StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "decayattn", "font.size": 9, **ink}):
            about = {"Date": None, "Title": self.title, "Description": f"figures {self.digest}"}
            self.draw(self.figures).savefig(file, format="svg", transparent=True, metadata=about)
        return file.getvalue().replace("<defs>", f"{_STYLE}\n <defs>", 1).replace(_INK, "currentColor").replace(
            "color: currentColor", f"color: {_INK}", 1)


def speed_picture(results: Results) -> Picture:
    """Speeds as bars, multiples of cuDNN's: a panel per direction, a group of bars per shape; all of one process."""
    found = [
        [kernel, f"D = {shape.head_dim}\nT = {shape.length}\nB = {shape.batch}", direction, figures["ratio_to_cudnn"]]
        for (shape, direction), kernels in sorted(speeds(results.load(OTHERS_FILE)).items())
        for kernel, figures in kernels.items() if kernel in _BARS and figures["ratio_to_cudnn"] is not None
    ]
    return Picture(_alt(found), found, _draw_speeds)


def _alt(figures: list[list[Any]]) -> str:
    said = []
    for direction in _DIRECTIONS:
        own = [ratio for kernel, _, way, ratio in figures if (kernel, way) == ("ours", direction)]
        said.append(f"{direction} {min(own):.2f} to {max(own):.2f}")
    return f"Speed of attention with a decay, relative to cuDNN without one: {', '.join(said)}"


def _draw_speeds(figures: list[list[Any]]) -> Figure:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    kernels = [name for name in LABELS if any(kernel == name for kernel, *_ in figures)]
    shapes = list(dict.fromkeys(shape for _, shape, *_ in figures))
    width = 0.84 / len(kernels)
    for panel, direction in zip(figure.subplots(1, 2, sharey=True), _DIRECTIONS, strict=True):
        for at, name in enumerate(kernels):
            ratios = {shape: x for kernel, shape, way, x in figures if (kernel, way) == (name, direction)}
            places = [shapes.index(shape) + (at - (len(kernels) - 1) / 2) * width for shape in ratios]
            label = LABELS[name].replace("decay and its gradient", "decay + gradient").replace("decay without its",
                                                                                             "decay, no")
            bars = panel.bar(places, list(ratios.values()), 0.9 * width, color=_BARS[name], label=label)
            if name == "ours":
                panel.bar_label(bars, fmt="%.2f", rotation=90, padding=-18, color="#ffffff", fontsize=7)
        panel.axhline(1.0, color=_INK, linewidth=0.8)
        panel.text(len(shapes) - 0.5, 1.01, "cuDNN", ha="right", fontsize=7)
        panel.set_xticks(range(len(shapes)), shapes, fontsize=7)
        panel.set_title(direction, fontsize="medium")
        panel.grid(axis="y", alpha=0.2, color=_INK)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


def pictures(results: Results) -> list[str]:
    """The picture of speeds, with one line on where they are from."""
    return [f"![{speed_picture(results).title}]({results.prefix}speed.svg)", "", *_wrapped(
        "Speed relative to cuDNN attention without a decay: all kernels in one process, on an "
        f"{_card(results.load(OTHERS_FILE))}. [The method, and an {_card(results.load(SPEED_FILE))}](#how-fast)"
    )]


def _card(report: dict[str, Any]) -> str:
    return report["gpu"].removeprefix("NVIDIA ").split()[0]


def _wrapped(text: str) -> list[str]:
    """Lines of at most 119 characters."""
    return textwrap.wrap(text, 119, break_long_words=False, break_on_hyphens=False)


# ------------------------------------------------------------------------------------------------- length extrapolation

EXTRAPOLATION_FILE = "length_extrapolation.json"


def extrapolation(results: Results) -> list[str]:
    """Loss over position: the figure, the table, and their source."""
    report = results.load(EXTRAPOLATION_FILE)
    head, rows = cells_of_table(report)
    settings, corpus = report["settings"], report["corpus"]
    size = next(run["parameters"] for run in runs_of(report) if run["parameters"])
    context, trained = settings["context"], settings["steps"] * settings["batch_size"] * settings["context"]
    crops = {row["length"]: row["crops"] for run in runs_of(report) for row in run["reading"]}
    texts = " and ".join(f"{number} texts of {kilo(length)}" for length, number in sorted(crops.items()))
    alt = f"Bits per byte over the position for every scheme, trained at {kilo(context)} bytes"
    return [
        f"![{alt}]({results.prefix}length_extrapolation.png)", "", *table(head, rows), "",
        f"Mean of {len({run['seed'] for run in runs_of(report)})} seeds (and their range). {size / 1e6:.1f} M "
        f"parameters, {trained / 1e6:.0f} MB of Python source at {kilo(context)} bytes; {texts} bytes read, of "
        f"{corpus['held out']['packages']} packages that are not among the {corpus['training']['packages']} of the "
        f"training; {report['gpu']}, {_torch(report)}, Triton {report['triton']} "
        f"({results.link(EXTRAPOLATION_FILE)}).",
    ]


# ------------------------------------------------------------------------------------------------------------- skipping

SKIPPING_FILE = "benchmark_skipping.json"


def _ms(x: float) -> str:
    return f"{x:#.3g}".rstrip(".")


def skipping(results: Results) -> list[str]:
    """Milliseconds with and without the tiles that cannot matter."""
    report = results.load(SKIPPING_FILE)
    labels = {
        "skipping": "**decayattn, what is skipped ≤ 2⁻²⁴ of any row**", "whole": "decayattn, nothing skipped",
        "fox pruned": "Forgetting Transformer, pruned at e⁻¹⁰", "cudnn": "cuDNN, no decay, nothing skipped",
    }
    head = [f"ms forward / backward; {report['gpu']}, bfloat16, causal, B1 H16 ({results.link(SKIPPING_FILE)})"]
    cells, visited = {peer: [] for peer in labels}, ["fraction of the tiles that is visited"]
    for study, rates, what in (("pruning", "uniform", "mean λ −0.01"), ("constant", "alibi", "ALiBi")):
        chosen = [row for row in report["rows"] if (row["study"], row["rates"]) == (study, rates)]
        for dim, length in sorted({(row["head_dim"], row["length"]) for row in chosen}):
            head.append(f"{what}, T{length} D{dim}")
            for peer, row_of_cells in cells.items():
                of_peer = [row for row in chosen if (row["head_dim"], row["peer"]) == (dim, peer)]
                ms = {row["direction"]: _ms(row["ms"]) for row in of_peer}
                row_of_cells.append(" / ".join(ms.get(direction, "–") for direction in _DIRECTIONS))
            row = next(row for row in chosen if (row["head_dim"], row["peer"]) == (dim, "skipping"))
            visited.append(f"{1 / row['ideal']:.2f}")
    return table(head, [[label, *cells[peer]] for peer, label in labels.items()] + [visited])


def planning(results: Results) -> list[str]:
    """Cost of looking for tiles to skip where there are none."""
    rows = []
    for row in results.load(SKIPPING_FILE)["rows"]:
        if (row["study"], row["peer"], row["direction"]) == ("planning", "skipping", "forward"):
            reads = "the decay alone tells" if row["rates"] == "none to speak of" else "q and k are read"
            shape = f"B{row['batch']} T{row['length']} D{row['head_dim']}"
            whole = row["ms"] * row["speed_over_whole"]  # a speed over another is the other's time over its own
            ms = f"{whole:.2f} ms", f"{row['ms']:.2f} ms ({row['ms'] / whole - 1:+.1%})"
            rows.append([shape, reads, f"{row['plan_us']:.0f} µs", *ms])
    return table(["shape", "", "the plan", "a forward that does not look", "a forward"], rows)


def lengths(results: Results) -> list[str]:
    """Time over the length, with and without skipping."""
    report = results.load(SKIPPING_FILE)
    own = [row for row in report["rows"] if row["study"] == "lengths"]
    rows: dict[int, dict[str, list[str]]] = {}
    for row in own:
        rows.setdefault(row["length"], {}).setdefault(row["peer"], []).append(_ms(row["ms"]))
    lines = [[f"T{length}", *(" / ".join(by_peer.get(peer, ["–"])) for peer in ("skipping", "whole"))]
             for length, by_peer in rows.items()]
    return [*table(["ms forward / backward", "decayattn", "nothing skipped"], lines), "",
            f"B1 H16 D{own[-1]['head_dim']}, mean λ −0.01, {_where(report)} ({results.link(SKIPPING_FILE)})."]


# ------------------------------------------------------------------------------------- sequences, host time, training


def sequences(results: Results) -> list[str]:
    """Packed documents and a dense batch of the same work, and decoding and a copy of memory."""
    name = "benchmark_sequences.json"
    report = results.load(name)
    packed: dict[int, list[float]] = {}
    for row in report["packed"]:
        if row["workload"] == "packed":
            packed.setdefault(row["head_dim"], []).append(row["ratio_to_alike"])
    fraction = ", ".join(f"{' / '.join(f'{x:.2f}' for x in both)} (D{dim})" for dim, both in packed.items())
    labels = {"cache": "with the cache", "captured": "captured in a CUDA graph", "evict": "evicting",
              "recompute": "without a cache"}
    written = {row["mode"]: f"{row['tokens_per_second']:.0f}" for row in report["generate"]}
    said = ", ".join(f"{written[mode]} {label}" for mode, label in labels.items() if mode in written)
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
        f"* Tokens per second that a toy model of {report['generate'][0]['case'].split(', half')[0]} writes after "
        f"{report['generate'][0]['prompt']:,} tokens: {said}. Without a graph so small a model waits for Python.",
        "",
        f"{_where(report)} ({results.link(name)}).",
    ]


def eviction(results: Results) -> list[str]:
    """The longest cache while a long text is written."""
    name = "benchmark_sequences_cpu.json"
    stream = results.load(name, on_gpu=False)["stream"]
    return [
        "Where λ ≤ 0 and scores are bounded, as by `qk_norm`, memory follows the half-lives: a text of "
        f"{stream['count']:,} tokens by heads that forget half in 1 and 2 tokens never had more than "
        f"{max(stream['before'])} in a cache ({results.link(name)})."
    ]


def overhead(results: Results) -> list[str]:
    """Cost of a small call on the host, without autograd's threads, and on the device in a CUDA graph."""
    name = "benchmark_overhead.json"
    report = results.load(name)
    labels = {
        "decayattn auto": "decayattn", "decayattn auto, packed": "decayattn, two packed sequences",
        "decayattn auto, other totals": "decayattn, packed, in every call one token more",
        "flex-grad": "FlexAttention, decay and its gradient", "fla": LABELS["fla"], "cudnn": LABELS["cudnn"],
    }
    dims = sorted({row["head_dim"] for row in report["rows"]})
    columns = {"host_us": "host, D{} (range)"}
    if any("one_thread_us" in row for row in report["rows"]):  # which older reports do not have
        columns["one_thread_us"] = "host, all in one thread, D{} (range)"
    columns["graph_us"] = "GPU in a CUDA graph, D{}"

    def cell(row: dict[str, Any], key: str) -> str:
        if key not in row:
            return "–"
        spread = f" ({' to '.join(f'{x:.0f}' for x in row[f'{key}_range'])})" if "range" in columns[key] else ""
        return f"{row[key]:.0f}{spread}"

    rows = []
    for peer, label in labels.items():
        found = [row for dim in dims for row in report["rows"] if (row["head_dim"], row["peer"]) == (dim, peer)]
        if found:
            rows.append([label, *(cell(row, key) for key in columns for row in found)])
    head = ["µs per forward and backward", *(title.format(dim) for title in columns.values() for dim in dims)]
    return [*table(head, rows), "", f"B1 H8 T256, {_where(report)} ({results.link(name)})."]


def training(results: Results) -> list[str]:
    """Losses of the toy model, and the time that it took."""
    said = []
    for name, on_gpu in (("train_cpu.json", False), ("train_h200/summary.json", True)):
        report = results.load(name, on_gpu)
        bits = " → ".join(f"{report[f'validation_bits_{when}']:.2f}" for when in ("before", "after"))
        size = f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']} steps in {report['seconds']:.0f} s"
        said.append(f"* {report['gpu'] or '2 CPU cores'}: {size}, {bits} bits per byte ({results.link(name)}).")
    return said


TRAINING_FILE = "benchmark_training.json"
RECALL_FILE = "recall.json"


def recall(results: Results) -> list[str]:
    """Accuracy by shape: a table per task, a row per width and mode."""
    report = results.load(RECALL_FILE)
    lines = [f"![accuracy by tokens and pairs]({results.prefix}recall.png)", ""]
    for task in dict.fromkeys(row["task"] for row in in_order(report["rows"])):
        of_task = [row for row in in_order(report["rows"]) if row["task"] == task]
        head = [f"{task}: queries answered rightly, %",
                *(f"T{shape.length}, {shape.pairs} pairs" for shape in selected(of_task[0]).shapes)]
        rows = []
        for row in of_task:
            chosen, cells = selected(row), []
            for figures in zip(chosen.mean, chosen.least, chosen.most, strict=True):
                mean, least, most = (f"{100 * x:.0f}" for x in figures)
                cells.append(mean if least == most else f"{mean} ({least}–{most})")
            rows.append([f"d{row['width']}, {MODES[row['mode']]}", *cells])
        lines += [*table(head, rows), ""]
    seeds = len(report["setup"]["seeds"])
    return [*lines, f"Mean of {seeds} seeds (range), {report['gpu']}, {_torch(report)} "
            f"({results.link(RECALL_FILE)})."]


def training_speed(results: Results) -> list[str]:
    """Tokens per second of a training step, relative to cuDNN's, a row per attention, a column per setting."""
    name = TRAINING_FILE
    report = results.load(name)
    found = {(row["variant"], setting_of(row)): row for row in report["rows"]}
    settings = sorted({setting for _, setting in found}, key=lambda s: (s[2], s[0], s[1]))
    head = ["thousand tokens per second, × cuDNN with rotary (share of attention)"]
    head += [f"D{dim} T{length}{', compiled' if compiled else ''}" for dim, length, compiled in settings]

    def cell(row: dict[str, Any] | None, base: dict[str, Any] | None) -> str:
        if row is None:
            return "–"
        text = f"{row['tokens_per_second'] / 1e3:.0f}"
        if base is not None:
            text += f", {row['tokens_per_second'] / base['tokens_per_second']:.2f}"
        if row["attention_share"] is not None and row["variant"] != IDENTITY:
            text += f" ({row['attention_share']:.0%})"
        return text

    rows = [[VARIANTS[name].label, *(cell(found.get((name, s)), found.get((BASELINE, s))) for s in settings)]
            for name in VARIANTS if any(key[0] == name for key in found)]
    absent = sorted({entry["variant"] for entry in report["missing"] if entry["kind"] == "absent"})
    failed = ["{variant}, {setting}: {kind}".format(**e) for e in report["missing"] if e["kind"] != "absent"]
    said = [f"Absent: {', '.join(absent)}."] * bool(absent) + [f"No speed: {'; '.join(failed)}."] * bool(failed)
    where = f"{report['gpu']}, {_torch(report)}, Triton {report['triton']} ({results.link(name)})."
    return [f"![tokens per second]({results.prefix}benchmark_training.png)", "", *table(head, rows), "",
            " ".join([where, *said])]


def precision(results: Results) -> list[str]:
    """Differences between trainings and the one in float32, and errors of gradients on its way: a finished study."""
    name = "training_precision.json"
    report = results.load(name)
    checks = next((row["gradients"] for row in report["rows"] if "gradients" in row), [])
    head = ["", "bits per byte, last steps", "minus float32", "largest difference"]
    head += [f"error of dW_in / gates, step {check['step']}" for check in checks]
    rows = []
    for entry in report["summary"]:
        apart = [entry.get(key) for key in ("loss", "difference", "largest_difference")]
        cells = ["–" if x is None else f"{float(x) / math.log(2):.4f}" for x in apart]
        errors = [check["runs"].get(entry["run"]) for check in checks]
        cells += [f"{e['in_proj']:.1e} / {e['decay']:.1e}" if isinstance(e, dict) else "–" for e in errors]
        rows.append([report["labels"][entry["run"]], *cells])
    absent = [f"{report['labels'][entry['run']]} ({entry['kind']})" for entry in report["missing"]]
    where = f"{report['gpu']}, {_torch(report)} ({results.link(name)})."
    return [f"![losses]({results.prefix}training_precision.png)", "", *table(head, rows), "",
            " ".join([where, *[f"Not there: {', '.join(absent)}."] * bool(absent)])]


# ------------------------------------------------------------------------------------------------------- several GPUs

CONTEXT_FILE = "benchmark_context.json"


def strategies(results: Results) -> list[str]:
    """Loss and speed of the toy language model on several devices and on one."""
    name = "benchmark_strategies.json"
    report = results.load(name)
    setup = report["setup"]
    head = ["run", "thousand tokens per second", "× one GPU", "validation, bits per byte", "training loss − one GPU's",
            "at most, in a step"]
    rows = [
        [row["run"], f"{row['tokens_per_second'] / 1e3:.0f}", f"{row['speed_over_one']:.2f}",
         f"{row['validation_bits']['bits'][-1]:.4f}", f"{row['difference']:+.4f}", f"{row['largest_difference']:.4f}"]
        for row in report["rows"]
    ]
    about = "{layers} layers, width {width}, context {context:,}, batch {batch_size}, {steps} steps".format(**setup)
    return [f"![losses and speeds]({results.prefix}benchmark_strategies.png)", "", *table(head, rows), "",
            f"{setup['devices']} × {report['gpu']}, {_torch(report)}, {about} ({results.link(name)})."]


def context(results: Results) -> list[str]:
    """A layer's attention over several GPUs and on one: milliseconds, speed and bytes."""
    report = results.load(CONTEXT_FILE)
    rows = {(row["length"], row["decay"], row["mode"], row["direction"]): row for row in report["rows"]}
    sizes = sorted({row["length"] for row in report["rows"]})
    timed = [way for way in (*_DIRECTIONS, "both") if way in {row["direction"] for row in report["rows"]}]
    lines = []
    for decay in dict.fromkeys(row["decay"] for row in report["rows"]):
        for mode in (mode for mode in dict.fromkeys(row["mode"] for row in report["rows"]) if mode != "one GPU"):
            cells = []
            for length in sizes:
                own = [rows.get((length, decay, mode, direction)) for direction in timed]
                speed = " / ".join("–" if not row or not row["speed_over_alone"] else f"{row['speed_over_alone']:.2f}"
                                   for row in own)
                sent = [_three_figures(max(row["received"]) / 1e6) for row in own if row and row["received"]]
                cells.append(f"{speed} ({' / '.join(sent)})" if sent else speed)
            lines.append([f"{_decay(decay)}, {mode}", *cells])
    first = next(row for row in report["rows"] if row["mode"] != "one GPU")
    worst = max(
        (error["over_budget"] for check in report["checks"] for error in check["errors"].values()
         if error["over_budget"] is not None), default=None,
    )
    checked = f" Largest error of {len(report['checks'])} checked cases over its budget: {worst:.2f}." if worst else ""
    shape = f"H{first['heads']} H_kv{first['kv_heads']} D{first['head_dim']} {first['dtype']}"
    return [f"![bytes and speeds]({results.prefix}benchmark_context.png)", "",
            *table([" / ".join(timed), *(f"T{length}" for length in sizes)], lines), "",
            f"Speed over one GPU with the whole sequence (MB that a rank receives). {report['ranks']} × "
            f"{report['gpu']}, {shape}, {_torch(report)} ({results.link(CONTEXT_FILE)}).{checked}"]


def _three_figures(x: float) -> str:
    """Three digits at least, and no exponent."""
    return f"{float(f'{x:.3g}'):,g}" if abs(x) < 1e5 else f"{x:,.0f}"


def simulation(results: Results) -> list[str]:
    """A calculation: milliseconds on more GPUs than were measured."""
    name = "simulate_context.json"
    report = results.load(name)
    ranks = list(dict.fromkeys(row["ranks"] for row in report["rows"]))
    rows = {(row["decay"], row["mode"], row["direction"], row["ranks"]): row for row in report["rows"]}
    lines = []
    for decay, mode in dict.fromkeys((row["decay"], row["mode"]) for row in report["rows"]):
        found = [[rows[decay, mode, direction, number] for direction in _DIRECTIONS] for number in ranks]
        cells = [" / ".join(_three_figures(row["one_gpu_ms"]) for row in found[0])]
        for pair in found:
            if pair[0]["ms"] is None:
                cells.append("–")
                continue
            times = " / ".join(_three_figures(row["ms"]) for row in pair)
            speeds = " / ".join(f"{row['speed_over_one']:.0f}" for row in pair)
            cells.append(f"{times} ({speeds})")
        lines.append([f"{_decay(decay)}, {mode}", *cells])
    return [
        *table(["ms forward / backward (× one GPU)", "one GPU", *(f"{number} GPUs" for number in ranks)], lines), "",
        f"One layer, T = {report['length']:,}; not run: calculated from {results.link(CONTEXT_FILE, 'the measured')} "
        f"times and bytes, {report['bandwidth'] / 1e9:.0f} GB/s within {report['node']} GPUs (measured between "
        f"{report['measured_ranks']}) and {report['network'] / 1e9:.0f} GB/s beyond (assumed) ({results.link(name)}).",
    ]


def _decay(decay: str) -> str:
    return {"none": "no decay", "alibi": "ALiBi"}.get(decay, f"mean λ {decay.replace('-', '−')}")


def files(results: Results) -> list[str]:
    """Origin of each file of results/."""
    rows = []
    for path in sorted(results.folder.rglob("*.json")):
        name = str(path.relative_to(results.folder))
        if name not in _NO_REPORT:
            report = results.load(name, on_gpu=False)
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
_COLUMNS = ((0, 1024), (4096, 16384))  # bytes before
_LENGTHS = (2048, 8192, 32768)


def _of_column(runs: list[dict[str, Any]], begin: int, end: int) -> list[float]:
    """Bits per byte of a stretch, one figure per seed."""
    return [column["bits"] for run in runs for row in run["reading"] for column in row["columns"]
            if (column["begin"], column["end"]) == (begin, end) and column["bits"] is not None]


def choice(results: Results) -> list[str]:
    """Bits per byte within and beyond the trained length, and accuracy of recall, a row per decay."""
    if not results.has(RECALL_FILE):
        return [NOT_MEASURED]
    read, recall = results.load(EXTRAPOLATION_FILE), results.load(RECALL_FILE)
    runs = {name: [run for run in runs_of(read) if run["scheme"] == name] for name in CHOICES}
    bits = {name: [_of_column(runs[name], *column) for column in _COLUMNS] for name in CHOICES}
    least = [min(statistics.fmean(row[n]) for row in bits.values() if row[n]) for n in range(len(_COLUMNS))]
    accuracy: dict[tuple[str, str], list[str]] = {}
    for row in sorted(recall["rows"], key=lambda row: row["width"]):
        accuracy.setdefault((row["task"], row["mode"]), []).append(f"{100 * selected(row).mean[-1]:.0f}")
    rows = []
    for name, label in CHOICES.items():
        means = [statistics.fmean(seeds) if seeds else None for seeds in bits[name]]
        cells = ["–" if x is None else f"{x:.3f}" for x in means]
        cells = [f"**{cell}**" if x == best else cell for cell, x, best in zip(cells, means, least, strict=True)]
        cells += [" / ".join(accuracy.get((task, name), ["–"])) for task in ("recall", "forgetting")]
        rows.append([label, *cells])
    head = ["decay", "bytes 0–1k", "bytes 4k–16k", "recall, %", "overwritten keys, %"]
    size = next(run["parameters"] for run in runs_of(read) if run["parameters"])
    widths = " and ".join(str(width) for width in sorted({row["width"] for row in recall["rows"]}))
    length, pairs, _ = recall["setup"]["shapes"][-1]
    page = f"{results.prefix.removesuffix('results/')}experiments/README.md"
    return [*table(head, rows), "", *_wrapped(
        f"Bits per byte of a {size / 1e6:.1f} M model that was trained on {read['settings']['context']:,} bytes; lower "
        f"is better. Queries that two layers of width {widths} answer, of {pairs} pairs of key and value in {length:,} "
        f"tokens. Means of 3 seeds ([extrapolation]({page}#length-extrapolation), [recall]({page}#associative-recall))."
    )]


def speed(results: Results) -> list[str]:
    """Attention and a training step relative to other libraries, and the gain of skipping, a column per length."""
    report, training, skipping = map(results.load, (SPEED_FILE, TRAINING_FILE, SKIPPING_FILE))
    attention = {
        (direction, shape.length, shape.head_dim): kernels["ours"]["ratio_to_cudnn"]
        for (shape, direction), kernels in speeds(report).items() if shape.causal
    }
    steps = {
        (row["variant"], length, dim): row["tokens_per_second"]
        for row in training["rows"] for dim, length, compiled in [setting_of(row)] if not compiled
    }
    gain = {
        (row["direction"], row["length"]): row["speed_over_whole"]
        for row in skipping["rows"] if (row["study"], row["peer"]) == ("lengths", "skipping")
    }
    rows = [
        [f"attention, {direction}, × cuDNN without a decay", *(_pair(attention, direction, n) for n in _LENGTHS)]
        for direction in _DIRECTIONS
    ]
    for peer, label in (
        (BASELINE, "cuDNN with rotary embeddings"), ("cudnn", "cuDNN without position embeddings"),
        ("fox-pruned", "FoX's kernel, pruned at e⁻¹⁰"),
    ):
        ratios = {("ours", *key): steps[("ours", *key)] / x for (name, *key), x in steps.items() if name == peer}
        rows.append([f"training step, × {label}", *(_pair(ratios, "ours", length) for length in _LENGTHS)])
    skips = [" / ".join(f"{gain[direction, length]:.2f}" for direction in _DIRECTIONS) for length in _LENGTHS]
    rows.append(["attention that skips, × the same without skipping", *skips])
    setup = training["setup"]
    head = [f"{report['gpu']}, bfloat16, causal", *(f"{length:,} tokens" for length in _LENGTHS)]
    return [*table(head, rows), "", *_wrapped(
        "Cells are head dimension 64 / 128; in the last row, forward / backward at 128. Attention has its decay and "
        "the gradient, 16 heads, mean λ −0.01, and visits every key except in the last row. Training: 124 M "
        f"parameters, {setup['tokens']:,} tokens per step, eager, half-lives from 4 to 1,024 tokens. "
        f"{_where(report)} ({results.link(SPEED_FILE, 'attention')}, "
        f"{results.link(TRAINING_FILE, 'training')}, {results.link(SKIPPING_FILE, 'skipping')})."
    )]


def _pair(ratios: Mapping[Any, float], first: str, length: int) -> str:
    """A ratio for each head dimension."""
    return " / ".join(f"{ratios[first, length, dim]:.2f}" for dim in (64, 128) if (first, length, dim) in ratios) or "–"


PICTURES: dict[str, Callable[[Results], Picture]] = {"speed.svg": speed_picture}
# by the name of a block, a file without which it is not measured yet, and its lines
BLOCKS: dict[str, tuple[str | None, Callable[[Results], list[str]]]] = {
    "pictures": (None, pictures), "attention": (None, attention), "skipping": (None, skipping),
    "planning": (None, planning), "lengths": (None, lengths), "sequences": (None, sequences),
    "eviction": (None, eviction), "overhead": (None, overhead), "training": (None, training), "files": (None, files),
    "extrapolation": (EXTRAPOLATION_FILE, extrapolation), "recall": (RECALL_FILE, recall),
    "training_speed": (TRAINING_FILE, training_speed), "precision": ("training_precision.json", precision),
    "strategies": ("benchmark_strategies.json", strategies), "context": (CONTEXT_FILE, context),
    "simulation": ("simulate_context.json", simulation), "choice": (EXTRAPOLATION_FILE, choice),
    "speed": (TRAINING_FILE, speed),
}

if __name__ == "__main__":
    sys.exit(main())
