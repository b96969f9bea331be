"""Random calls on several ranks pass on a short run, report faults, and repeat by their command."""

import fuzzed_slices
import pytest
from tools import fuzz_context
from tools.fuzzing.slices import draw_slices

SHORT = ["--longest", "40", "--backend", "reference", "--family", "1", "--device", "cpu"]


@pytest.mark.xdist_group("distributed")
def test_ranks_within_the_budget(cpu_ranks):
    found = cpu_ranks("fuzzed_slices.fuzzed", [*SHORT, "--calls", "6"])
    assert [status for status, _ in found] == [0, 0], found[0][1]
    assert "6 calls in" in found[0][1]


@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_kernels_within_the_budget(cpu_ranks, interpreter):
    argv = ["--longest", "100", "--calls", "8", "--backend", "triton", "--family", "2", "--device", "cpu"]
    for given in (argv, [*SHORT, "--seed", "1", "--calls", "60"]):
        found = cpu_ranks("fuzzed_slices.fuzzed", given, seconds=300)
        assert [status for status, _ in found] == [0, 0], found[0][1]


@pytest.mark.xdist_group("distributed")
@pytest.mark.parametrize(("wrong", "said"), [
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("without_a_key", "reference out"), ("one_gradient", "reference dq"))),
    ("raises", "raised rank 1 RuntimeError fuzzed_slices.py"),
])
def test_faults_fail_with_the_command_that_repeats_them(cpu_ranks, wrong, said):
    found = cpu_ranks("fuzzed_slices.fuzzed", [*SHORT, "--calls", "15"], getattr(fuzzed_slices, wrong))
    assert [status for status, _ in found] == [1, 1]
    line = next(line for line in found[0][1].splitlines() if line.startswith("FAILED"))
    assert said in line
    again = line.removeprefix("FAILED python experiments/tools/fuzz_context.py ").split(":")[0].split()
    assert again[:2] == ["--ranks", "2"]
    again, printed = cpu_ranks("fuzzed_slices.fuzzed", again[2:], getattr(fuzzed_slices, wrong))[0]
    assert again == 1
    assert line in printed


def test_drawn_slices_fit_the_function():
    found = [draw_slices(3, number, ranks, 100, True, 1) for number in range(300) for ranks in (2, 3)]
    assert found == [draw_slices(3, number, ranks, 100, True, 1) for number in range(300) for ranks in (2, 3)]
    for call, division in found:
        ranks = len(division.lengths)
        assert ranks in (2, 3)
        assert sum(division.lengths) == call.rows == call.keys
        if division.mode == "heads":
            assert call.family.heads % ranks == 0
            assert division.reach is None
        else:
            assert call.family.causal
            assert (call.family.bias, call.padding) == ("none", {})
        if division.reach is not None:
            assert division.reach >= call.window[0] >= 0
    divisions = [division for _, division in found]
    assert {division.mode for division in divisions} == {"halo", "heads"}
    assert any(0 in division.lengths for division in divisions)
    assert any(division.reach is not None for division in divisions)


@pytest.mark.slow
def test_the_command_starts_its_ranks(capfd):
    assert fuzz_context.main([*SHORT, "--ranks", "2", "--only", "3"]) == 0
    printed = capfd.readouterr().out
    assert "Division(mode=" in printed
    assert "1 calls in" in printed


def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SystemExit):
        fuzz_context.parse(["--ranks", "3", "--device", "cuda"])
    assert "--ranks: expected at most 2" in capsys.readouterr().err
