"""What the model is asked, and what its responses are worth. Runs in the controller, without torch."""
