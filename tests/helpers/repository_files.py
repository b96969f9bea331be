"""Paths of this repository's files, and the code blocks of its pages."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
EXPERIMENTS = ROOT / "experiments"


def code_blocks(language: str, page: Path) -> list[str]:
    """Fenced code blocks of that language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
