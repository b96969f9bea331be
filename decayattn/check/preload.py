"""What the processes that judge have imported before they are forked (processes); nothing here touches a GPU."""

import contextlib

import decayattn.check.errors  # noqa: F401
from decayattn import backends

for _name in backends.KERNELS:
    with contextlib.suppress(Exception):  # whoever needs it imports it again, and tells why it cannot be
        backends.load(_name)
