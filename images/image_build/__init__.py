"""Builds RLJob's container images with buildah or docker, and skips those that are up to date."""
