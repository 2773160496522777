"""Entry point of `python -m rljob_cluster`: prints errors as one line, without a traceback."""

from __future__ import annotations

import sys

from rljob_cluster.cli import app
from rljob_cluster.errors import ClusterError

try:
    app(prog_name="python -m rljob_cluster")
except ClusterError as error:
    sys.exit(f"error: {error}")
