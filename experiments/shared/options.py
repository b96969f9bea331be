"""How the benchmarks declare their options."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import other_versions
from shared.provenance import ROOT, commit_of


def declare(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> Callable[..., None]:
    """option(name, help, **settings) as parser.add_argument, with this machine's default, which the help tells."""

    def option(name: str, help: str, **settings: Any) -> None:
        key = name.removeprefix("--").replace("-", "_")
        default = settings.setdefault("default", defaults.get(key))
        if isinstance(default, list):
            default = " ".join(map(str, default))
        elif isinstance(default, Path):
            default = default.relative_to(ROOT)
        parser.add_argument(name, help=f"{help} (default: {default})", **settings)

    return option


def declare_output(option: Callable[..., None], output: str = "JSON file", plot: bool = False) -> None:
    """The commit that a report names, and where it is written; plot: as a picture, too."""
    option("--commit", "commit of the code, for a copy of it whose git does not know", default=None)
    option("--output", output, type=Path)
    if plot:
        option("--plot", "PNG file; None: beside the JSON file", type=Path)


def expect_positive(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """An error for an option that is given and not above 0."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name}: expected a positive number, got {value}")


def expect_interpreted_dtype(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An error for a dtype that Triton's interpreter cannot take, on a machine without a GPU."""
    if options.dtype == "bfloat16":
        parser.error("--dtype: expected float16 or float32, got bfloat16: Triton's interpreter multiplies it wrongly")


def parse_speeds(parser: argparse.ArgumentParser, argv: Sequence[str], cuda: bool) -> argparse.Namespace:
    """The options of a benchmark that has no speeds without a GPU, its plot beside its JSON."""
    options = parser.parse_args(argv)
    if not cuda:
        expect_interpreted_dtype(parser, options)
        if options.output or options.plot:
            parser.error("--output, --plot: no GPU here, so there is no speed to write")
    if options.output and not options.plot:
        options.plot = options.output.with_suffix(".png")
    return options


def declare_before(option: Callable[..., None]) -> None:
    """Another version of the package, measured beside this one."""
    option("--before", "a checkout of another commit, to measure beside this one", type=_tree, default=None)
    option("--before-commit", "its commit, for a copy whose git does not know", default=None)


def before_commit(options: argparse.Namespace) -> str | None:
    """For the report; None without another version, and where nobody knows."""
    return options.before and (options.before_commit or commit_of(options.before))


def _tree(text: str) -> Path:
    try:
        other_versions.load(Path(text))
    except FileNotFoundError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def positive(text: str) -> int:
    """The type of an option that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return number
