"""Free ports for a control plane and an operator, while other test sessions run on the same machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

BLOCK = 24
_FIRST, _LAST = 24000, 26000


@contextmanager
def port_block() -> Iterator[int]:
    """The first of 24 free ports in a row. The last one is held, so no other session takes the same block."""
    for base in range(_FIRST, _LAST, BLOCK):
        with socket.socket() as held:
            try:
                held.bind(("127.0.0.1", base + BLOCK - 1))
            except OSError:
                continue
            if all(_is_free(port) for port in range(base, base + BLOCK - 1)):
                yield base
                return
    raise OSError(f"no {BLOCK} free ports in a row between {_FIRST} and {_LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
