"""Micro-batches and log-probabilities: what the losses of `rljob_trainer.algorithms` are computed from."""
