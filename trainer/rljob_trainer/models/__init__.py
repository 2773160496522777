"""Models: resolves model URIs to local directories in Hugging Face format."""
