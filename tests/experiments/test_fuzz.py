"""The fuzzer passes on a short run, reports faults, and repeats each call by its command; the stress test."""

import dataclasses
import itertools
import math
import os
import time
from argparse import Namespace
from unittest import mock

import pytest
import torch
from shared import workers
from tools import fuzz_kernels, stress_kernels
from tools.fuzzing import judge, oracle
from tools.fuzzing.draws import CALLS_PER_FAMILY, RESETS, Draw, Family, Memory, draw
from tools.fuzzing.summary import Summary
from tools.fuzzing.tensors import build, place

from decayattn import decay_attention

ON_GPU = torch.cuda.is_available()
LONGEST = 48  # two of the interpreter's tiles; packed sequences are longer together
INF = math.inf
# quick calls of seed 1, each of another family: every kind of decay, layout, bias, scale, window, tolerance; and more
NUMBERS = (0, 104, 208, 494, 650, 26, 130, 260, 286, 416, 676, 1144)
MORE_NUMBERS = (52, 182, 234, 312, 546, 572, 598, 754, 884, 910, 988, 1092, 1196)


@pytest.mark.parametrize("number", [
    *NUMBERS[: 5 if ON_GPU else None],  # on a GPU, compiling all would take minutes
    *(pytest.param(number, marks=pytest.mark.slow) for number in MORE_NUMBERS),
])
def test_kernels_within_the_budget(number):
    result, may_go_on = fuzz_kernels.fuzz(number, 1, LONGEST, CALLS_PER_FAMILY, None, ["triton", "reference"])
    assert may_go_on
    assert not result["failures"], (fuzz_kernels.draw_here(number, 1, LONGEST), result["failures"])
    assert set(result["ratios"]) == {"triton", "reference"}


def test_seed_and_number_determine_a_call(device):
    for number in (0, 17, 999):
        first, again = draw(5, number), draw(5, number)
        assert first == again
        assert first != draw(6, number)
    one, other = build(draw(5, 17, LONGEST), device), build(draw(5, 17, LONGEST), device)
    for name, x in one.tensors.items():
        if isinstance(x, torch.Tensor):
            assert torch.equal(x.nan_to_num(7.0), other.tensors[name].nan_to_num(7.0))
            assert x.stride() == other.tensors[name].stride()


def test_missing_bfloat16_changes_only_the_dtype():
    number = next(n for n in itertools.count() if draw(0, n).family.dtype == "bfloat16")
    with_it, without = draw(0, number), draw(0, number, bfloat16=False)
    assert without.family.dtype == "float16"
    family = dataclasses.replace(without.family, dtype="bfloat16")
    assert with_it == dataclasses.replace(without, family=family, value_size=with_it.value_size)


def test_calls_of_a_family_share_compiled_kernels():
    calls = [draw(3, n) for n in range(2 * CALLS_PER_FAMILY)]
    ours, others = calls[:CALLS_PER_FAMILY], calls[CALLS_PER_FAMILY:]
    assert all(call.family == calls[0].family for call in ours)
    assert all(call.family != calls[0].family for call in others)
    assert len({(call.rows, call.keys) for call in ours}) > CALLS_PER_FAMILY / 2
    assert draw(3, 17, calls_per_family=10).family == draw(3, 10, calls_per_family=10).family != ours[0].family


