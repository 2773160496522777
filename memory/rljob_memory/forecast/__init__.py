"""Whether memory will run out before it does: from the samples of each step, in how many steps, and of which class."""

from rljob_memory.forecast.forecast import Forecast, worth_preventing
from rljob_memory.forecast.samples import Sample

__all__ = ["Forecast", "Sample", "worth_preventing"]
