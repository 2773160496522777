"""What a run keeps on disk, and how it stays whole whatever moment the run is stopped at."""
