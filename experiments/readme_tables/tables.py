"""The marked blocks, each a function of results/ to lines of Markdown."""

from collections.abc import Iterator
from typing import Any

from sequence_benchmark.decoding import PAGE, PAGED

from readme_tables import evidence, front_page, learning, picture, several_gpus
from readme_tables.front_page import SKIPPING_FILE, SPEED_FILE
from readme_tables.learning import table
from readme_tables.results import Results, Shape, Speeds, speeds

# has kernels of others that SPEED_FILE lacks
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
PICTURE = "speed.svg"
LABELS = {
    "ours": "decayattn, decay and its gradient",
    "ours before": "the earlier commit",
    "ours, no decay": "decayattn, no decay",
    "ours, no decay before": "the earlier commit, no decay",
    "ours, constant": "decayattn, a constant per head and its gradient",
    "ours, constant before": "the earlier commit, a constant per head",
    "triton": "decayattn's Triton kernels, decay and its gradient",
    "triton before": "the earlier commit",
    "triton, no decay": "decayattn's Triton kernels, no decay",
    "triton, no decay before": "the earlier commit, no decay",
    "triton, constant": "decayattn's Triton kernels, a constant per head and its gradient",
    "triton, constant before": "the earlier commit, a constant per head",
    "flash_attn": "FlashAttention-4, no decay",
    "flex": "FlexAttention, decay without its gradient",
    "fox": "Forgetting Transformer, decay and its gradient",
    "fla": "flash-linear-attention, decay and its gradient",
    "cudnn": "cuDNN (PyTorch SDPA), no decay",
}
_OTHERS = ("flash_attn", "flex", "fox", "fla")
# data of a run whose report is another file
_NO_REPORT = ("train_h200/half_lives.json", "train_h200/attention.json")
_DIRECTIONS = ("forward", "backward")


def _where(report: dict[str, Any]) -> str:
    cudnn = int(report.get("cudnn") or 0)
    versions = [f"torch {report['torch'].split('+')[0]}", f"Triton {report['triton']}"]
    if cudnn:
        versions.append(f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}")
    return ", ".join([report["gpu"], *versions])


# --------------------------------------------------------------------------------------------------- speed of attention


def _of_files(results: Results) -> tuple[Speeds, dict[str, str]]:
    """(causal speeds by shape and direction, and of every kernel the file that it is from)."""
    own = SPEED_FILE
    found = {key: dict(kernels) for key, kernels in speeds(results.load(own)).items() if key[0].causal}
    source = {kernel: own for kernels in found.values() for kernel in kernels}
    others = speeds(results.load(OTHERS_FILE)) if results.has(OTHERS_FILE) else {}
    lacking = [kernel for kernel in _OTHERS if kernel not in source]
    for key in found.keys() & others.keys():
        borrowed = {kernel: others[key][kernel] for kernel in lacking if kernel in others[key]}
        found[key] |= borrowed
        source |= dict.fromkeys(borrowed, OTHERS_FILE)
    return found, source


def _sources(results: Results, source: dict[str, str]) -> Iterator[str]:
    """The files of a comparison, the one of ours first."""
    own = source["ours"]
    report = results.load(own)
    replayed = ", replayed by CUDA graphs" if report.get("captured") else ""
    regime = f"sustained: calls back to back{replayed}, at the power limit"
    yield f"{_where(report)}; bfloat16, causal; {regime} ({results.link(own)})."
    borrowed = [LABELS[kernel].split(",")[0] for kernel in _OTHERS if source.get(kernel) == OTHERS_FILE]
    if borrowed:
        names = " and ".join([", ".join(borrowed[:-1]), borrowed[-1]] if len(borrowed) > 1 else borrowed)
        other = results.load(OTHERS_FILE)
        elsewhere = f" on an {other['gpu']}," if other["gpu"] != report["gpu"] else ""
        launched = " launched from Python," if replayed and not other.get("captured") else ""
        yield f"{names}:{elsewhere}{launched} against cuDNN in a process of its own ({results.link(OTHERS_FILE)})."


def ratios(results: Results) -> picture.Ratios:
    """Multiples of cuDNN's speed."""
    return {
        (kernel, shape, direction): figures["ratio_to_cudnn"]
        for (shape, direction), kernels in _of_files(results)[0].items()
        for kernel, figures in kernels.items()
        if kernel in picture.COLOURS and figures["ratio_to_cudnn"] is not None
    }


def svg(results: Results) -> str:
    """The picture of speeds."""
    return picture.draw(ratios(results), LABELS, _alt(results))


def _alt(results: Results) -> str:
    found = ratios(results)
    said = []
    for direction in _DIRECTIONS:
        own = [ratio for (kernel, _, way), ratio in found.items() if kernel == "ours" and way == direction]
        said.append(f"{direction} {min(own):.2f} to {max(own):.2f}")
    return f"Speed of attention with a decay, relative to cuDNN without one: {', '.join(said)}"


