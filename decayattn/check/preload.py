"""What the processes that judge have imported before they are forked (processes); nothing here touches a GPU."""

import contextlib

import decayattn.check.errors  # noqa: F401
from decayattn.backends import registry

for _name in registry.KERNELS:
    with contextlib.suppress(Exception):  # whoever needs it imports it again, and tells why it cannot be
        registry.load(_name)
