"""What experiments measure besides tokens: the energy of decoding (MJSD, Qin et al. 2024), and drafts of several candidates.

NVML's counter is of whole NVIDIA boards, without the host. It moves about ten times a second, so that only sums over many
responses say something.
"""

import logging
from collections import Counter
from collections.abc import Callable

import torch

from specheads.decoding.records import Generation
from specheads.pair.pair import Pair

logger = logging.getLogger(__name__)

DRAFT_COUNTS = ("first_reached", "first_accepted", "second_reached", "second_accepted", "bigrams", "bigrams_repeated")


Meter = Callable[[], float]  # returns joules since an arbitrary moment


def energy_meter(pair: Pair) -> Meter | None:
    """Return the meter of the GPUs that hold a pair, or None, with the reason in the log, where there is none."""
    devices = {weight.device for lm in (pair.target_lm, pair.draft_lm) for weight in lm.model.parameters()}
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    if not gpus or torch.version.hip:
        logger.info("energy is not measured: it is that of NVIDIA's GPUs")
        return None
    try:
        import pynvml
    except ImportError:
        logger.info("energy is not measured: pip install 'specheads[energy]' for nvidia-ml-py, which reads NVIDIA's counter")
        return None
    try:
        pynvml.nvmlInit()
        # By their ids, because CUDA_VISIBLE_DEVICES changes numbers and order.
        ids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in gpus]
        handles = [pynvml.nvmlDeviceGetHandleByUUID(each) for each in ids]

        def joules() -> float:
            return 1e-3 * sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))

        joules()
    except pynvml.NVMLError as error:
        logger.info("energy is not measured: %s; NVML counts whole GPUs since Volta, not their parts (MIG)", error)
        return None
    return joules


def draft_counts(generation: Generation) -> dict[str, int]:
    """Return DRAFT_COUNTS over the drafts of a response.

    Of first and second children how many verification reached, which are those of the context and of accepted nodes, and how many
    it accepted. Siblings are in the order in which they were drafted: of chosen tokens the most likely first, of samples the
    first sampled. Of bigrams that end at a drafted node, how many end at an earlier node of the same draft, too: those that a
    token graph merges with tau = 2 (Gong et al. 2024, GSD, section 3).
    """
    counts, last = dict.fromkeys(DRAFT_COUNTS, 0), int(generation.prompt_ids[-1])
    for each in generation.rounds:
        if (tree := each.tree) is not None:
            path, seen, siblings = set(tree.path), set(), Counter[int]()
            for node, parent in enumerate(tree.parents):
                if (parent < 0 or parent in path) and siblings[parent] < 2:
                    rank = ("first", "second")[siblings[parent]]
                    counts[f"{rank}_reached"] += 1
                    counts[f"{rank}_accepted"] += node in path
                siblings[parent] += 1
            for parent, token in zip(tree.parents[: tree.num_drafted], tree.tokens, strict=False):
                bigram = last if parent < 0 else tree.tokens[parent], token
                counts["bigrams"] += 1
                counts["bigrams_repeated"] += bigram in seen
                seen.add(bigram)
        last = each.tokens[-1]
    return counts
