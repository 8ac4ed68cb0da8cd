"""What a step computes and moves, for its time: FLOPs of the matrix products, bytes the kernels read and write.

Only the ratio between settings has to be right; the two rates of ``coefficients.Speed`` absorb the rest.
"""

from __future__ import annotations

from oomguard.estimate.inventory import Inventory

BACKWARD = 2  # each product of the forward has two in the backward (Kaplan et al. 2020, 2.1)
KERNELS_PER_SAVED_BYTE = 8  # a saved tensor is written once and read, remade and passed on by its neighbours
UPDATE_PASSES = {"sgd": 6, "adam": 10, "adamw": 11, "lion": 9, "adafactor": 14, "muon": 16}


def block_flops(inventory: Inventory, attention_only: bool = False) -> int:
    """Multiply-adds (counted as 2) of one block's forward: its matrices, and the two products with scores."""
    model, step = inventory.model, inventory.step
    matrices = 4 * model.d_model**2 + 2 * model.d_model * model.d_mlp
    core = 2 * 2 * step.batch * step.seq_len**2 * model.d_model
    return core if attention_only else 2 * inventory.tokens * matrices + core


def step_flops(inventory: Inventory) -> int:
    """One update: forward, backward and recompute of every micro-batch, and Muon's matrix products."""
    model, step = inventory.model, inventory.step
    forward = model.n_layers * block_flops(inventory)
    forward += 2 * inventory.tokens * model.d_model * model.vocab_size
    again = sum(
        len(segment) * block_flops(inventory, attention_only=segment.region == "attention")
        for segment in inventory.segments
    )
    update = 0
    if step.optimizer == "muon":  # five Newton-Schulz steps of three products on each matrix
        d, m = model.d_model, model.d_mlp
        update = model.n_layers * 5 * (4 * 6 * d**3 + 2 * (4 * d * d * m + 2 * d**3))
    return step.accumulate * ((1 + BACKWARD) * forward + again) + update


def step_traffic_bytes(inventory: Inventory) -> int:
    """One update: the tensors between kernels of forward, backward and recompute, the logits, the update."""
    model, step = inventory.model, inventory.step
    saved = inventory.block_saved
    micro = model.n_layers * saved.total + 3 * inventory.logits_bytes
    micro += sum(
        len(segment) * (saved.scores if segment.region == "attention" else saved.total) // 2
        for segment in inventory.segments
    )
    return (
        step.accumulate * KERNELS_PER_SAVED_BYTE * micro
        + UPDATE_PASSES[step.optimizer] * inventory.weights_bytes
    )
