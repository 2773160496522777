"""What a person sees of a run: progress, the summary at the end, and where the libraries' logs went."""
