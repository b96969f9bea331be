"""What was measured: method, a table, a figure."""

from typing import Any

from matplotlib.figure import Figure
from shared.plots import frame, legend_entries

from training_benchmark.variants import BASELINE, IDENTITY, VARIANTS

METHOD = {
    "step": "forward, backward and fused AdamW of a 12-layer decoder of width 768 with 124 M parameters in float32, "
    "bfloat16 autocast, random tokens; the learning rate is 0, so that all variants step on the same weights",
    "ms": "steps back to back for `seconds` between two CUDA events, after a quarter of that: median over interleaved "
    "rounds; ms_range: min, max",
    "attention_share": "1 − time of the same step whose attention and decay are replaced by v / time of the step: "
    "median over the rounds; what else of a kernel's call reaches the rest of the step, as copies, counts as attention",
    "peak_bytes": "torch.cuda.max_memory_allocated over a step, parameters and optimiser included",
    "checks": "loss and gradients of every variant's first step, on the first tokens of the batch, beside float64: at "
    "most twice the error of the eager reference in the same precision, plus eps(bfloat16); who is outside gets no "
    "speed",
    "gates": "initial: half-lives of 4 to 1,024 tokens over the heads of every layer; trained: mean half-lives of the "
    "heads of the trained toy language model, layer by layer, stretched to this one's layers and heads",
    "compiled": "torch.compile of the block and of the loss; kernels that cannot be traced break the graph",
}
# colour-blind safe (Okabe and Ito)
_COLOURS = {"ours": "#d55e00", "cudnn": "#000000", "flex": "#56b4e9", "fla": "#009e73", "fox": "#cc79a7",
            "identity": "#bbbbbb"}

_MARKERS = {"trained": "s", "whole": "^", "rotary": "D", "pruned": "v"}


def setting_of(row: dict[str, Any]) -> tuple[int, int, bool]:
    return row["head_dim"], row["length"], row["compiled"]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of one setting."""
    base = next((row["tokens_per_second"] for row in rows if row["variant"] == BASELINE), None)
    lines = [f"  {'':20}{'tokens/s':>10} {'ms':>9} {'[range]':>19} {'/cuDNN':>7} {'attention':>9} {'GB':>6}"]
    for row in rows:
        ratio = "–" if base is None else f"{row['tokens_per_second'] / base:.2f}"
        share = "–" if row["attention_share"] is None else f"{row['attention_share']:.0%}"
        spread = f"[{row['ms_range'][0]:.1f}–{row['ms_range'][1]:.1f}]"
        lines.append(
            f"  {row['variant']:20}{row['tokens_per_second']:10.0f} {row['ms']:9.1f} {spread:>19} {ratio:>7} "
            f"{share:>9} {row['peak_bytes'] / 1e9:6.1f}"
        )
    return "\n".join(lines)


def draw(report: dict[str, Any]) -> Figure:
    """Tokens per second over the context, a panel per head dimension, eager and compiled; dashed: without a decay."""
    rows = report["rows"]
    panels_of = sorted({(row["compiled"], row["head_dim"]) for row in rows})
    figure = Figure(figsize=(1.5 + 4.2 * len(panels_of), 5.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(panels_of), squeeze=False, sharey=True)[0]
    for panel, (compiled, head_dim) in zip(panels, panels_of, strict=True):
        same = [row for row in rows if (row["compiled"], row["head_dim"]) == (compiled, head_dim)]
        for name in dict.fromkeys(row["variant"] for row in same):
            _draw_variant(panel, name, sorted((r for r in same if r["variant"] == name), key=lambda r: r["length"]))
        lengths = sorted({row["length"] for row in same})
        panel.set_title(f"D = {head_dim}, {'torch.compile' if compiled else 'eager'}", fontsize="medium")
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        frame(panel)
        panel.set_xlabel("tokens of context")
    panels[0].set_ylabel("tokens per second")
    handles = legend_entries(panels)
    figure.legend(handles.values(), [VARIANTS[name].label for name in handles], loc="outside lower center", ncols=2,
                  frameon=False, fontsize="small")
    figure.suptitle(f"A training step of a 124 M model, {report['gpu']}, torch {report['torch']}", fontsize="medium")
    return figure


def _draw_variant(panel: Any, name: str, rows: list[dict[str, Any]]) -> None:
    tokens = [row["tokens_per_second"] for row in rows]
    limits = [[row["batch"] * row["length"] / ms * 1e3 for ms in row["ms_range"]] for row in rows]
    bars = [[t - low for t, (_, low) in zip(tokens, limits, strict=True)],
            [high - t for t, (high, _) in zip(tokens, limits, strict=True)]]
    without = VARIANTS[name].kind != "decay" and name != IDENTITY
    panel.errorbar(
        [row["length"] for row in rows], tokens, yerr=bars, label=name, capsize=3,
        color=_COLOURS[name.split("-")[0]], linestyle="--" if without else ":" if name == IDENTITY else "-",
        marker=_MARKERS.get(name.split("-")[-1], "o"), markersize=5,
        linewidth=2.4 if name.startswith("ours") else 1.4,
    )
