"""GSD (Gong et al. 2024): trees of the most likely tokens, and graphs that copy what a draft repeats."""
