"""Imports that worker processes share: the server makes them before it forks (processes). Nothing here touches a
GPU."""

import contextlib

import decayattn.check.errors  # noqa: F401
from decayattn.backends import registry

for _name in registry.KERNELS:
    with contextlib.suppress(Exception):  # a later import of it raises again, with the reason
        registry.load(_name)
