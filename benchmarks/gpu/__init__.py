"""What decoding and training cost on a GPU: scripts that each answer one question within eight
minutes.
"""
