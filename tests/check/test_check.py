"""`python -m decayattn.check`: right where all is right, and exit status 1 with a name for whatever is not."""

import contextlib
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from decayattn import compatibility
from decayattn.backends import registry
from decayattn.backends.planning import skipping
from decayattn.backends.runtime import launching, tma
from decayattn.check import __main__ as check
from decayattn.check import choice, errors, processes, speed

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CPU = torch.device("cpu")
F32 = torch.float32
TINY = errors.Case(F32, 8, length=20, batch=1, heads=2, kv_heads=1)


def run(monkeypatch, capsys, *tasks, device=DEVICE) -> tuple[int, str]:
    """Exit status and output, with these (backend, case) as all that is judged, in this process."""
    monkeypatch.setattr(errors, "cases", lambda device, unchecked: [task for task in tasks if task[0] not in unchecked])
    status = check.main(["--device", device, "--no-speed", "--processes", "1"])
    return status, capsys.readouterr().out


def rows(printed: str, backend: str, length: int = TINY.length) -> list[str]:
    """Rows of the table of errors."""
    return [line for line in printed.splitlines() if line.split()[:1] == [backend] and f" T{length}" in line]


# What is judged


def test_every_case_of_a_cpu_is_right():
    """Most of them shorter than the program judges them: the interpreter takes its time."""
    for backend, case in errors.cases(CPU):
        if backend == "reference" or not ON_GPU:
            length = case.length if case.decay == "strong" else 23
            verdict = errors.judge(backend, replace(case, length=length), "cpu")
            assert verdict.passed, verdict
            assert verdict.error is None
            assert 0 < verdict.fraction < 1


def test_a_gpu_has_every_decay_dtype_and_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tasks = errors.cases(torch.device("cuda", 0))
    for backend in registry.KERNELS:
        some = [case for name, case in tasks if name == backend]
        assert {case.decay for case in some} == set(errors._DECAYS)
        assert {case.dtype for case in some} >= {torch.float16, torch.bfloat16}
        assert {case.head_dim for case in some} >= {64, 128}
        assert {case.causal for case in some} == {True, False}
        assert any(case.decay == "strong" and case.length >= skipping.SHORTEST for case in some)
    dense, others = {"dense", "last rows", "packed", "options"}, {"decode", "paged", "halo", "timed"}
    assert {case.form for _, case in tasks} == dense | others
    assert len({(name, case.name) for name, case in tasks}) == len(tasks)


