"""Prose of the repository: docstrings, comments, error messages, Markdown and the names of tests.

* D1: a docstring opens with a noun or an imperative, not with a word of `OPENINGS`.
* D2: the first sentence of a docstring has at most 25 words.
* S1: every sentence of docstrings, comments and Markdown has at most 30 words.
* T1: the name of a test has at most 60 characters.
* W1: `VAGUE` words are rare. T2: the same in names of tests.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository_files import ROOT

pytestmark = pytest.mark.xdist_group("prose")  # one process reads all files
OPENINGS = re.compile(r"(?:What|Of|Whether|How|Where|Who|Whose|So|Those|In|Which|Why|That|It|They|And|As|Beside)\b")
# the words, and what to write
VAGUE = {
    r"who (?!was|were)\w+s|nobody|somebody|whoever": "name the rank, the thread or the caller",
    r"so many": "the number, n, up to n", r"what is (?!said)": "the noun", r"whose": "'with', or a new sentence",
    r"beside": "with, next to, compared with", r"behind one another": "consecutive, packed", r"anew": "again, new",
    r"mend(?:s|ed)?": "fix", r"(?:is|are|was|were) told": "receives", r"tells?": "returns, shows", r"pays": "is faster",
    r"stands?|lies": "is, starts at", r"as it is|as they are": "unchanged, current", r"shall": "must, is to",
    r"takes? part": "is included",
}
VAGUE_NAME = r"_(what|who|whose|nobody|so_many|beside|told|anew)(?=_|$)"
# numbers of places that are left; they only shrink
LIMITS = {"D1": 0, "D2": 0, "S1": 0, "T1": 0, "W1": 8, "T2": 0}
WORD = re.compile(r"[\w'’]+")


def sentences(text: str) -> list[str]:
    """Sentences without code and links; "::" introduces indented lines, which are left out."""
    text = re.sub(r"(?s)::\n.*?(?=\n\S|\Z)", "", text)
    text = re.sub(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)", r"\1 X", text)
    return [part for part in re.split(r"(?<=[.!?:;])\s+", " ".join(text.split())) if WORD.search(part)]


def python(source: str) -> Iterator[tuple[str, int, str]]:
    """(kind, line, text) of the docstrings, error messages, names of tests and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name, line = getattr(node, "name", ""), getattr(node, "lineno", 1)
            if name.startswith("test_"):
                yield "test", line, name
            if text := ast.get_docstring(node):
                yield "docstring", line, text
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            parts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            yield "error", node.lineno, " ".join(part for part in parts if isinstance(part, str))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield "comment", token.start[0], token.string.lstrip("#: ")


def markdown(page: str) -> Iterator[tuple[str, int, str]]:
    """(kind, line, text) of the paragraphs and list items, without headings, tables and code."""
    left_out = r"(?ms)^```.*?^```|<!-- table.*?<!-- end -->|^\|[^\n]*$|^    [^\n]*$"
    page = re.sub(left_out, lambda match: "\n" * match.group().count("\n"), page)
    for paragraph in re.finditer(r"(?:^[^\n#].*\n?)+", page, re.MULTILINE):
        line = page[: paragraph.start()].count("\n") + 1
        for item in re.split(r"(?m)^(?=[ ]*[-*] )", paragraph.group()):
            if item:
                yield "markdown", line, item
            line += item.count("\n")


def offences(kind: str, text: str) -> Iterator[tuple[str, str]]:
    """(rule, the words) of a text."""
    if kind == "test":
        if len(text) > 60:
            yield "T1", f"{text}: {len(text)} characters"
        yield from (("T2", text) for _ in re.finditer(VAGUE_NAME, text))
        return
    for number, part in enumerate(sentences(text) if kind != "error" else []):
        words = len(WORD.findall(part))
        if kind == "docstring" and number == 0 and OPENINGS.match(part):
            yield "D1", part
        if kind == "docstring" and number == 0 and words > 25:
            yield "D2", f"{words} words: {part}"
        if words > 30:
            yield "S1", f"{words} words: {part}"
    for words, instead in VAGUE.items():
        for match in re.finditer(rf"\b(?:{words})\b", text):
            around = " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
            yield "W1", f"{match.group()!r} in …{around}…: {instead}"


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Offences of each rule in the tracked files."""
    command = ["git", "-C", ROOT, "ls-files", "*.py", "*.md"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    if not listed:
        pytest.skip("not a clone")
    found: dict[str, list[str]] = {rule: [] for rule in LIMITS}
    for path in filter(Path.exists, (ROOT / name for name in listed)):
        text = path.read_text(encoding="utf-8")
        for kind, line, prose in python(text) if path.suffix == ".py" else markdown(text):
            for rule, words in offences(kind, prose):
                found[rule].append(f"{path.relative_to(ROOT)}:{line}: {words}")
    return found


@pytest.mark.parametrize("rule", LIMITS)
def test_prose_obeys_rule(rule, found):
    places = "\n".join(found[rule])
    assert len(found[rule]) <= LIMITS[rule], f"{len(found[rule])} places, at most {LIMITS[rule]}:\n{places}"


@pytest.mark.parametrize(("kind", "text", "rules"), [
    ("docstring", "What it returns.", ["D1"]),
    ("docstring", "Return one::\n\n    " + "code " * 40 + "\n", []),
    ("docstring", "Return " + "one " * 25 + ".", ["D2"]),
    ("docstring", "Return one. " + "Two " * 31 + ".", ["S1"]),
    ("comment", "a row whose key `x` nobody reads stands still", ["W1", "W1", "W1"]),
    ("error", "expected one, " + "got " * 40, []),
    ("test", f"test_{'a' * 56}_what", ["T1", "T2"]),
])
def test_rules_find_offences(kind, text, rules):
    assert [rule for rule, _ in offences(kind, text)] == rules
