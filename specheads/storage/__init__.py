"""Files that a killed process leaves complete or absent: whole files, shards with checksums, run
folders, locks and journals.
"""
