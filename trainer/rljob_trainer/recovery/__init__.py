"""What happens when memory runs out: evidence, a changed memory plan, and the failed phase once more."""
