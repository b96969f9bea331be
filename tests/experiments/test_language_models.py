"""Position schemes of the experiments differ in nothing else."""

import pytest
import torch
from language_models.schemes import SCHEMES, attention_layer
from toy_lm.model import ByteLM, next_byte_loss, parameter_groups


def model(scheme: str) -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(2, 32, 2, make_attention=lambda: attention_layer(scheme, 32, 2, "reference"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_start_alike_and_train_without_the_future(scheme):
    of = model(scheme)
    x = torch.randint(256, (2, 49), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    own = {name: p for name, p in of.named_parameters() if ".decay." in name}
    found = {name: p for name, p in of.named_parameters() if name not in own}
    if not SCHEMES[scheme].options:  # these have more weights
        expected = dict(model("none").named_parameters())
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    next_byte_loss(of, x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in of.parameters())
    assert all(p.grad.any() for p in own.values())
    decayed, _ = parameter_groups(of, 0.1)
    assert not set(own.values()) & set(decayed["params"])
    y = x[:, :-1].clone()
    y[:, 30:] = 255 - y[:, 30:]
    with torch.no_grad():
        torch.testing.assert_close(of(x[:, :-1])[:, :30], of(y)[:, :30])