@pytest.mark.parametrize("absent", [(), ("hopper",), ("hopper", "triton")])
def test_what_is_timed_is_judged(absent, monkeypatch):
    """By the backend that "auto" takes."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tasks = errors.cases(torch.device("cuda", 0), absent)
    assert not {name for name, _ in tasks} & set(absent)
    timed = [(name, case.head_dim, case.decay) for name, case in tasks if case.form == "timed"]
    fastest = [name for name in registry.AUTOMATIC if name not in absent][:1]
    assert set(timed) == {(name, dim, decay) for name in fastest for dim in (64, 128) for decay in ("scalar", "none")}
    assert all((case.batch, case.heads, case.length) == errors.TIMED_SHAPE for _, case in tasks if case.form == "timed")


def test_a_timed_case_is_right(device):
    case = errors.Case(torch.float16, 16, form="timed", length=23, batch=2, heads=3, kv_heads=3)
    verdict = errors.judge("triton", case, str(device))
    assert verdict.passed, verdict
    assert verdict.seconds > 0


def test_a_halo_of_two_processes_is_right(interpreter, tmp_path):
    case = errors.Case(F32, 8, "strong", "halo", length=200, batch=1, heads=1, kv_heads=1, store=str(tmp_path / "s"))
    tasks = [("triton", replace(case, rank=rank), "cpu") for rank in range(2)]
    with processes.in_processes(errors.judge, tasks, 2) as answers:
        for verdict in answers:
            assert verdict.passed, verdict


def test_a_halo_takes_two_gpus(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for count, number, reason in ((1, 4, "it needs two GPUs and NCCL"), (2, 1, "it needs two processes"), (2, 4, None)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        assert errors.no_halo(gpu, number) == reason
    assert errors.no_halo(CPU, 4) == "it needs two GPUs and NCCL"
    assert not any(case.form == "halo" for _, case in errors.cases(gpu, ["halo"]))
    halves = [case for _, case in errors.cases(gpu) if case.form == "halo"]
    assert [case.rank for case in halves] == [0, 1]
    assert len({case.store for case in halves}) == 1


# What is wrong


def test_a_plan_that_drops_keys_is_wrong(monkeypatch, capsys):
    [(backend, case)] = [task for task in errors.cases(CPU) if task[1].decay == "strong"]
    plan = skipping.plan
    monkeypatch.setattr(skipping, "plan", lambda *given: (plan(*given) + 1).clamp(max=4))
    status, printed = run(monkeypatch, capsys, (backend, case))
    assert status == 1
    assert rows(printed, backend, 700)[0].endswith("FAIL")
    monkeypatch.setattr(skipping, "plan", lambda *given: torch.zeros_like(plan(*given)))
    status, printed = run(monkeypatch, capsys, (backend, case))
    assert status == 1
    assert "expected skipped keys" in rows(printed, backend, 700)[0]


def test_all_right(monkeypatch, capsys):
    status, printed = run(monkeypatch, capsys, ("reference", TINY), ("triton", TINY))
    assert status == 0, printed
    assert "All that was checked is right" in printed
    assert printed.splitlines()[-1].startswith("Not checked, for the reasons above: ")
    for title in ("Versions", "torch", "Triton", 'backend="auto"', "Errors against float64"):
        assert title in printed
    assert len(re.findall(r"^  \(\d+\.\d s\)$", printed, re.MULTILINE)) == 3  # what every section took
    assert all(line.endswith("ok") for backend in ("reference", "triton") for line in rows(printed, backend))


@pytest.mark.parametrize(("direction", "place", "tensor"), [("forward", 1, "lse"), ("backward", 3, "dlog_decay")])
def test_a_wrong_kernel_is_named(direction, place, tensor, monkeypatch, capsys):
    portable = registry.load("triton")
    right = getattr(portable, direction)

    def wrong(*args, **kwargs):
        results = right(*args, **kwargs)
        changed = (*results[:place], results[place] * 1.001, *results[place + 1 :])
        return type(results)._make(changed) if direction == "backward" else changed

    monkeypatch.setattr(portable, direction, wrong)
    status, printed = run(monkeypatch, capsys, ("triton", TINY), ("reference", TINY))
    assert status == 1
    (row,) = rows(printed, "triton")
    assert row.split()[-2:] == [tensor, "FAIL"]
    assert rows(printed, "reference")[0].endswith("ok")
    assert "Wrong, 1 in" in printed
    assert f"triton, {TINY.name}: {tensor} is " in printed


def test_a_nan_is_wrong(monkeypatch, capsys):
    portable = registry.load("triton")
    right = portable.forward
    monkeypatch.setattr(portable, "forward", lambda *a: (lambda out, *rest: (out * torch.nan, *rest))(*right(*a)))
    status, printed = run(monkeypatch, capsys, ("triton", TINY))
    assert status == 1
    assert rows(printed, "triton")[0].endswith("FAIL")


def test_failed_compilation_is_one_line_and_the_rest_runs(monkeypatch, capsys):
    def failing(*args, **kwargs):
        raise RuntimeError("PassManager::run failed\nand much else")

    monkeypatch.setattr(registry.load("triton"), "backward", failing)
    status, printed = run(monkeypatch, capsys, ("triton", TINY), ("reference", TINY))
    assert status == 1
    assert "ERROR" in rows(printed, "triton")[0]
    assert rows(printed, "triton")[0].endswith("RuntimeError: PassManager::run failed")
    assert rows(printed, "reference")[0].endswith("ok")
    assert "much else" not in printed


def test_a_backend_that_breaks_while_it_is_imported_is_wrong(monkeypatch, capsys):
    def load(name):
        if name == "hopper":
            raise ImportError("cannot import name 'tma'", name="decayattn.backends.hopper.tma")
        return backends_load(name)

    backends_load = registry.load
    monkeypatch.setattr(registry, "load", load)
    status, printed = run(monkeypatch, capsys, ("hopper", TINY), ("triton", TINY))
    assert status == 1
    assert "backend hopper cannot be imported: ImportError: cannot import name 'tma'" in printed
    assert rows(printed, "hopper") == []
    assert rows(printed, "triton")[0].endswith("ok")


def test_a_program_of_its_own_without_triton_and_with_it(interpreter):
    """The program finds Triton missing, and switches the interpreter on before anything imports it."""
    code = f"""
        import sys
        import torch
        from decayattn.backends import registry
        from decayattn.check import __main__ as check, errors

        tiny = errors.{TINY!r}
        tasks = [("reference", tiny), ("triton", tiny)]
        errors.cases = lambda device, unchecked: [task for task in tasks if task[0] not in unchecked]
        sys.modules["triton"] = None  # what import finds where it is not installed
        print("exit status", check.main(["--device", "cpu"]))
        del sys.modules["triton"]
        registry.load.cache_clear()
        print("exit status", check.main(["--device", "cpu"]))
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    without, rest, status = finished.stdout.split("exit status ")
    assert "triton cannot be imported: " in without
    assert "pip install triton" in without
    assert rows(without, "reference")[0].endswith("ok")
    assert rows(without, "triton") == []
    assert "Not checked, for the reasons above: triton, hopper" in without
    assert rest.startswith("0")
    assert rows(rest, "triton")[0].endswith("ok")
    assert status == "0\n"


