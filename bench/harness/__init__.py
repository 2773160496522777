"""Code that the measuring programs share."""
