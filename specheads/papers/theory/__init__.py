"""What the theory of speculative decoding says, computed (Yin et al. 2024; Sun et al. 2024;
SpecDec++, Huang et al. 2024).
"""
