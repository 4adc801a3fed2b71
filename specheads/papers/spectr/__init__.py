"""SpecTr (Sun et al. 2023): several independent drafts, and how one of them is selected."""
