"""The marked blocks of what decay buys a model, each a function of results/ to lines of Markdown."""

from typing import Any

from extrapolation.results import table
from shared.plots import kilo

from readme_tables import curves
from readme_tables.results import Results

EXTRAPOLATION_FILE = "length_extrapolation.json"
PICTURE = "length_extrapolation.svg"


def curve(results: Results) -> tuple[str, str]:
    """(picture of losses over position, what it is of); raises Refused where nothing is known of its origin."""
    report = results.load(EXTRAPOLATION_FILE)
    size = next(run["parameters"] for run in report["runs"] if run["parameters"])
    seeds = len({run["seed"] for run in report["runs"]})
    pages = results.prefix.removesuffix("results/")
    how = f"[how, and what it means]({pages}experiments/README.md#length-extrapolation)"
    return f"![{_title(report)}]({results.prefix}{PICTURE})", (
        f"{_title(report)}: {size / 1e6:.1f} M parameters, mean of {seeds} seeds, Python source of packages that they "
        f"were not trained on ({how}, {results.link(EXTRAPOLATION_FILE)})."
    )


def svg(results: Results) -> str:
    """The picture itself."""
    report = results.load(EXTRAPOLATION_FILE)
    return curves.draw(curves.curves_of(report), report["settings"]["context"], _title(report))


def _title(report: dict[str, Any]) -> str:
    return f"Loss over position of byte models that were trained on texts of {report['settings']['context']:,} bytes"


def extrapolation(results: Results) -> list[str]:
    """Loss over position: the figure, the table, and of what it is."""
    name = EXTRAPOLATION_FILE
    if not results.has(name):
        return ["Not measured yet."]
    report = results.load(name)
    head, rows = table(report)
    seeds = sorted({run["seed"] for run in report["runs"]})
    settings, corpus = report["settings"], report["corpus"]
    size = next(run["parameters"] for run in report["runs"] if run["parameters"])
    context, trained = settings["context"], settings["steps"] * settings["batch_size"] * settings["context"]
    held_out, training = corpus["held out"], corpus["training"]
    crops = {row["length"]: row["crops"] for run in report["runs"] for row in run["reading"]}
    texts = " and ".join(f"{number} texts of {kilo(length)}" for length, number in sorted(crops.items()))
    alt = f"Bits per byte over the position for every scheme, trained at {kilo(context)} bytes"
    return [
        f"![{alt}]({results.prefix}{name.removesuffix('.json')}.png)", "",
        f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), "",
        f"Mean of {len(seeds)} seeds (and their range). {size / 1e6:.1f} M parameters, {trained / 1e6:.0f} MB of "
        f"Python source at {kilo(context)} bytes; {texts} bytes read, of {held_out['packages']} packages that are not "
        f"among the {training['packages']} of the training; {report['gpu']}, torch {report['torch'].split('+')[0]}, "
        f"Triton {report['triton']} ({results.link(name)}).",
    ]


BLOCKS = {"extrapolation": extrapolation}
