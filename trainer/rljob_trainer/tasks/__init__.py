"""Tasks: prompts and rewards. Runs in the controller, without torch."""
