"""The files of a run that the trainer alone reads: checkpoints, journal, identity and lock."""
