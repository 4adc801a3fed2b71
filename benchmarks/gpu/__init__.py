"""What decoding costs on a GPU."""
