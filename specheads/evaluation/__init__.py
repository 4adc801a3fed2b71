"""Live measurements of decoding: sweeps, intervals, reports."""