def test_draws_cover_the_contract():
    drawn = [draw(0, n * CALLS_PER_FAMILY).family for n in range(1500)]
    for name in ("head_dim", "value_dim"):
        dims = {getattr(family, name) for family in drawn}
        assert {1, 2, 8, 17, 64, 128, 256} < dims <= set(range(1, 257))
        assert len(dims) > 150
    for field in dataclasses.fields(Family):
        if field.name not in ("head_dim", "value_dim", "memory", "needs_grad"):
            found = {getattr(family, field.name) for family in drawn}
            expected = {
                "dtype": {"float16", "bfloat16", "float32", "float64"},
                "layout": {"dense", "padded", "packed"},
                "decay": {"none", "number", "scalar tensor", "constant", "token"},
                "scale": {"default", "number", "tensor"},
                "bias": {"none", "float", "bool"},
                "window": set(itertools.product((True, False), repeat=2)),
            }.get(field.name)
            assert found == expected if expected else len(found) > 1, field.name
    memories = [memory for family in drawn for memory in family.memory.values()]
    assert {2} < {len(memory.order) for memory in memories}
    assert {axis for memory in memories for axis in memory.expanded} == set("bthdij")
    assert {memory.step for memory in memories} == {1, 2}
    calls = [draw(0, n) for n in range(0, 25_000, 13)]
    assert {call.rows == call.keys for call in calls} == {True, False}
    assert any(call.rows > call.keys > 0 for call in calls)
    assert {0, 1} < {call.rows for call in calls}
    assert {0, 1} < {call.keys for call in calls}
    sides = {side for call in calls if call.window for side in call.window}
    assert {-1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1} < sides
    assert set(RESETS) == {value for call in calls for value in call.reset_values}
    assert {call.tolerance for call in calls} == {"auto", None, 1e-3}
    assert {0.0, 1e-8} < {call.scale for call in calls}
    assert any(call.scale < 0 for call in calls)
    assert {0} < {len(call.sequences) for call in calls if call.family.layout == "packed"}
    assert any(0 in pair for call in calls for pair in call.sequences)


@pytest.mark.parametrize("memory", [
    Memory("bthd"), Memory("htbd", gap=5, offset=3), Memory("bhtd", step=2), Memory("bthd", expanded="bh", offset=1),
    Memory("tbhd", expanded="bthd"),
])
def test_memory_places_values(memory, device):
    values = torch.randn(2, 3, 4, 5)
    placed = place(values, "bthd", memory, device)
    expected = values[tuple(slice(0, 1) if axis in memory.expanded else slice(None) for axis in "bthd")]
    assert torch.equal(placed.cpu(), expected.expand(values.shape))
    assert placed.storage_offset() == memory.offset
    assert {axis for axis, stride in zip("bthd", placed.stride(), strict=True) if not stride} == set(memory.expanded)
    everything = placed.new_empty(0).set_(placed.untyped_storage())
    assert int(everything.isfinite().sum()) == expected.numel()  # the rest is NaN


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("decay", ["constant", "token"])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1), (2**63 - 1, 2**63 - 1)])
def test_oracle_equals_the_reference(causal, decay, window):
    """The reference is equal to loops over keys (test_reference.py), and shares no code with the oracle."""
    rows, keys = (9, 6) if decay == "constant" else (4, 9)
    normal = torch.randn(3, rows + 2 * keys, 4, dtype=torch.float64)
    log_decay = -torch.rand(3, keys, dtype=torch.float64)
    log_decay[0, 3], log_decay[1, 5], log_decay[2, 0] = -1e9, -INF, math.nan
    if decay == "constant":
        log_decay = torch.tensor([0.1, -1e30, -2.0], dtype=torch.float64)
    heads = {
        "q": normal[:, :rows], "k": normal[:, rows : rows + keys], "v": normal[:, rows + keys :],
        "log_decay": log_decay, "scale": torch.tensor([0.5, 1.0, -1.0]).double(), "causal": causal, "window": window,
    }
    grads = {"grad_out": torch.randn(3, rows, 4).double(), "grad_lse": torch.randn(3, rows).double()}
    found = oracle.attention(**heads, bias=None, sink=None, **grads)
    q, k, v = (heads[name].transpose(0, 1)[None] for name in "qkv")
    options = dict(scale=heads["scale"], causal=causal, window_size=window, return_lse=True, backend="reference")
    out, lse = decay_attention(q, k, v, log_decay if decay == "constant" else log_decay.T[None], **options)
    torch.testing.assert_close(found["out"], out[0].transpose(0, 1))
    torch.testing.assert_close(found["lse"], lse[0])
    assert all(x.isfinite().all() for name, x in found.items() if name != "lse")
    assert (found["dlog_decay"][log_decay < oracle.RESET_BELOW] == 0).all()


