"""The README: every Python block runs alone, as a reader would paste it; commands and links name what exists."""

import re

import pytest
from repository_files import EXPERIMENTS, ROOT, code_blocks

README = ROOT / "README.md"
PAGES = (README, EXPERIMENTS / "README.md", *sorted((ROOT / "decayattn").glob("*.md")))


def blocks(language: str) -> list[str]:
    return code_blocks(language, README)


def test_examples_run_alone_and_give_documented_shapes():
    names = []
    for number, block in enumerate(blocks("python"), start=1):
        names.append({"__name__": "readme"})
        try:
            exec(compile(block, "a Python block of README.md", "exec"), names[-1])
        except Exception as error:
            pytest.fail(f"README.md, Python block {number}: {error!r}\n{block}")
    first, function, layer, generation, hugging_face = names
    assert first["out"].shape == (2, 1000, 8, 64)
    assert first["gate"].grad.shape == (2, 1000, 8)
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 10
    assert (function["out"].shape, function["lse"].shape) == ((2, 100, 8, 64), (2, 8, 100))
    assert all(function[name].grad.any() for name in ("bias", "sink", "scale"))
    assert layer["y"].shape == (2, 100, 512)
    assert layer["half_lives"][""][[0, -1]].tolist() == pytest.approx([4, 1024], rel=1e-3)
    assert generation["y"].shape == (1, 1, 512)
    assert generation["lost"].shape == (1, 8)
    assert generation["lost"].max() <= 1e-6
    assert hugging_face["llama"].config.added_decay["decay"] == "scalar"


def test_first_screen_has_reasons_commands_and_traps():
    text = README.read_text(encoding="utf-8")
    screen = text[: text.index("\n## ")]
    assert "![" in screen[: screen.index("- **")]
    assert len(re.findall(r"^- \*\*.*\.\*\*", screen, re.MULTILINE)) == 5
    assert "\nTested on" in screen
    for mistake in ("λ is the LOGARITHM of a gate", "ALiBi's rates are negative", "tensors are (B, T, H, D)",
                    "A `padding_mask` is True at tokens"):
        assert f"**{mistake}**" in screen


@pytest.mark.parametrize("name", ["README", "decayattn/MIGRATION", "decayattn/RECIPES", "experiments/README"])
def test_lines_of_prose_have_at_most_120_characters(name):
    text = re.sub(r"(?s)<!-- table: .*?<!-- end -->", "", (ROOT / f"{name}.md").read_text(encoding="utf-8"))
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_readme_has_short_sentences():
    """A mean of at most 14 words."""
    text = README.read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^```.*?^```|<!-- table.*?<!-- end -->|^\|.*?$|^    .*?$|^#.*?$", "", text)
    text = re.sub(r"`[^`]*`|\[([^\]]*)\]\([^)]*\)", r"\1 X", text)
    counts = [len(re.findall(r"[\w'’]+", sentence)) for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n- ", text)]
    counts = [count for count in counts if count]
    assert sum(counts) <= 14 * len(counts)


def test_commands_name_existing_scripts():
    text = "\n".join(blocks("sh"))
    assert "experiments/train_toy_lm.py" in re.findall(r"python (\S+\.py)", text)
    for page in PAGES:
        current = page.read_text(encoding="utf-8").partition("<!-- table: files -->")[0]  # commands of older commits
        for script in re.findall(r"python (\S+\.py)", current):
            assert (ROOT / script).is_file(), script
    assert "pip install ." in text
    assert "pip install -e '.[experiments]'" in text
    assert "pip install -e '.[test]'" in text
    # from a checkout: no index has the package
    assert not re.search("pip install '?decayattn", README.read_text(encoding="utf-8"))


def test_contributing_maps_every_module_and_folder():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"python (\S+\.py)", page)) == {"experiments/tools/fuzz_kernels.py", "experiments/report.py"}
    table = " ".join(re.findall(r"^\| ([^|]*)", page, re.MULTILINE))
    files = {path.name for path in (ROOT / "decayattn").iterdir() if path.suffix in (".py", ".md")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in (ROOT / "decayattn").glob("*/__init__.py")}
    assert set(re.findall(r"\w+(?:\.py|\.md|/)", table)) == files | folders | {"decayattn/"}


def test_experiments_page_lists_every_script():
    page = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    files = [*EXPERIMENTS.glob("*.py"), *EXPERIMENTS.glob("*/*.py")]
    scripts = {str(path.relative_to(EXPERIMENTS)) for path in files if "__main__" in path.read_text(encoding="utf-8")}
    assert set(re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE)) == scripts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_links_lead_to_files_and_headings(page):
    for file, heading in re.findall(r"\]\((?!https?://)([^)#\s]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / file if file else page
        assert target.exists(), file
        if heading:  # as GitHub writes it
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles], file


def test_ci_runs_the_test_command_of_the_readme():
    command = next(line for line in blocks("sh")[0].splitlines() if "pytest" in line)
    assert command.split(" && ")[1] in (ROOT / ".ci/run").read_text().splitlines()
