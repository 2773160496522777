"""Jobs on this machine's Kubernetes, as users see them: kubectl, the installed operator, the status of a job."""
