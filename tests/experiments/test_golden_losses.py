"""The losses of the toy language model's first 20 steps are those that they have always been.

In float64, where another order of additions changes the twelfth digit. A change that means to change them says so, and
writes the new ones: PYTHONPATH=experiments python tests/experiments/test_golden_losses.py
"""

import json
import random
import tempfile
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden_losses.json"
DECAYS = ("scalar", "alibi-learned", "none")
STEPS = 20


def train(folder: Path, decay: str) -> list[float]:
    """Bits per byte of every step."""
    import train_toy_lm
    from toy_lm.figures import read_log

    folder.mkdir()
    words = random.Random(0).choices(["def ", "f(x):\n", "    return ", "x + 1\n", "y = ", "f(3)\n"], k=3000)
    (folder / "text").write_text("".join(words))
    arguments = [
        "--data", str(folder / "text"), "--decay", decay, "--layers", "2", "--width", "32", "--heads", "4",
        "--context", "48", "--batch_size", "4", "--steps", str(STEPS), "--seed", "0", "--precision", "64-true",
        "--backend", "reference", "--learning_rate", "3e-3", "--gradient_check", "0", "--validate_every", str(STEPS),
        "--run", str(folder / "run"),
    ]
    assert train_toy_lm.main(arguments) == 0
    steps, bits = read_log(folder / "run", "train_bits")
    assert len(steps) == STEPS
    return list(bits)


@pytest.mark.parametrize("decay", ["scalar", *(pytest.param(name, marks=pytest.mark.slow) for name in DECAYS[1:])])
def test_the_first_losses_are_as_ever(decay, tmp_path):
    assert train(tmp_path / decay, decay) == pytest.approx(json.loads(GOLDEN.read_text())[decay], rel=1e-6)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {decay: train(Path(folder) / decay, decay) for decay in DECAYS}
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
