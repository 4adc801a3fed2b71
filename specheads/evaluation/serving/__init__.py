"""A batch of requests served with any policy on the load, simulated from a recording and a table of costs."""
