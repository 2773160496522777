"""`rljob fetch`: copies files of a run from the volume of a job in a cluster."""
