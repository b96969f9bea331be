"""Imports that a server makes before it forks worker processes (processes). Nothing here touches a GPU."""

import contextlib

import decayattn.check.errors  # noqa: F401
from decayattn.backends import registry

for _name in registry.KERNELS:
    with contextlib.suppress(Exception):  # a later import of it raises again, with the reason
        registry.load(_name)
