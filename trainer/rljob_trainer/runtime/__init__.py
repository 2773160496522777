"""A run from its manifest to its exit code. The training loop is `controller`.

`run_command` (`rljob run`, on one machine) and `pods` (in a cluster) start a `JobRun`.
It starts an `Attempt`, which sets up the roles and a `Controller`, which runs the steps.
"""
