"""What the theory of speculative decoding says, computed."""