def test_bound_of_skipping_covers_lost_keys():
    """The last keys of every row are lost, as many as weigh no more than the tolerance."""
    tolerance, (rows, keys) = 0.01, (30, 40)
    normal = torch.randn(2, rows + 2 * keys, 4).double()
    heads = {
        "q": normal[:, :rows], "k": normal[:, rows : rows + keys], "v": normal[:, rows + keys :],
        "log_decay": -torch.rand(2, keys).double(), "scale": torch.full((2, rows), 0.5).double(), "causal": True,
        "window": (-1, -1), "sink": torch.randn(2).double(), "grad_out": torch.randn(2, rows, 4).double(),
        "grad_lse": torch.randn(2, rows).double(),
    }
    exact = oracle.attention(**heads, bias=None)
    # of values that are unit vectors, the output is P
    unit = {"v": torch.eye(keys).double().expand(2, -1, -1), "grad_out": torch.zeros(2, rows, keys).double()}
    p = oracle.attention(**heads | unit, bias=None)["out"]
    kept = p.cumsum(-1) > tolerance
    assert 0 < float(p.masked_fill(kept, 0.0).sum(-1).max()) <= tolerance
    moved = oracle.attention(**heads, bias=kept)
    allowed = oracle.lost(**heads, bias=None, tolerance=tolerance)
    assert set(moved) <= set(allowed)
    for name, x in moved.items():
        difference = (x - exact[name]).abs()
        assert float(difference.max()) > 0, name
        assert (difference <= allowed[name]).all(), name


def plain_call(**changes) -> Draw:
    """A call of bfloat16's size and with everything that has a gradient."""
    call = next(
        call for call in (draw(0, n, LONGEST, bfloat16=ON_GPU) for n in itertools.count())
        if call.family.decay == "token" and call.family.layout == "dense" and call.family.return_lse
        and call.family.needs_grad is None and call.family.sink and call.batch and min(call.rows, call.keys) > 20
        and not call.resets and call.family.window == (False, False) and call.query_size == call.value_size == 1
    )
    return dataclasses.replace(call, **changes)


FAULTS = {
    "out": lambda x: x.roll(1, 1),
    "lse": lambda x: x + 0.1,
    "dq": lambda x: x * 1.05,
    "dk": lambda x: x.index_fill(1, torch.tensor([3], device=x.device), math.nan),
    "dv": lambda x: torch.zeros_like(x),
    "dlog_decay": lambda x: x.roll(1, 1),
    "dsink": lambda x: -x,
}


@pytest.fixture(scope="module")
def reference_results(device):
    """A call, and its results by "reference", which pass."""
    case = build(plain_call(), device)
    results = judge.run(case, "reference")
    verdict = judge.Verdict()
    judge.compare(case, {"reference": dict(results)}, verdict)
    assert not verdict.failures
    return case, results


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_results_fail(name, reference_results):
    case, results = reference_results
    verdict = judge.Verdict()
    judge.compare(case, {"reference": results | {name: FAULTS[name](results[name])}}, verdict)
    assert [what for what, _ in verdict.failures] == [f"reference {name}"]


def test_wrong_kernels_fail(device, monkeypatch):
    from decayattn.backends.planning import prefix

    gradient = prefix.gradient
    monkeypatch.setattr(prefix, "gradient", lambda *given: gradient(*given).roll(1, 1))
    failures = judge.judge(build(plain_call(), device), ["triton"]).failures
    assert [what for what, _ in failures] == ["triton dlog_decay"]


def test_exceptions_fail_and_hopper_may_refuse(device, monkeypatch):
    call = plain_call()
    narrow = dataclasses.replace(call, family=dataclasses.replace(call.family, head_dim=7))
    verdict = judge.judge(build(narrow, device), ["hopper"])
    assert "hopper" in verdict.refused
    assert not verdict.failures

    error = AssertionError("base must be 16-byte aligned")
    monkeypatch.setattr(judge, "decay_attention", mock.Mock(side_effect=error))
    ((what, text),) = judge.judge(build(call, device), ["reference"]).failures
    assert what == "reference AssertionError"
    assert text.endswith("base must be 16-byte aligned")


