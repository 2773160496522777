"""The process: settings to a running replica, leadership, the reconcile loop, probes, metrics and logs."""
