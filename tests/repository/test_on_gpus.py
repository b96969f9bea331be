"""Steps of the script that runs on GPUs: their order, their GPUs, those left out, and those ended in time."""

import importlib.util
import json
import shlex
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci/on_gpus.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("on_gpus", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_gpus", module)  # dataclasses look there
    spec.loader.exec_module(module)
    for name in ("CUDA_VISIBLE_DEVICES", "DECAYATTN_COMMIT"):  # the script itself may run these tests
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "PACKAGES", ())
    monkeypatch.setattr(module, "gpu_count", lambda: 2)
    monkeypatch.setattr(module, "head", lambda: "abc")
    return module


def step(script, name, kind="check", code="print('fine')", **options):
    return script.Step(name, kind, options.pop("minutes", 1), "{python} -c " + shlex.quote(code), **options)


def ran(folder):
    return json.loads((folder / "steps.json").read_text())


def test_every_script_of_a_step_is_there(script, capsys):
    assert script.main(["--list", "--seed", "27"]) == 0
    printed = capsys.readouterr().out
    scripts = [word for word in printed.split() if word.startswith("experiments/")]
    assert len(scripts) > 8
    assert all((SCRIPT.parents[1] / path).is_file() for path in scripts)
    assert printed.count("fuzz_kernels.py") == 2  # one for each GPU, with other calls
    assert "--seed 27" in printed
    assert "--seed 28" in printed


@pytest.mark.parametrize(("gpus", "expected"), [
    (2, [[["suite", "fuzz"]], [["sustained", "sequences"], ["memcheck"]], [["context"]], [["overhead"]]]),
    (1, [[["suite", "fuzz", "sustained", "memcheck", "sequences", "overhead"]]]),
])
def test_timed_steps_share_no_gpu(script, gpus, expected):
    names = ("suite", "fuzz", "sustained", "memcheck", "sequences", "context", "overhead")
    steps = sorted((s for s in script.STEPS if s.name in names), key=lambda s: names.index(s.name))
    found = [[[s.name for s in queue] for queue in together] for together in script.stages(steps, gpus)]
    assert found == expected


@pytest.mark.parametrize(("visible", "seen"), [(None, ["0", "1", "0,1"]), ("3,GPU-7", ["3", "GPU-7", "3,GPU-7"])])
def test_gpus_that_a_step_sees(script, visible, seen, monkeypatch, tmp_path):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    kinds = [step(script, kind, kind) for kind in ("timed", "check", "whole")]
    assert [next(script.commands(one, 2, tmp_path, {}))[1] for one in kinds] == seen
    of_each = script.commands(step(script, "x", "whole", each=True), 2, tmp_path, {})
    assert [gpus for _, gpus, _ in of_each] == seen[:2]


def test_other_versions(script, monkeypatch, tmp_path, capsys):
    """Steps that need one are left out without it; another Triton is what Python looks into first."""
    assert script.main(["--list"]) == 0
    without = capsys.readouterr().out
    folder, tree = tmp_path / "another triton", tmp_path / "tree"
    assert script.main(["--list", "--triton", str(folder), "--before", str(tree)]) == 0
    printed = capsys.readouterr().out
    assert set(without.splitlines()) < set(printed.splitlines())
    assert f"PYTHONPATH={folder} " in printed
    assert f"--before {tree} " in printed
    code = "import sys; print(sys.path[1])"
    monkeypatch.setattr(script, "STEPS", (step(script, "triton", code=code, path="{triton}"),))
    assert script.main(["--output", str(tmp_path), "--steps", "triton", "--triton", str(folder)]) == 0
    assert ran(tmp_path)["triton"]["commands"][0]["last_lines"] == [str(folder)]


def test_successful_steps_do_not_run_again(script, monkeypatch, tmp_path, capsys):
    steps = (step(script, "good"), step(script, "bad", code="import sys; sys.exit('broken')"))
    monkeypatch.setattr(script, "STEPS", steps)
    arguments = ["--output", str(tmp_path)]
    assert script.main([*arguments, "--steps", "good"]) == 0
    first = ran(tmp_path)["good"]
    assert [first["commands"][0][name] for name in ("status", "last_lines", "gpus")] == [0, ["fine"], "1"]
    assert first["commit"] == "abc"
    for _ in range(2):
        capsys.readouterr()
        assert script.main([*arguments, "--steps", "good", "bad"]) == 1
        printed = capsys.readouterr().out
        assert "bad begins" in printed
        assert "good begins" not in printed
        assert "bad: status 1" in printed
        assert "broken" in printed
    assert ran(tmp_path)["good"] == first
    # of another commit nothing is known, neither what ended well nor what failed
    monkeypatch.setattr(script, "head", lambda: "another")
    capsys.readouterr()
    assert script.main([*arguments, "--steps", "bad", "--minutes", "0"]) == 0
    assert "bad: not run" in capsys.readouterr().out
    assert script.main([*arguments, "--steps", "good"]) == 0
    assert ran(tmp_path)["good"]["commit"] == "another"


@pytest.mark.parametrize(("commit", "goes_on"), [(None, False), ("abc+", False), ("abc", True)])
def test_steps_run_again_where_needed(script, commit, goes_on, monkeypatch, tmp_path, capsys):
    """A step runs again if its commit is unknown, or if it goes on where it ended."""
    monkeypatch.setattr(script, "head", lambda: commit)
    monkeypatch.setattr(script, "STEPS", (step(script, "good", goes_on=goes_on),))
    for _ in range(2):
        assert script.main(["--output", str(tmp_path), "--steps", "good"]) == 0
        assert "good begins" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's list of processes")
def test_time_that_is_up(script, monkeypatch, tmp_path, capsys):
    """A step that may end too late is not begun; one that does not end is ended, with its child processes."""
    hanging = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    monkeypatch.setattr(script, "STEPS", (
        step(script, "long", minutes=9.0), step(script, "hanging", code=hanging, minutes=2 / 60),
    ))
    steps = ["--steps", "long", "hanging"]
    assert script.main(["--output", str(tmp_path), "--minutes", "1", *steps]) == 1
    printed = capsys.readouterr().out
    assert "long: may take 9 minutes" in printed
    assert "long: not run" in printed
    hung = ran(tmp_path)["hanging"]["commands"][0]
    assert hung["status"] == "ended after 2 s"
    assert hung["seconds"] < 30
    started = Path(f"/proc/{hung['last_lines'][0]}/stat")
    until = time.monotonic() + 10
    while started.exists() and started.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < until:
        time.sleep(0.1)
    assert time.monotonic() < until


def test_missing_packages_and_gpus_end_the_script(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "PACKAGES", ("json", "no_such_package"))
    assert script.main(["--output", str(tmp_path)]) == 2
    assert "not installed: no_such_package" in capsys.readouterr().err
    monkeypatch.setattr(script, "PACKAGES", ())
    monkeypatch.setattr(script, "gpu_count", lambda: 0)
    assert script.main(["--output", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
