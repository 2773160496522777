"""The Kubernetes objects of a job, as pure functions `build_…` from the job to a manifest."""
