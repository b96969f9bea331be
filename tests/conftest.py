"""Device of the kernels (a GPU, else Triton's interpreter) and contents of uninitialised memory."""

import gc
import os
from collections.abc import Iterator

import distributed_pool
import pytest
import torch
from shared.poison import poisoned_allocations
from shared.provenance import provenance

ON_GPU = torch.cuda.is_available()
# Before anything imports triton, and with a GPU, too: scripts set it for machines without one where it is absent, and
# would set it for the tests of the same process that need the compiler
os.environ.setdefault("TRITON_INTERPRET", "0" if ON_GPU else "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers
with torch.device("cpu"):
    torch.empty(0)  # torch.device lists the constructors that it redirects once: now, before they are wrapped below
torch.set_num_threads(1)  # the threads of the suite's processes would wait for each other


if os.environ["TRITON_INTERPRET"] == "1":
    import interpreted_memory  # they import triton
    import quick_interpreter

    interpreted_memory.watch()
    quick_interpreter.hurry()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No search for garbage among the million objects that imports make, now and later: it takes seconds."""
    gc.disable()
    found = yield
    gc.freeze()
    gc.enable()
    return found


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries warn of leaks at exit


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups of tests that share a process. pytest 9.2 does not read those of pytest-xdist 3.8 (pytest-xdist#1386), and
    every process of a run would start all pools of ranks."""
    for item in items:
        written = getattr(item, "_nodeid", item.nodeid)
        if written != item.nodeid:
            item._id = type(item.id).parse(written)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    # all processes of a run share one GPU: each keeps the memory that most tests need, and gives back more
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**28:  # and no test hides the GPU
        torch.cuda.empty_cache()


def pytest_report_header() -> str:
    known = provenance("-m pytest", [])
    return "decayattn: " + " · ".join(f"{key} {known[key]}" for key in ("gpu", "torch", "triton", "python", "commit"))


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    left_out = config.option.markexpr == "not slow"
    return ["longer cases are deselected: -m slow runs those, -m 'slow or not slow' all"] if left_out else []


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(scope="session")
def cpu_ranks():
    """Two processes with a group on CPUs, started once."""
    with distributed_pool.two_ranks("cpu") as pool:
        yield pool


@pytest.fixture(scope="session")
def cuda_ranks():
    with distributed_pool.two_ranks("cuda") as pool:
        yield pool


@pytest.fixture(params=[
    pytest.param("cpu", marks=pytest.mark.xdist_group("distributed")),
    pytest.param("cuda", marks=pytest.mark.xdist_group("ranks")),
])
def ranks(request: pytest.FixtureRequest):
    """Two processes with a group, on CPUs and on GPUs."""
    return request.getfixturevalue(f"{request.param}_ranks")


@pytest.fixture
def interpreter() -> None:
    """For a test that starts a process on the CPU, where the kernels need Triton's interpreter."""
    from decayattn.backends.runtime import interpreter

    if (reason := interpreter.fails()) is not None:
        pytest.skip(reason)


@pytest.fixture
def torch_settings():
    """Put back what the test sets: deterministic algorithms, the precision of float32 products, the default dtype."""
    deterministic, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def poison_uninitialised_memory():
    with poisoned_allocations():
        yield


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
