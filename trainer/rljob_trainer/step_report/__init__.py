"""The StepReport: progress and failures of a job in a cluster, for the operator and for users."""