@pytest.mark.parametrize(("more", "drawn"), [
    (["--family", "25", "--only", "8"], ""), (["--family", "100", "--only", "61"], ""),
    (["--family", "25", "--dims", "24", "10", "--only", "8"], "head_dim=24, value_dim=10"),
])
def test_failures_have_the_command_that_repeats_them(more, drawn, capsys, monkeypatch):
    arguments = ["--seed", "3", "--longest", "20", *more, "--backends", "reference"]
    assert fuzz_kernels.main(arguments) == 0
    assert drawn in capsys.readouterr().out
    run = judge.run
    monkeypatch.setattr(judge, "run", lambda *given: (found := run(*given)) | {"out": found["out"] + 1})
    assert fuzz_kernels.main(arguments) == 1
    printed = capsys.readouterr().out
    assert f"FAILED python experiments/tools/fuzz_kernels.py {' '.join(arguments)}: reference out " in printed
    assert "1 × reference out" in printed


def test_summary_names_errors_near_their_budget():
    summary = Summary("fuzz.py", Namespace(only=None), ["only"])
    for number, found in enumerate([{"out": 0.79, "dq": 0.85}, {"out": 0.5, "dq": 0.97}, {"out": 1.5, "dq": 0.9}]):
        summary.add(number, {"call": "", "failures": [], "ratios": {"reference": found}, "cannot_tell": []})
    lines = list(summary.lines(3, 1.0))
    assert "  reference dq 0.97: python fuzz.py --only 1" in lines
    assert "  reference (3)  dq 0.97  out 0.79" in lines


@pytest.mark.slow
def test_calls_run_in_processes(interpreter, capsys):
    arguments = ["--calls", "3", "--longest", "16", "--processes", "1", "--backends", "reference", "--seed", "4"]
    assert fuzz_kernels.main(arguments) == 0
    assert "3 calls in" in capsys.readouterr().out


def test_processes_that_end_die_or_hang_are_replaced(monkeypatch):
    """divmod's remainder is the flag that lets a process go on."""
    found = dict(workers.calls(divmod, (7,), [[1, 14, 8, 9], [20]], 2, 60.0))
    assert found == {1: 0, 14: 2, 8: 1, 9: 1, 20: 2}
    errors = dict(workers.calls(divmod, (0,), [[1, 2]], 1, 60.0))
    assert ["ZeroDivisionError" in str(errors[number]) for number in (1, 2)] == [True, True]
    died = dict(workers.calls(os._exit, (), [[3, 4]], 1, 60.0))
    assert [str(died[number]) for number in (3, 4)] == [f"the process died (status {n})" for n in (3, 4)]
    monkeypatch.setattr(workers, "STARTING_SECONDS", 0.0)
    ((number, error),) = workers.calls(time.sleep, (), [[1000]], 1, 1.0)
    assert number == 1000
    assert isinstance(error, TimeoutError)


# The stress test


def test_kernels_repeat(capsys):
    assert stress_kernels.main(["--minutes", "0", "--backends", "triton"]) == 0
    printed = capsys.readouterr().out
    assert "every call repeated" in printed
    assert printed.count("1 calls, 0 deviated") == len(stress_kernels.SHAPES) * 4


def test_changed_bits_and_nan_deviate(capsys, monkeypatch):
    """One entry of dk by its last bit, and a NaN, in the second call of each case."""
    call, count = stress_kernels.call, [0]

    def changing(*given):
        found = [x.contiguous() for x in call(*given)]
        count[0] += 1
        if count[0] % 3 == 0:  # the first, the one of "triton", and the one that repeats
            dk = found[stress_kernels.NAMES.index("dk")]
            dk.view(torch.uint8).view(-1)[7 * dk.element_size()] ^= 1
            found[stress_kernels.NAMES.index("out")].view(-1)[5] = float("nan")
        return found

    monkeypatch.setattr(stress_kernels, "call", changing)
    assert stress_kernels.main(["--minutes", "0", "--backends", "triton", "--far", "0"]) == 1
    printed = capsys.readouterr().out
    assert "call 1: dk: 1 of" in printed
    assert "call 1: out: 1 of" in printed
    assert "nan instead of" in printed
