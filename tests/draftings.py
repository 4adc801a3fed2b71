"""One drafting of every kind, of sizes that suit tiny models."""

from specheads import drafting

DRAFTINGS = {
    "chain": drafting.Autoregressive(),
    "layer_skip": drafting.LayerSkip([0]),
    "lookup": drafting.Lookup(),
    "beam": drafting.Beam(3),
    "sampled_beam": drafting.Beam(3, 2),
    "multi": drafting.Multi(3),
    "batch": drafting.Multi(3, merge=False),
    "distinct": drafting.Multi(3, replacement=False),
    "tree": drafting.Tree(3, 0.02, 0.02, max_nodes=20, max_width=5),
    "graph": drafting.Graph(tau=1, max_verified=24, top_k=3, theta_prob=0.02, theta_sib=0.02, max_nodes=20, max_width=5),
}
