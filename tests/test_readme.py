"""The README's Python runs, top to bottom, as a reader would paste it."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str, document: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_every_example_runs(capsys):
    names = {"__name__": "readme"}
    for number, block in enumerate(blocks("python"), start=1):
        try:
            exec(compile(block, f"README.md, Python block {number}", "exec"), names)
        except Exception as error:
            pytest.fail(f"README.md, Python block {number}: {error!r}\n{block}")
    assert names["out"].shape == (2, 100, 8, 64)
    assert names["lse"].shape == (2, 8, 100)
    assert all(comparison.passed for comparison in names["comparisons"])
    assert names["Block"](16, 2)(names["torch"].zeros(1, 3, 16)).shape == (1, 3, 16)
    assert "dlog_decay" in capsys.readouterr().out


def test_the_commands_name_what_exists():
    text = "\n".join(blocks("sh"))
    scripts = re.findall(r"python (\S+\.py)", README.read_text(encoding="utf-8"))
    assert "experiments/train_toy_lm.py" in scripts
    for script in scripts:
        assert (README.parent / script).is_file(), script
    assert "pip install -e '.[experiments]'" in text
    assert "pip install -e '.[test]'" in text


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target


def test_continuous_integration_runs_the_commands_of_the_readme():
    command = next(line for line in blocks("sh")[0].splitlines() if "pytest" in line)
    assert command.split(" && ")[1] in (README.parent / ".ci/run").read_text().splitlines()
