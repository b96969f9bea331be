"""The README: every Python block runs alone, as a reader would paste it; commands and links name what exists."""

import re

import pytest
import torch
from repository_files import EXPERIMENTS, ROOT, code_blocks

README = ROOT / "README.md"
PAGES = (README, EXPERIMENTS / "README.md", ROOT / "decayattn/DERIVATION.md", ROOT / "decayattn/MIGRATION.md")


def blocks(language: str) -> list[str]:
    return code_blocks(language, README)


def run(block: str) -> dict:
    """Its names, in a module of its own."""
    names = {"__name__": "readme"}
    exec(compile(block, "a Python block of README.md", "exec"), names)
    return names


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_every_example_runs_alone(number):
    block = blocks("python")[number]
    try:
        run(block)
    except Exception as error:
        pytest.fail(f"README.md, Python block {number + 1}: {error!r}\n{block}")


def test_the_examples_give_what_they_say():
    first, function, sequences, layer, generation = map(run, blocks("python"))
    assert first["out"].shape == (2, 1000, 8, 64)
    assert first["gate"].grad.shape == (2, 1000, 8)
    assert len([line for line in blocks("python")[0].splitlines() if line]) <= 10
    assert (function["out"].shape, function["lse"].shape) == ((2, 100, 8, 64), (2, 8, 100))
    assert all(function[name].grad.any() for name in ("bias", "sink", "scale"))
    assert sequences["packed"].shape == (60, 8, 64)
    assert layer["Block"](16, 2)(torch.zeros(1, 3, 16)).shape == (1, 3, 16)
    assert layer["gate"].half_lives(layer["x"]).shape == (2, 100, 8)
    assert generation["y"].shape == (1, 1, 512)
    assert generation["lost"].shape == (1, 8)
    assert generation["lost"].max() <= 1e-6


def test_the_first_screen_has_what_a_visitor_needs():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
    assert any(line.startswith("![") for line in lines[:20])
    assert any("git clone" in line for line in lines[:40])
    assert any(line.startswith("Tested on") for line in lines[:40])
    silent = "\n".join(lines[:45])
    for mistake in ("λ is the LOGARITHM of a gate", "ALiBi's rates are negative", "tensors are (B, T, H, D)"):
        assert f"**{mistake}**" in silent


def test_the_commands_name_what_exists():
    text = "\n".join(blocks("sh"))
    assert "experiments/train_toy_lm.py" in re.findall(r"python (\S+\.py)", text)
    for page in PAGES:
        for script in re.findall(r"python (\S+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), script
    assert "pip install -e '.[experiments]'" in text
    assert "pip install -e '.[test]'" in text
    # of the clone: no index has the package
    assert not re.search("pip install '?decayattn", README.read_text(encoding="utf-8"))


def test_the_map_names_every_module_and_folder():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 40
    assert set(re.findall(r"python (\S+\.py)", page)) == {"experiments/fuzz_kernels.py", "experiments/report.py"}
    table = " ".join(re.findall(r"^\| ([^|]*)", page, re.MULTILINE))
    files = {path.name for path in (ROOT / "decayattn").iterdir() if path.suffix in (".py", ".md")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in (ROOT / "decayattn").glob("*/__init__.py")}
    assert set(re.findall(r"\w+(?:\.py|\.md|/)", table)) == files | folders | {"decayattn/"}


def test_every_script_has_its_line():
    page = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    helpers = {"sanitize_control.py"}  # what scripts import
    scripts = {path.name for path in EXPERIMENTS.glob("*.py")} - helpers
    assert set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == scripts


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), target


def test_continuous_integration_runs_the_commands_of_the_readme():
    command = next(line for line in blocks("sh")[0].splitlines() if "pytest" in line)
    assert command.split(" && ")[1] in (ROOT / ".ci/run").read_text().splitlines()
