"""Random calls of the Hopper kernels on a CPU; a fault in them is reported."""

import fuzz_emulated
import pytest
import torch

from decayattn.backends.hopper import backend as hopper

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves run there: fuzz_kernels.py"),
]


@pytest.mark.parametrize("seed", range(2))
def test_random_calls(seed, capsys):
    assert fuzz_emulated.main(["--seed", str(seed), "--calls", "25", "--longest", "150"]) == 0, capsys.readouterr().out


def test_fault_is_reported_with_a_command(monkeypatch, capsys):
    forward = hopper.forward

    def wrong(*arguments):
        out, lse, saved = forward(*arguments)
        return out * 1.05, lse, saved

    monkeypatch.setattr(hopper, "forward", wrong)
    argv = ["--seed", "3", "--longest", "40", "--family", "20"]
    assert fuzz_emulated.main([*argv, "--calls", "4"]) == 1
    printed = capsys.readouterr().out
    again = printed.split("FAILED python tests/helpers/fuzz_emulated.py ")[1].split(":")[0].split()
    assert again[:-1] == [*argv, "--only"]
    assert "hopper out" in printed
    monkeypatch.undo()
    assert fuzz_emulated.main(again) == 0
