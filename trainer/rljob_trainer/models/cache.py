"""Where models that were made or fetched once are kept."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/rljob`, else `~/.cache/rljob`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob"
