"""One drafting of every kind, of sizes that suit tiny models, and all verification rules by the
names of their configs.
"""

import yaml
from hydra.utils import get_class

from examples.new_draft import KnownText
from specheads import drafting, papers
from specheads.pair.config import config_folder

DRAFTINGS = {
    "chain": drafting.Autoregressive(),
    "layer_skip": papers.LayerSkip([0]),
    "known_text": KnownText(),
    "beam": papers.Beam(3),
    "multi": papers.Multi(3),
    "batch": papers.Multi(3, merge=False),
    "tree": papers.Tree(3, 0.02, 0.02, max_nodes=20, max_width=5),
    "graph": papers.Graph(
        tau=1, max_verified=24, top_k=3, theta_prob=0.02, theta_sib=0.02, max_nodes=20, max_width=5
    ),
}

RULES = {
    path.stem: get_class(yaml.safe_load(path.read_text())["_target_"])
    for path in sorted((config_folder() / "verification").glob("*.yaml"))
}
