"""Early warning: in how many steps memory will run out, and of which class, from the samples of each step."""

from rljob_memory.forecast.forecast import Forecast, worth_preventing

__all__ = ["Forecast", "worth_preventing"]
