"""The marked block of length extrapolation, a function of results/ to lines of Markdown."""

from extrapolation.results import table
from shared.plots import kilo

from readme_tables.results import Results

EXTRAPOLATION_FILE = "length_extrapolation.json"


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
