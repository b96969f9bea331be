"""Origin of a figure: versions, commit and command, and git's ids of the code, also without a repository."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from report import Refused, Results
from shared import provenance
from shared.report import resumed
from test_report import ORIGIN


def git(folder, *arguments):
    """Output of git there."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a commit, and with files that are not tracked."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # of a hook that runs the tests, say: they name its repository
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    files = ("a-b", "a.b", "a/1", "a/b/2", "a0", "run.sh", "ä", ".hidden")
    for name in (*(f"decayattn/{name}" for name in files), "experiments/x.py", "other.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    (tmp_path / "decayattn/run.sh").chmod(0o755)
    (tmp_path / "decayattn/link").symlink_to("nowhere")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "--quiet", "--message", "x")
    for name in ("__pycache__/x.pyc", "a/x.pyc", ".cache/x", "x.egg-info/x", "only/__pycache__/x"):
        path = tmp_path / "decayattn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    (tmp_path / "results").mkdir()
    return tmp_path


def test_provenance_names_versions_and_the_commit(monkeypatch):
    monkeypatch.delenv("DECAYATTN_COMMIT", raising=False)
    known, head = provenance.provenance("x.py", ["--rounds", "3"]), provenance.trees_of("HEAD", provenance.ROOT)
    assert known["torch"] == torch.__version__
    assert known["command"] == "python x.py --rounds 3"
    assert set(known["trees"]) == {"decayattn", "experiments"}
    if head is not None:  # a clone
        assert known["commit"] == git(provenance.ROOT, "rev-parse", "HEAD")
        changed = git(provenance.ROOT, "status", "--porcelain", "--", "decayattn", "experiments", "pyproject.toml")
        assert known["dirty"] == bool(changed)
        assert changed or known["trees"] == head
    monkeypatch.setenv("DECAYATTN_COMMIT", "given")
    given = provenance.provenance("x.py", [])
    assert (given["commit"], given["dirty"]) == ("given", None)


def test_recorded_command_has_no_absolute_paths():
    typed = ["--output", "/home/me/a b.json", "--plot=/tmp/x.png", "--lengths", "64", "--commit=abc"]
    expected = "python x.py --output 'a b.json' --plot=x.png --lengths 64 --commit=abc"
    assert provenance.command_line("x.py", typed) == expected


def test_tree_ids_equal_those_of_git(repository):
    folder = repository / "decayattn"
    expected = git(repository, "rev-parse", "HEAD:decayattn")
    assert provenance.tree_id(folder) == expected
    assert provenance.tree_id(folder / "a") == git(repository, "rev-parse", "HEAD:decayattn/a")
    provenance.tree_id.cache_clear()
    (folder / "run.sh").chmod(0o644)
    assert provenance.tree_id(folder) != expected
    (folder / "run.sh").chmod(0o755)
    (folder / "a/b/2").write_text("changed")
    provenance.tree_id.cache_clear()
    assert provenance.tree_id(folder) != expected


def test_figures_of_uncommitted_code_raise(repository):
    results = Results(repository / "results")
    head = git(repository, "rev-parse", "HEAD")
    trees = {name: git(repository, "rev-parse", f"HEAD:{name}") for name in ("decayattn", "experiments")}
    assert provenance.trees_of(head, repository / "results") == trees

    def load(**origin):
        (results.folder / "x.json").write_text(json.dumps(ORIGIN | {"dirty": None} | origin))
        return results.load("x.json")

    assert load(commit=head, trees=trees)["trees"] == trees
    load(commit=head)  # of before reports named them
    load(commit="0" * 40, trees=dict.fromkeys(trees, "0" * 40))  # of a commit that git does not know
    with pytest.raises(Refused, match=rf"x\.json: experiments differed from commit {head[:9]} when"):
        load(commit=head, trees=trees | {"experiments": "0" * 40})
    with pytest.raises(Refused, match="decayattn and experiments differed"):
        load(commit=head[:9], trees=dict.fromkeys(trees, "0" * 40))


def test_report_of_other_code_does_not_resume(tmp_path):
    new = ORIGIN | {"trees": {"decayattn": "1", "experiments": "2"}, "setup": {}}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(new | {"rows": [1]}))
    assert resumed(new, path)["rows"] == [1]
    for other in ({"trees": {"decayattn": "1", "experiments": "3"}}, {"setup": {"rounds": 3}}):
        with pytest.raises(SystemExit, match=f"has {next(iter(other))}"):
            resumed(new | other, path)
