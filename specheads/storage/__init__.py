"""Files that survive a kill: whole files, shards with checksums, run folders, locks and journals."""
