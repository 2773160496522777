"""The trainer in the pods of a Kubernetes cluster: `rljob controller` in one, `rljob worker` in the others."""
