"""Where this repository's files are, and the code blocks of its pages."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
EXPERIMENTS = ROOT / "experiments"


def code_blocks(language: str, page: Path) -> list[str]:
    """What is fenced as code of that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
