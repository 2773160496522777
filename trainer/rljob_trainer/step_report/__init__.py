"""The StepReport: how a job in a cluster tells its operator, and people, where it is."""
