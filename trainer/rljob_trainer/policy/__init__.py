"""The trained model and the FSDP2 ranks that hold it."""
