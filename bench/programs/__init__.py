"""Programs that measure: `python -m bench.programs.NAME`."""
