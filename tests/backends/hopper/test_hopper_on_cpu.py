"""The Hopper kernels without a GPU (gluon_on_cpu) in any order of their warps. A missing wait has to show."""

import functools

import pytest
import torch
from gluon_on_cpu import Deadlock, Race, language, machine
from hopper_problems import DEVICE, emulated, make

from decayattn import decay_attention

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the kernels themselves run here")


def results(causal: bool, seed: int, programs: int, **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    leaves = {name: x.requires_grad_() for name, x in make(260, **options).items()}
    with emulated(seed, programs):
        out, lse = decay_attention(**leaves, causal=causal, return_lse=True, backend="hopper")
        grads = torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))
    return dict(zip(("out", "lse", *leaves), (out, lse, *grads), strict=True))


@pytest.mark.parametrize(("dim", "causal", "programs"), [
    (64, True, 1), (128, False, 8), (192, True, 1), (256, True, 1), pytest.param(256, False, 8, marks=pytest.mark.slow),
])
def test_results_do_not_depend_on_the_order(dim, causal, programs):
    """Only sums by atomics may move."""
    expected = results(causal, 0, 3, dim=dim)
    for name, x in results(causal, 1, programs, dim=dim).items():
        if name in ("q", "log_decay"):
            torch.testing.assert_close(x, expected[name], rtol=0.02, atol=1e-3)
        else:
            assert torch.equal(x, expected[name]), name


# calls that keep warps apart
MISTAKES = {
    "no fence": (machine.Warps, "fence"),
    "no wait for stores": (machine.Warps, "wait_for_stores"),
    "no wait for products": (machine.Warps, "wait_for_products"),
    "no wait of warps for each other": (machine.Warps, "wait_for_each_other"),
    "no wait for barriers": (language.mbarrier, "wait"),
    "no arrivals": (machine.Barrier, "arrive"),
}


@functools.cache
def right_output() -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in make(450, heads=3).values()]
    with emulated():
        out = decay_attention(*leaves, backend="hopper")
    assert out.isfinite().all()
    return out, leaves


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake, direction, monkeypatch):
    """Mistakes end in a race or in a deadlock, or a product is read too early, which is NaN."""
    out, leaves = right_output()
    monkeypatch.setattr(*MISTAKES[mistake], lambda *args, **kwargs: None)
    try:
        with emulated():
            if direction == "forward":
                wrong = [decay_attention(*leaves, backend="hopper")]
            else:
                wrong = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    except (Race, Deadlock, IndexError):
        return
    assert any(x.isnan().any() for x in wrong)
