"""Rules compared: replayed from recordings, decoded, reported."""
