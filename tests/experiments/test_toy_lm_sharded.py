"""The toy language model over several devices: what one process of the whole training script does not show."""

import copy

import pytest
import torch
from distributed_pool import Pool, two_ranks
from language_models.model import ByteLM, next_byte_loss
from language_models.optimisation import parameter_groups
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from toy_lm import sharded
from toy_lm.config import Config


@pytest.fixture(scope="module", params=[
    pytest.param("cpu", marks=pytest.mark.xdist_group("distributed")),
    pytest.param("cuda", marks=pytest.mark.xdist_group("gpu")),
])
def ranks(request):
    pool = two_ranks(request.param)
    yield pool
    pool.close()


def gradients_before_and_after(device: str) -> list[tuple[bool, torch.Tensor, torch.Tensor]]:
    """Of every parameter, whether each rank has all of it, and the rank's gradient, rounded in its own way."""
    torch.manual_seed(0)
    model = ByteLM(layers=1, width=32, heads=2, decay="scalar", backend="reference").to(device)
    mesh = init_device_mesh(device, (1, 2), mesh_dim_names=(sharded.DATA, sharded.SECOND))
    sharded.parallelize(model, Config(strategy="tensor"), mesh)
    next_byte_loss(model, torch.randint(256, (2, 25)).to(device)).backward()
    rank = torch.distributed.get_rank()
    found = []
    for parameter in model.parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter, DTensor) else parameter.grad
        gradient += rank * 2.0**-20
        found.append((gradient is parameter.grad, gradient.clone(), gradient))
    sharded.average_copies(model, mesh[sharded.SECOND])
    return [(is_copy, before.cpu(), after.cpu()) for is_copy, before, after in found]


def test_copies_of_a_parameter_get_the_same_gradient_on_every_rank(ranks):
    of_ranks = list(zip(*ranks(gradients_before_and_after, ranks.device), strict=True))
    # embedding, three norms and the head
    assert sum(is_copy for (is_copy, _, _), _ in of_ranks) == 5 < len(of_ranks)
    for (is_copy, before, after), (_, others_before, others_after) in of_ranks:
        if is_copy:
            assert not before.equal(others_before)
            assert after.equal(others_after)
            assert after.equal((before + others_before) / 2)
        else:
            assert after.equal(before)
            assert others_after.equal(others_before)


def three_steps(
    device: str, strategy: str, shape: tuple[int, int]
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """(norm of the gradients, that of one process) of every step; and how far each parameter is from one process's.

    shape: over how many ranks the batch is divided, and over how many the heads.
    """
    torch.manual_seed(0)
    single = ByteLM(layers=1, width=32, heads=2, decay="scalar", backend="reference").to(device, torch.float64)
    model = copy.deepcopy(single)
    mesh = init_device_mesh(device, shape, mesh_dim_names=(sharded.DATA, sharded.SECOND))
    sharded.parallelize(model, Config(strategy=strategy), mesh)
    kinds = (torch.optim.AdamW, single), (sharded.AdamW, model)
    optimizers = [adam(parameter_groups(of, 0.1), lr=1e-2, betas=(0.9, 0.95)) for adam, of in kinds]
    norms = []
    for _ in range(3):
        tokens = torch.randint(256, (2, 25)).to(device)
        own = tokens.chunk(shape[0])[mesh.get_local_rank(sharded.DATA)]
        for of, optimizer, batch in zip((single, model), optimizers, (tokens, own), strict=True):
            optimizer.zero_grad()
            next_byte_loss(of, batch).backward()
        if strategy == "tensor":
            sharded.average_copies(model, mesh[sharded.SECOND])
        clipped = torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1)
        norms.append((float(sharded.clip_gradients(model.parameters(), 0.1)), float(clipped)))
        for optimizer in optimizers:
            optimizer.step()
    whole, expected = sharded.whole_state(model), single.state_dict()
    return norms, {name: float((x - expected[name].cpu()).abs().max()) for name, x in whole.items()}


def assert_like_one_process(of_ranks: list[tuple[list[tuple[float, float]], dict[str, float]]]) -> None:
    (norms, errors), *others = of_ranks
    # else the ranks would clip by different factors; one process's gradient of an embedding has no fixed order on a GPU
    for norms_of_another, _ in others:
        assert [norm for norm, _ in norms] == [norm for norm, _ in norms_of_another]
    for norm, expected in norms:
        assert norm == pytest.approx(expected, rel=1e-12)
        assert norm > 0.1  # so that it is clipped
    assert len(errors) > 5
    # Adam divides by what is next to nothing where a byte does not occur
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize(("strategy", "shape"), [("fsdp", (2, 1)), ("tensor", (1, 2))])
def test_clipping_and_optimiser_are_those_of_one_process(ranks, strategy, shape):
    assert_like_one_process(ranks(three_steps, ranks.device, strategy, shape))


@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_batch_and_heads_divided_at_once():
    with Pool(4) as ranks:
        assert_like_one_process(ranks(three_steps, "cpu", "tensor", (2, 2)))