def pictures(results: Results) -> list[str]:
    """The picture of speeds, with one line on where they are from."""
    source = _of_files(results)[1]
    on = f"on an {_card(results.load(source['ours']))}"
    other = _card(results.load(OTHERS_FILE)) if source.get("flash_attn") == OTHERS_FILE else None
    others = f" (FlashAttention-4: on an {other}, against cuDNN there)" if other else ""
    return [
        f"![{_alt(results)}]({results.prefix}{PICTURE})", "",
        *front_page.wrapped(
            f"Speed relative to cuDNN attention without a decay, {on}{others}. [How it was measured](#how-fast)"
        ),
    ]


def _card(report: dict[str, Any]) -> str:
    return report["gpu"].removeprefix("NVIDIA ").split()[0]


def attention(results: Results) -> list[str]:
    """A row per kernel, a column per shape."""
    found, source = _of_files(results)
    tables = [*_speed_table(found, source, True), "", " ".join(_sources(results, source))]
    for name, what, causal in MORE_SPEEDS:
        if results.has(name):
            report = results.load(name)
            before = f", {report['before'][:7]}" if report.get("before") else ""
            tables += ["", f"{what}{before} ({results.link(name)}):", ""]
            found = speeds(report)
            tables += _speed_table(found, set().union(*found.values()), causal)
    return tables


def _dims(shape: Shape) -> str:
    return f"{shape.head_dim}" if shape.value_dim == shape.head_dim else f"{shape.head_dim}/{shape.value_dim}"


def _speed_table(found: Speeds, kernels: Any, causal: bool) -> list[str]:
    shapes = sorted({shape for shape, _ in found if shape.causal == causal})
    heads = {shape.heads for shape in shapes}
    assert len(heads) == 1, "one number of heads in a table"
    head = [f"forward / backward, H{heads.pop()}"]
    head += [f"D{_dims(shape)} T{shape.length} B{shape.batch}" for shape in shapes]
    names = [name for name in LABELS if name in kernels and name != "cudnn"]
    rows = [[LABELS[name], *(_pair(found, shape, name, "ratio_to_cudnn", 2) for shape in shapes)] for name in names]
    # what others read first: ours in bold
    rows = [[f"**{cell}**" for cell in row] if name == "ours" else row for name, row in zip(names, rows, strict=True)]
    for name in ("cudnn", names[0]):
        label = f"{LABELS[name]}, TFLOP/s"
        rows.append([label, *(_pair(found, shape, name, "tflops", 0) for shape in shapes)])
    return table(head, rows)


def _pair(found: Speeds, shape: Shape, name: str, key: str, digits: int) -> str:
    """Forward / backward of one kernel."""
    both = (found.get((shape, direction), {}).get(name, {}).get(key) for direction in _DIRECTIONS)
    return " / ".join("–" if number is None else f"{number:.{digits}f}" for number in both)


# ---------------------------------------------------------------------------------------------------------- skipping


def skipping(results: Results) -> list[str]:
    """Milliseconds with and without the tiles that cannot matter."""
    name = SKIPPING_FILE
    report = results.load(name)
    labels = {
        "skipping": "**decayattn, what is skipped ≤ 2⁻²⁴ of any row**",
        "whole": "decayattn, nothing skipped",
        "fox pruned": "Forgetting Transformer, pruned at e⁻¹⁰",
        "cudnn": "cuDNN, no decay, nothing skipped",
    }
    columns = [("pruning", "uniform", "mean λ −0.01"), ("constant", "alibi", "ALiBi")]
    where = f"ms forward / backward; {report['gpu']}, bfloat16, causal, B1 H16 ({results.link(name)})"
    head, cells = [where], {peer: [] for peer in labels}
    visited = ["fraction of the tiles that is visited"]
    for study, rates, what in columns:
        chosen = [row for row in report["rows"] if (row["study"], row["rates"]) == (study, rates)]
        for dim, length in sorted({(row["head_dim"], row["length"]) for row in chosen}):
            head.append(f"{what}, T{length} D{dim}")
            for peer, row_of_cells in cells.items():
                of_peer = [row for row in chosen if (row["head_dim"], row["peer"]) == (dim, peer)]
                ms = {row["direction"]: f"{row['ms']:#.3g}".rstrip(".") for row in of_peer}
                row_of_cells.append(" / ".join(ms.get(direction, "–") for direction in _DIRECTIONS))
            row = next(row for row in chosen if (row["head_dim"], row["peer"]) == (dim, "skipping"))
            visited.append(f"{1 / row['ideal']:.2f}")
    lines = table(head, [[label, *cells[peer]] for peer, label in labels.items()] + [visited])
    return lines


