"""What a run shows to people while it runs: experiment trackers, and samples of its responses."""