def test_private_names_that_are_not_used_are_told_once(monkeypatch, capsys):
    monkeypatch.setattr(compatibility, "fallbacks", lambda: ["torch._C._gone cannot be used"])
    status, printed = run(monkeypatch, capsys, ("reference", TINY), ("triton", TINY))
    assert status == 0
    assert printed.count("torch._C._gone cannot be used") == 1


def test_a_gpu_whose_kernels_would_be_interpreted_is_wrong(monkeypatch):
    gpu = torch.device("cuda", 0)
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=True))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))
    assert set(choice.unchecked_backends(gpu, {})) == set(registry.KERNELS)
    assert "TRITON_INTERPRET is set" in choice.interpreted_on_a_gpu(gpu)
    assert choice.interpreted_on_a_gpu(CPU) is None


@pytest.mark.parametrize(
    "options", [["--device", "tpu"], ["--device", "mps"], ["--device", "cuda:99"], ["--processes", "0"], ["--fast"]]
)
def test_a_wrong_option_is_exit_status_2(options, capsys):
    with pytest.raises(SystemExit) as raised:
        check.main(options)
    assert raised.value.code == 2
    assert options[0] in capsys.readouterr().err


# Backends


def test_what_auto_takes_and_why_nothing_faster():
    """On an H100, as far as a machine without one can tell: fake tensors, and its capability."""
    for name in registry.KERNELS:
        if isinstance(registry.load(name), str):
            pytest.skip(registry.load(name))
    hopper = registry.load("hopper")
    hopper.unavailable.cache_clear()
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(launching, "multiprocessors", return_value=132),
        mock.patch.object(tma, "unsupported", return_value=None),  # a fake tensor has no address
        FakeTensorMode(),
    ):
        found = {chosen.call: chosen for chosen in choice.choices(torch.device("cuda", 0))}
    hopper.unavailable.cache_clear()
    assert [chosen.error for chosen in found.values()] == [None] * len(found)
    for call in ("bf16 D128", "bf16 D256"):
        assert (found[call].backend, found[call].reasons) == ("hopper", ())
    for call, reason in {
        "bf16 D64, with a bias": "it takes no bias",
        "float32 D64": "not torch.float32",
        "bf16 D64, T 256": "it is slower for so few tokens",
        "bf16 D64, 1 token, DecayCache": "decoded by the kernels of triton",
    }.items():
        assert found[call].backend == "triton"
        assert found[call].reasons[0].startswith("hopper: ")
        assert reason in found[call].reasons[0]


