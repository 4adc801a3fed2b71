"""SpecInfer (Miao et al. 2024): drafts of several candidates form a tree, which the target reads at
once.
"""
