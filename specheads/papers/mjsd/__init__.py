"""MJSD (Qin et al. 2024): beams that are verified by their joint probability, and the search that they approximate."""