# Processes


def test_what_ends_a_process_is_told():
    """A square root that does not exist takes its process along."""
    processes.prepare()
    with processes.in_processes(math.sqrt, [(4.0,), (-1.0,)], 1) as answers:
        found = list(answers)
    assert found == [2.0, "its process ended with exit status 1"]


def test_an_interrupted_program_ends_its_processes():
    """Running processes end, and those that have not begun."""
    begin = time.monotonic()
    tasks = [(0,), (600,), (600,)]
    with contextlib.suppress(KeyboardInterrupt), processes.in_processes(time.sleep, tasks, 1) as answers:
        next(answers)
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 300


def test_what_is_preloaded_leaves_gpus_alone():
    """Processes are forked from it, and could not use a GPU that it had touched."""
    code = """
        import sys
        import torch

        def touched(*arguments):
            raise SystemExit("a GPU is touched")

        torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = touched
        import decayattn.check.preload

        from triton.runtime import driver

        assert driver._active is None
        assert "decayattn.backends.hopper" in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr


def test_after_an_error_comes_a_new_process(monkeypatch):
    class Worker:
        def __init__(self, function):
            started.append(self)
            self.ended = False

        def ask(self, task, seconds):
            self.ended = task == ("error",)
            return started.index(self), *task

        def end(self):
            self.ended = True

    started = []
    monkeypatch.setattr(processes, "_Worker", Worker)
    with processes.in_processes(None, [("a",), ("error",), ("b",), ("c",)], 1) as answers:
        found = list(answers)
    assert found == [(0, "a"), (0, "error"), (1, "b"), (1, "c")]
    assert all(worker.ended for worker in started)


# Speed


def peer(name: str, load, **options) -> speed.Peer:
    return speed.Peer(name, options.pop("layout", "BTHD"), options.pop("decay", False), load, **options)


def test_speeds_are_interleaved_and_failures_are_told(monkeypatch):
    monkeypatch.setattr(errors, "TIMED_SHAPE", (1, 2, 8))
    order = []
    monkeypatch.setattr(speed, "_milliseconds", lambda call, repeats: (order.append(call()), 2.0)[1])

    def absent():
        raise speed.NotInstalled("fla")

    def refusing(q, k, v):
        raise RuntimeError("No available kernel. Aborting execution.")

    def measured(q, k, v, log_decay):
        assert q.shape == (1, 2, 8, 16)
        assert log_decay.shape == (1, 2, 8)
        return q * log_decay[..., None] + k + v, None

    peers = [
        peer("good", lambda: measured, layout="BHTD", decay=True),
        peer("absent", absent),
        peer("refusing", lambda: refusing),
        peer("ours", lambda: refusing, ours=True),
    ]
    monkeypatch.setattr(registry, "select", lambda problem, name: "triton")
    good, missing, refused, ours = speed.speeds(16, CPU, set(), peers)
    assert [len(good.rounds[direction]) for direction in speed.DIRECTIONS] == [speed.ROUNDS] * 2
    assert good.median("forward") == 2.0
    assert isinstance(order[0], torch.Tensor)  # the forward
    assert [gradient.shape for gradient in order[1]] == [(1, 2, 8, 16)] * 3 + [(1, 2, 8)]
    assert (missing.reason, missing.absent) == ("not installed", True)
    assert (refused.reason, refused.absent) == ("RuntimeError: No available kernel. Aborting execution.", True)
    assert ours.absent is False


def test_only_kernels_of_pytorch_are_loaded_ahead(monkeypatch):
    """Others may tune themselves, beside processes that use the GPU too."""
    monkeypatch.setattr(errors, "TIMED_SHAPE", (1, 2, 8))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    called = []

    def attend(name):
        def attend(q, k, v):
            called.append((name, q.shape[-1]))
            if name == "refusing":
                raise RuntimeError("No available kernel. Aborting execution.")
            return q + k + v

        return peer(name, lambda: attend, sdpa=name != "other")

    speed.load(CPU, [attend("refusing"), attend("good"), attend("other")])
    # good: the forward, and once more for the gradient
    assert called == [(name, dim) for dim in (64, 128) for name in ("refusing", "good", "good")]


def test_a_wrong_backend_is_not_timed(monkeypatch):
    monkeypatch.setattr(errors, "TIMED_SHAPE", (1, 2, 8))
    monkeypatch.setattr(speed, "_milliseconds", lambda call, repeats: 2.0)

    def measured(*wrong):
        [found] = speed.speeds(16, CPU, set(wrong), [peer("ours", lambda: lambda q, k, v: q + k + v, ours=True)])
        assert found.absent == (found.reason is not None) == (not found.rounds["forward"])
        return found.reason

    assert measured() == "not timed: no kernel takes this call"
    monkeypatch.setattr(registry, "select", lambda problem, name: "auto")
    monkeypatch.setattr(registry, "resolve", lambda *arguments: "triton")
    assert measured() is None
    assert "triton, which takes this call, is wrong" in measured("triton")


def test_the_table_of_speeds(monkeypatch, capsys):
    def measured(name, forward, both, reason=None, absent=False, **options):
        rounds = {"forward": [forward], "forward + backward": [both]} if reason is None else {}
        return speed.Speed(peer(name, None, **options), rounds, reason, absent)

    found = [
        measured("ours", 1.0, 4.0, ours=True),
        measured("SDPA, slow", 2.0, 6.0, sdpa=True),
        measured("SDPA, fast", 1.5, 5.0, sdpa=True),
        measured("fla, decay per token", 0, 0, "not installed", True),
        measured("other", 0, 0, "RuntimeError: too old", True),
        measured("ours, broken", 0, 0, "RuntimeError: no", ours=True),
    ]
    monkeypatch.setattr(speed, "speeds", lambda *arguments: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    wrong = speed.report(CPU, set())
    printed = capsys.readouterr().out
    assert wrong == [f"ours, broken, bf16 B4 H16 T4096 D{dim}: RuntimeError: no" for dim in (64, 128)]
    assert "1.000 [1.000, 1.000] 1.50x" in printed
    assert "4.000 [4.000, 4.000] 1.25x" in printed
    assert "2.000 [2.000, 2.000] 0.75x" in printed
    assert "not installed: fla\n" in printed
    assert "RuntimeError: too old" in printed


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU")
@pytest.mark.xdist_group("gpu")
def test_a_gpu(monkeypatch, capsys):
    """Every section, with a part of the cases and short sequences; as many processes as cases."""
    device = torch.device("cuda", 0)
    unchecked = choice.unchecked_backends(device, {})
    monkeypatch.setattr(errors, "TIMED_SHAPE", (1, 2, 1000))
    some = errors.cases(device, {*unchecked, "halo"})[::4]
    monkeypatch.setattr(errors, "cases", lambda device, unchecked: some)
    status = check.main(["--processes", str(len(some))])
    printed = capsys.readouterr().out
    assert status == 0, printed
    judged = [line for name in registry.NAMES for length in (301, 700, 1000) for line in rows(printed, name, length)]
    assert len(judged) == len(some)
    assert all(line.endswith("ok") for line in judged), printed
    assert "SDPA, PyTorch's choice" in printed
