"""How long tests wait."""

from __future__ import annotations

PATIENCE_SECONDS = 600.0
"""Before a test says that something does not come. Many times what it takes on an idle machine: only a test that fails
waits so long, and a busy machine is no reason to fail."""
