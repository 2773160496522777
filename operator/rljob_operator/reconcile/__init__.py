"""What should be done about a job, decided from what was observed. Pure: no clock, no I/O."""
