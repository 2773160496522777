"""Other trainers and engines: the lines that identify them, and their options that change the use of memory."""

from rljob_memory.programs.table import PROGRAMS, Effect, Option, Program

__all__ = ["PROGRAMS", "Effect", "Option", "Program"]
