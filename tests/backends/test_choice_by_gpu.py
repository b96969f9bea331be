"""Backends and tiles of each GPU that are known without one."""

from types import SimpleNamespace

import pytest
import torch

from decayattn.backends.hopper import backend as hopper
from decayattn.backends.portable import config, decode

GPU = torch.device("cuda", 0)
# capability, ROCm, kilobytes of shared memory that a block can have
GPUS = {
    "A100": ((8, 0), False, 163, "other"),
    "RTX 4090": ((8, 9), False, 99, "other"),
    "H100": ((9, 0), False, 227, "sm90"),
    "B200": ((10, 0), False, 227, "other"),
    "RTX 5090": ((12, 0), False, 99, "other"),
    "T4": ((7, 5), False, 64, "small"),
    "MI250 (gfx90a)": ((9, 0), True, 64, "small"),
    "MI300 (gfx942)": ((9, 4), True, 64, "small"),
}


@pytest.fixture
def gpu(monkeypatch):
    """Function that replaces GPU 0."""

    def install(capability, hip, kilobytes):
        properties = SimpleNamespace(major=capability[0], minor=capability[1], shared_memory_per_block=48 << 10)
        if hip:
            properties.shared_memory_per_block = kilobytes << 10
        else:
            properties.shared_memory_per_block_optin = kilobytes << 10
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", "6.4" if hip else None)
        clear()

    def clear():
        config.arch.cache_clear()
        hopper.unavailable.cache_clear()

    yield install
    clear()


@pytest.mark.parametrize("name", GPUS)
def test_tiles_follow_from_the_gpu(name, gpu):
    *known, expected = GPUS[name]
    gpu(*known)
    assert config.arch(GPU) == expected
    reason = hopper.unavailable(torch.bfloat16, GPU)
    assert (reason is None) == (name == "H100")
    if known[1]:
        assert "not with ROCm" in reason


def test_float32_products_without_tf32(gpu):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        gpu(*GPUS["A100"][:3])
        assert config.dot_precision() == "tf32"
        gpu(*GPUS["MI250 (gfx90a)"][:3])
        assert config.dot_precision() == "ieee"
        torch.set_float32_matmul_precision("highest")
        gpu(*GPUS["A100"][:3])
        assert config.dot_precision() == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_every_gpu_has_tiles_of_every_kernel():
    for arch in ("sm90", "other", "small", "interpreter"):
        for dim in (16, 64, 128, 256):
            for dtype in (torch.bfloat16, torch.float32, torch.float64):
                for kernel in (config.FORWARD, config.KEY_GRADIENTS, config.QUERY_GRADIENTS):
                    tile = config.choose(kernel, arch, dim, dtype, aligned=False)
                    assert tile.block_m * tile.block_n > 0
                assert decode.choose(arch, dim, dtype).block_n > 0
