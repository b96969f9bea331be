"""The stress test passes on kernels that repeat, and reports those that do not."""

import torch
from tools import stress_kernels


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