def planning(results: Results) -> list[str]:
    """What looking for tiles to skip costs where there are none."""
    name = SKIPPING_FILE
    report = results.load(name)
    rows = []
    for row in report["rows"]:
        if (row["study"], row["peer"], row["direction"]) == ("planning", "skipping", "forward"):
            reads = "the decay alone tells" if row["rates"] == "none to speak of" else "q and k are read"
            shape = f"B{row['batch']} T{row['length']} D{row['head_dim']}"
            whole = row["ms"] * row["speed_over_whole"]  # a speed over another is the other's time over its own
            ms = f"{whole:.2f} ms", f"{row['ms']:.2f} ms ({row['ms'] / whole - 1:+.1%})"
            rows.append([shape, reads, f"{row['plan_us']:.0f} µs", *ms])
    return table(["shape", "", "the plan", "a forward that does not look", "a forward"], rows)


def lengths(results: Results) -> list[str]:
    """Time over the length, with and without skipping."""
    name = SKIPPING_FILE
    report = results.load(name)
    rows = {}
    for row in report["rows"]:
        if row["study"] == "lengths":
            rows.setdefault(row["length"], {}).setdefault(row["peer"], []).append(f"{row['ms']:#.3g}".rstrip("."))
            head_dim = row["head_dim"]
    lines = [
        [f"T{length}", *(" / ".join(by_peer.get(peer, ["–"])) for peer in ("skipping", "whole"))]
        for length, by_peer in rows.items()
    ]
    head = ["ms forward / backward", "decayattn", "nothing skipped"]
    return [*table(head, lines), "", f"B1 H16 D{head_dim}, mean λ −0.01, {_where(report)} ({results.link(name)})."]


# ------------------------------------------------------------------------------------- sequences, host time, training


def sequences(results: Results) -> list[str]:
    """Packed documents beside a dense batch of the same work, and decoding beside a copy of memory."""
    name = "benchmark_sequences.json"
    report = results.load(name)
    packed = {}
    for row in report["packed"]:
        if row["workload"] == "packed":
            packed.setdefault(row["head_dim"], []).append(row["ratio_to_alike"])
    fraction = ", ".join(f"{' / '.join(f'{x:.2f}' for x in both)} (D{dim})" for dim, both in packed.items())
    labels = {"cache": "with the cache", "captured": "captured in a CUDA graph", "evict": "evicting",
              "recompute": "without a cache"}
    written = {row["mode"]: f"{row['tokens_per_second']:.0f}" for row in report["generate"]}
    speeds = ", ".join(f"{written[mode]} {label}" for mode, label in labels.items() if mode in written)
    prompt = report["generate"][0]["prompt"]
    paged, decode = [], []
    for row in report["decode"]:
        if row["decay"] != "copy":
            (paged if row["decay"].endswith(PAGED) else decode).append(row)
    ratio = min(row["ratio_to_copy"] for row in decode)
    in_pages = f"; in pages of {PAGE} tokens, {min(row['ratio_to_copy'] for row in paged):.2f}" if paged else ""
    case = "{batch} × {tokens:,} tokens, H{heads} H_kv{kv_heads} D{head_dim}".format(**decode[0])
    return [
        "* Packed documents of mixed length, TFLOP/s over those of a dense batch of the same work, forward / "
        f"backward: {fraction}.",
        f"* One new token over {case} cached: the cache is read at {ratio:.2f} times the speed of a copy of memory, or "
        f"more, in every decay mode{in_pages}.",
        f"* Tokens per second that a toy model of {report['generate'][0]['case'].split(', half')[0]} writes after "
        f"{prompt:,} tokens: {speeds}. Without a graph so small a model waits for Python.",
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
    """What a small call costs the host, how much of it without autograd's threads, and the device in a CUDA graph."""
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
    """What the toy model learns, in which time."""
    said = []
    for name, on_gpu in (("train_cpu.json", False), ("train_h200/summary.json", True)):
        report = results.load(name, on_gpu)
        bits = " → ".join(f"{report[f'validation_bits_{when}']:.2f}" for when in ("before", "after"))
        size = f"{report['parameters'] / 1e6:.1f} M parameters, {report['steps']} steps in {report['seconds']:.0f} s"
        said.append(f"* {report['gpu'] or '2 CPU cores'}: {size}, {bits} bits per byte ({results.link(name)}).")
    return said


# ------------------------------------------------------------------------------------------------- experiments/README


def files(results: Results) -> list[str]:
    """Where each file of results/ is from."""
    rows = []
    for path in sorted(results.folder.rglob("*.json")):
        name = str(path.relative_to(results.folder))
        if name in _NO_REPORT:
            continue
        report = results.load(name, on_gpu=False)
        where = report["gpu"] or "CPU"
        rows.append(
            [
                results.link(name, f"`{name}`"),
                f"`{report['command']}`",
                f"{where}, torch {report['torch']}, Triton {report['triton']}",
                f"{report['commit'][:9]}, {report['date'][:10]}",
            ]
        )
    return table(["file", "command", "where", "commit, date"], rows)


BLOCKS = {
    "pictures": pictures, "attention": attention, "skipping": skipping, "planning": planning, "lengths": lengths,
    "sequences": sequences, "eviction": eviction, "overhead": overhead, "training": training, "files": files,
    **evidence.BLOCKS, **front_page.BLOCKS, **learning.BLOCKS, **several_gpus.BLOCKS,
}
