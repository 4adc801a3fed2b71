"""The processes of `benchmarks/decoding.py`: each holds one peer and answers requests on its
standard input.
"""
