"""Where models come from: a URI becomes a local directory in Hugging Face format."""
