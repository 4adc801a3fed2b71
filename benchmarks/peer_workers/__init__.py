"""The processes of `benchmarks/peers.py`: each holds one peer and answers requests on its standard input."""
