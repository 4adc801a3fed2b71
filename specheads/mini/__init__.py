"""The embedded pair whose proportions are those of real pairs."""
