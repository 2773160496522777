"""Pictures of a run: reward, timing by phase and memory by phase."""

from rljob_trainer.plot.run_plots import plot_run

__all__ = ["plot_run"]
