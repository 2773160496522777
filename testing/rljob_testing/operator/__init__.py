"""The operator as a process beside a real API server: faults between the two, and pods that a test moves by hand."""
