"""Jobs on the Kubernetes of this machine, as a user sees them: kubectl, the installed operator, a job's status."""
