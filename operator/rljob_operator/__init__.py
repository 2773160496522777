"""The Kubernetes operator: reconciles RLJobs into pods. observe → reconcile → apply."""
