"""The trainer in Kubernetes pods: `rljob controller` runs in one pod, `rljob worker` in the others."""
