"""Write the tables of README.md and experiments/README.md, and the picture of speeds, from the JSON in results/.

    python experiments/report.py            # rewrites the blocks from <!-- table: NAME --> to <!-- end -->
    python experiments/report.py --check    # changes nothing; exit status 1 and a diff where page and JSON disagree

JSON that does not say its commit, its GPU, the versions of torch and Triton, and the command is refused, and so is JSON
of code that differed from its commit, by what git said then or by the trees that it names: exit status 1.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from readme_tables.results import Refused, Results
from readme_tables.tables import BLOCKS, PICTURE, svg
from shared.provenance import ROOT

# the pages, and how each calls the folder of results
PAGES = {"README.md": "results/", "experiments/README.md": "../results/"}
_BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite the pages, or compare them; the exit status is 1 if they disagree or a file is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args(argv).check
    try:
        new = pages(root)
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    same = True
    for path, text in new.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old == text:
            continue
        same = False
        name = str(path.relative_to(root))
        if check:
            lines = (old.splitlines(keepends=True), text.splitlines(keepends=True))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name} from the JSON"))
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return int(check and not same)


def pages(root: Path) -> dict[Path, str]:
    """Every page, and the picture, as the JSON has it."""
    folder = root / "results"
    new = {root / name: rewritten(root / name, Results(folder, prefix)) for name, prefix in PAGES.items()}
    new[folder / PICTURE] = svg(Results(folder))
    return new


def rewritten(path: Path, results: Results) -> str:
    """The page with all of its blocks written again."""

    def block(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name not in BLOCKS:
            raise Refused(f"{path.name}: there is no table {name}; expected one of {', '.join(BLOCKS)}")
        return begin + "\n".join(BLOCKS[name](results)) + "\n" + end

    return _BLOCK.sub(block, path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
