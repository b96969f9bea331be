"""`python -m decayattn.check`: exit status 0 where all is right, and 1 with the name of each fault."""

import contextlib
import itertools
import math
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from judged_calls import DEVICE, ON_GPU
from processes import run_python

from decayattn import compatibility
from decayattn.backends import registry
from decayattn.backends.planning import skipping
from decayattn.check import __main__ as check
from decayattn.check import calls

CPU = torch.device("cpu")
TINY = calls.Case("triton", "dense", torch.float32, 8, 20, 1, 2, 1)
EAGER = replace(TINY, backend="reference")
INTERPRETED = calls.cases(CPU, ["hopper"])


class InThisProcess(calls.Tasks):
    """Tasks that see this process's patches."""

    def start(self):
        self.process = SimpleNamespace(kill=lambda: None)

    def receive(self):
        try:
            return self.function(*self.tasks[0])
        except Exception as error:
            return calls.one_line(error)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the program with these cases as all that is judged, in this process: (exit status, output)."""

    def run(*cases, device=DEVICE):
        def some(device, unchecked):
            return {case.backend: [case] for case in cases if case.backend not in unchecked}

        monkeypatch.setattr(calls, "cases", some)
        monkeypatch.setattr(check, "Tasks", InThisProcess)
        return check.main(["--device", device, "--no-speed"]), capsys.readouterr().out

    return run


def row(printed: str, case: calls.Case) -> str:
    """Row of the table of errors, or an empty string."""
    rows = [line for line in printed.splitlines() if line.split()[:1] == [case.backend] and f" T{case.length}," in line]
    return "".join(rows)


# Cases


@pytest.mark.parametrize("case", [*itertools.chain(*INTERPRETED.values())], ids=lambda case: case.name)
def test_every_case_of_a_cpu_passes(case):
    """Shorter than the program judges them, because the interpreter is slow."""
    if ON_GPU and case.backend != "reference":
        pytest.skip("its kernels are not interpreted here")
    verdict = calls.judge(replace(case, length=case.length if case.kind == "plan" else 23), "cpu")
    assert verdict.passed, verdict
    assert 0 < verdict.fraction < 1


@pytest.mark.parametrize("absent", [(), ("hopper",), ("hopper", "triton")])
def test_each_gpu_backend_judges_three_shapes_and_the_plan(absent, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = calls.cases(torch.device("cuda", 0), absent)
    assert found.keys() == {*registry.KERNELS, "reference"} - {*absent}
    for name in found.keys() - {"reference"}:
        kinds = {case.kind: case for case in found[name]}
        first = next(kernel for kernel in registry.AUTOMATIC if kernel not in absent)  # what "auto" takes is timed
        assert kinds.keys() - {"cache"} == {"timed" if name == first else "dense", "packed", "constant", "plan"}
        assert ("cache" in kinds) == (name == "triton")
        assert kinds["plan"].length >= skipping.SHORTEST
        assert len({case.name for case in found[name]}) == len(found[name])


def test_timed_case_passes(device):
    verdict = calls.judge(replace(TINY, kind="timed", dtype=torch.float16, kv_heads=2), str(device))
    assert verdict.passed, verdict
    assert verdict.seconds > 0


def test_plan_that_drops_keys_fails(monkeypatch, run):
    monkeypatch.setattr(skipping, "SHORTEST", 200)
    case, plan = replace(INTERPRETED["triton"][-1], length=300), skipping.plan
    monkeypatch.setattr(skipping, "plan", lambda *given: (plan(*given) + 1).clamp(max=4))
    status, printed = run(case)
    assert status == 1
    assert row(printed, case).endswith("FAIL")
    monkeypatch.setattr(skipping, "plan", lambda *given: torch.zeros_like(plan(*given)))
    status, printed = run(case)
    assert status == 1
    assert "expected skipped keys" in row(printed, case)


def test_wrong_cache_fails(monkeypatch, run):
    decode = registry.load("triton").decode
    monkeypatch.setattr(registry.load("triton"), "decode", lambda *a, **o: (decode(*a, **o)[0] * 1.001, None))
    status, printed = run(replace(TINY, kind="cache"))
    assert status == 1
    assert row(printed, TINY).split()[-2:] == ["out", "FAIL"]


# The report


def test_right_results_exit_with_0(run, monkeypatch):
    monkeypatch.setattr(compatibility, "fallbacks", lambda: ["torch._C._gone cannot be used"])
    status, printed = run(EAGER, TINY)
    assert status == 0, printed
    assert "All that was checked is right" in printed
    # every backend can be checked on some GPUs
    assert ON_GPU or printed.splitlines()[-1].startswith("Not checked, for the reasons above: ")
    for title in ("Versions", "torch", "Triton", "Errors against float64"):
        assert title in printed
    assert row(printed, EAGER).endswith("ok")
    assert row(printed, TINY).endswith("ok")
    assert printed.count("torch._C._gone cannot be used") == 1


@pytest.mark.parametrize(("direction", "place", "factor", "tensor"), [
    ("forward", 1, 1.001, "lse"), ("backward", 3, 1.001, "dlog_decay"), ("forward", 0, math.nan, None),
])
def test_wrong_kernel_is_named(direction, place, factor, tensor, monkeypatch, run):
    portable = registry.load("triton")
    right = getattr(portable, direction)

    def wrong(*args, **kwargs):
        results = right(*args, **kwargs)
        changed = (*results[:place], results[place] * factor, *results[place + 1 :])
        return type(results)._make(changed) if direction == "backward" else changed

    monkeypatch.setattr(portable, direction, wrong)
    status, printed = run(TINY, EAGER)
    assert status == 1
    assert row(printed, TINY).split()[-1] == "FAIL"
    assert row(printed, EAGER).endswith("ok")
    assert "Wrong, 1 in" in printed
    assert f"triton, {TINY.name}: {tensor or ''}" in printed


def test_failed_compilation_is_one_line_and_the_rest_runs(monkeypatch, run):
    failing = mock.Mock(side_effect=RuntimeError("PassManager::run failed\nand much else"))
    monkeypatch.setattr(registry.load("triton"), "backward", failing)
    status, printed = run(TINY, EAGER)
    assert status == 1
    assert "ERROR" in row(printed, TINY)
    assert row(printed, TINY).endswith("RuntimeError: PassManager::run failed")
    assert row(printed, EAGER).endswith("ok")
    assert "much else" not in printed


def test_broken_import_of_a_backend_is_a_fault(monkeypatch, run):
    def load(name):
        if name == "hopper":
            raise ImportError("cannot import name 'tma'", name="decayattn.backends.hopper.tma")
        return registry_load(name)

    registry_load = registry.load
    monkeypatch.setattr(registry, "load", load)
    status, printed = run(replace(TINY, backend="hopper"), TINY)
    assert status == 1
    assert "backend hopper cannot be imported: ImportError: cannot import name 'tma'" in printed
    assert row(printed, replace(TINY, backend="hopper")) == ""
    assert row(printed, TINY).endswith("ok")


def test_program_runs_without_triton_and_interprets_it(interpreter):
    """The program finds Triton missing, and switches the interpreter on before anything imports it."""
    code = f"""
        import sys, torch
        from decayattn.check import __main__ as check, calls

        if __name__ == "__main__":
            sys.modules["triton"] = None  # what import finds where it is not installed
            print(check.backends(torch.device("cpu")))
            del sys.modules["triton"]
            check.registry.load.cache_clear()
            tiny = calls.{TINY!r}
            calls.cases = lambda device, unchecked: {{"triton": [tiny]}} if "triton" not in unchecked else {{}}
            print("exit status", check.main(["--device", "cpu"]))
    """
    without, printed = run_python("-c", textwrap.dedent(code), without="TRITON_INTERPRET").split("\n", 1)
    assert without.count("cannot be imported: ") == 2
    assert "pip install triton" in without
    assert without.endswith(", [])")  # no fault
    assert row(printed, TINY).endswith("ok"), printed
    assert printed.endswith("Not checked, for the reasons above: hopper.\nexit status 0\n")


def test_gpu_with_interpreted_kernels_is_a_fault(monkeypatch):
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=True))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    backend = SimpleNamespace(unavailable=lambda dtype, device: None)
    monkeypatch.setattr(registry, "load", lambda name: backend)
    unchecked, faults = check.backends(torch.device("cuda", 0))
    assert set(unchecked) == set(registry.KERNELS)
    assert "TRITON_INTERPRET is set" in faults[0]
    assert check.backends(CPU)[1] == []


@pytest.mark.parametrize("options", [["--device", "tpu"], ["--device", "mps"], ["--device", "cuda:99"], ["--fast"]])
def test_wrong_option_exits_with_2(options, capsys):
    with pytest.raises(SystemExit) as raised:
        check.main(options)
    assert raised.value.code == 2
    assert options[0] in capsys.readouterr().err


# Processes


@pytest.mark.slow
def test_tasks_survive_errors_exits_and_hangs():
    """An exception, an exit status and the time limit each take one result, and the next task a new process."""
    sources = ["4", "1 / 0", "__import__('os')._exit(3)", "2 + 2", "__import__('time').sleep(600)"]
    tasks, found = calls.Tasks(eval, [(source,) for source in sources]), []
    for answer in tasks:
        found.append(answer)
        tasks.seconds = 1.0 if len(found) == 4 else 300.0  # for the task that sleeps
    assert found == [
        4, "ZeroDivisionError: division by zero", "its process ended with exit status 3", 4, "it took more than 1 s",
    ]


def test_interrupted_program_ends_its_processes(monkeypatch):
    started = []

    class Interrupted(InThisProcess):
        def start(self):
            started.append(self)
            self.process = mock.Mock()

        def receive(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(check, "Tasks", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        check.main(["--device", "cpu"])
    assert len(started) == (1 if ON_GPU else len(INTERPRETED))  # with a GPU, kernels are not interpreted
    assert all(tasks.process.kill.called for tasks in started)


# Speed


def test_speed_is_reported_of_a_right_backend_only(monkeypatch, run, capsys):
    timed = replace(TINY, kind="timed", kv_heads=2)

    def timer(statement, globals):
        globals["call"](globals["name"])
        median = {"decayattn": 1e-3, "SDPA": 2e-3}[globals["name"]]
        return mock.Mock(**{"blocked_autorange.return_value.median": median})

    monkeypatch.setattr(calls, "Timer", timer)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    lines = calls.measure(timed, "cpu")
    assert lines == [f"{way} 1.000 ms, 2.00x the speed of SDPA without decay" for way in ("forward", "with gradients")]
    run(timed)
    verdict = calls.Verdict(True, 0.5, "out", 1.0, ())
    for found, status, text in ((verdict, 0, "forward 1.000 ms"), ("RuntimeError: bad", 1, "")):
        monkeypatch.setattr(calls, "judge", lambda case, device, found=found: found)
        assert check.main(["--device", DEVICE]) == status
        printed = capsys.readouterr().out
        assert ("Speed: " in printed) == (status == 0)
        assert text in printed


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
def test_gpu_passes_every_section(monkeypatch, capsys):
    """The whole program, with a short timed call."""
    monkeypatch.setattr(calls, "TIMED_SHAPE", (1, 1000, 2))
    status = check.main([])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "ms, " in printed
