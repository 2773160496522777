"""Plots of a run: reward, learning curves, timing by phase, memory by phase and over time."""

from rljob_client.plot.run_plots import plot_run

__all__ = ["plot_run"]
