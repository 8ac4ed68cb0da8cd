"""Counts, with the trace engine, which tensors are alive and in flight where the peak of a GPT step can lie.

    python -m oomguard.calibration.count_moments FILE            all of them, half an hour on two cores
    python -m oomguard.calibration.count_moments FILE --missing  those the shipped file does not have yet

The graph of the preset GPT depends on its layers, policy, optimizer and on whether it is compiled, not on its
widths. So steps of many widths have the same primitives in the same order, and the bytes active at each are a
sum of tensor sizes with whole numbers in front: those numbers are solved for here. Of all primitives only those
are kept that are the largest for some shape. FILE is ``oomguard/data/moments.json`` in a checkout.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomguard.calibration.tool import output_path, run_tool
from oomguard.config.model import ModelConfig
from oomguard.config.policy import CheckpointPolicy
from oomguard.config.step import StepConfig
from oomguard.estimate.inventory import Inventory
from oomguard.model.step import build_step
from oomguard.trace.engine import capture_built, counted_timelines

USAGE = "python -m oomguard.calibration.count_moments FILE.json [--missing]"
SAMPLES = 16
SHAPES_TO_COVER = 3000
TOLERANCE = 0.002  # of the peak: a primitive within this of the largest says nothing new
MOST_VECTORS = 6
NEGLIGIBLE = 0.04  # a count below this is noise of the solution
POLICIES = {
    "none": "none",
    "block": "every",
    "segment 2": "stride=2",
    "segment 3": "stride=3",
    "segment 4": "stride=4",
    "attention": "attention",
    "custom_function": "custom_function",
}
LAYERS = {
    "none": (2, 3, 4, 8),
    "block": (2, 3, 4, 6, 10),
    "segment 2": (2, 4, 8),
    "segment 3": (3, 9),
    "segment 4": (8,),
    "attention": (2, 4, 8),
    "custom_function": (2, 4, 8),
}
HALF_LAYERS = {
    "none": (2, 4, 8),
    "block": (2, 4, 8),
    "segment 2": (4,),
    "attention": (2, 4),
    "custom_function": (4,),
}
OPTIMIZERS = ("sgd", "lion", "adafactor", "muon")
VARIANTS: dict[str, dict[str, Any]] = {
    "clip": {"clip_norm": True},
    **{optimizer: {"optimizer": optimizer} for optimizer in OPTIMIZERS},
}
VARIANT_LAYERS = {"none": (2, 3, 4, 8), "block": (2, 4, 8)}
CLIPPED_VARIANTS: dict[str, dict[str, Any]] = {
    f"{optimizer} clip": {"optimizer": optimizer, "clip_norm": True} for optimizer in OPTIMIZERS
}
CLIPPED_LAYERS = {"none": (2, 4, 8), "block": (2, 4, 8)}
OTHER_REGIONS = {"segment 2": (4, 8), "segment 4": (8,), "attention": (4,)}
HALF_VARIANT_LAYERS = {"none": (4,), "block": (4, 8)}
BARE_LAYERS = {"custom_function": (4,)}
Matrix = NDArray[np.float64]


def main(arguments: list[str]) -> None:
    out = output_path([argument for argument in arguments if argument != "--missing"], USAGE)
    found: dict[str, Any] = _shipped() if "--missing" in arguments else {}
    tasks = [
        task for task in graphs_to_count() if str(task[2]) not in found.get(task[0], {}).get(task[1], {})
    ]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for (way, what, layers, _), kinds in zip(tasks, pool.imap(_count_task, tasks), strict=True):
            found.setdefault(way, {}).setdefault(what, {})[str(layers)] = kinds
            print(f"{way}, {what}, {layers} layers", file=sys.stderr, flush=True)
    out.write_text(
        json.dumps({"schema": "oomguard.moments/1", "moments": found}, separators=(",", ":")) + "\n"
    )


def _shipped() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(resources.files("oomguard").joinpath("data/moments.json").read_text())
    return dict(tables["moments"])


def graphs_to_count() -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Way of running, what is recomputed (and how it is updated), layers, and the settings of the step."""
    for compiled in (True, False):
        run = "compiled" if compiled else "eager"
        for width, dtype, layers in (("full", "float32", LAYERS), ("half", "bfloat16", HALF_LAYERS)):
            for region, sizes in layers.items():
                settings = {"checkpoint": POLICIES[region], "dtype": dtype, "compiled": compiled}
                yield from ((f"{run} {width}", region, n, settings) for n in sizes)
        for width, dtype, regions, variants in (
            ("full", "float32", VARIANT_LAYERS, VARIANTS),
            ("full", "float32", CLIPPED_LAYERS, CLIPPED_VARIANTS),
            ("full", "float32", OTHER_REGIONS, VARIANTS),
            ("full", "float32", BARE_LAYERS, {"clip": VARIANTS["clip"]}),
            ("half", "bfloat16", HALF_VARIANT_LAYERS, VARIANTS),
        ):
            for region, sizes in regions.items():
                for variant, changes in variants.items():
                    settings = {
                        "checkpoint": POLICIES[region],
                        "dtype": dtype,
                        "compiled": compiled,
                    } | changes
                    yield from ((f"{run} {width}", f"{region}, {variant}", n, settings) for n in sizes)


def _count_task(task: tuple[str, str, int, dict[str, Any]]) -> dict[str, list[Any]]:
    _, _, layers, settings = task
    return count(layers, settings | {"checkpoint": CheckpointPolicy.parse(settings["checkpoint"])})


def count(n_layers: int, settings: dict[str, Any]) -> dict[str, list[Any]]:
    """The vectors of one graph, by kind of moment: (blocks done, alive counts, in-flight counts)."""
    inventories, graphs, defaults = [], [], []
    places: list[tuple[str, int]] = []
    for model, step in small_shapes(n_layers, settings):
        built = build_step(model, step, evaluated=False)
        graph, default, moments = counted_timelines(capture_built(built)[-1])
        places = list(places_of(moments, n_layers))
        inventory = Inventory(model, step)
        held = held_at(inventory, places)
        inventories.append(inventory)
        graphs.append(np.array(graph) - held)
        defaults.append(np.array(default) - np.array(graph))
    names = list(inventories[0].units)
    sizes = np.array([[inventory.units[name] for name in names] for inventory in inventories], dtype=float)
    alive, in_flight = solve(sizes, np.array(graphs)), solve(sizes, np.array(defaults))
    kept: dict[str, list[Any]] = {}
    for kind in ("loss", "last", "inner", "end"):
        members = [i for i, place in enumerate(places) if place[0] == kind]
        chosen = cover(members, places, alive, in_flight, n_layers, settings)
        kept[kind] = [
            [places[i][1], named(names, alive[:, i]), named(names, in_flight[:, i])] for i in chosen
        ]
    return kept


def small_shapes(n_layers: int, settings: dict[str, Any]) -> Iterator[tuple[ModelConfig, StepConfig]]:
    """Shapes whose tensor sizes are independent of each other."""
    rng = random.Random(n_layers)
    for _ in range(SAMPLES):
        heads = rng.choice([2, 3, 4, 5, 6, 7])
        seq_len = rng.choice([40, 56, 72, 88, 104, 120, 136])
        width = heads * rng.choice([24, 32, 40, 48, 56, 72])
        model = ModelConfig(
            n_layers=n_layers,
            d_model=width,
            n_heads=heads,
            d_mlp=width * rng.choice([2, 3, 4]) + 8 * rng.randint(0, 9),
            context=seq_len + 8 * rng.randint(1, 9),
            vocab_size=rng.choice([200, 312, 520, 904, 1288]),
        )
        yield model, StepConfig(batch=rng.choice([2, 3, 5, 6, 7]), seq_len=seq_len, **settings)


def places_of(moments: list[Any], n_layers: int) -> Iterator[tuple[str, int]]:
    """Where each primitive stands: forward and loss, the backward of which block, or behind the backward."""
    backward = [
        i
        for i, moment in enumerate(moments)
        if moment.phase in ("backward", "recompute") and moment.block >= 0
    ]
    end = max(backward, default=-1)
    block = n_layers
    for i, moment in enumerate(moments):
        if moment.phase in ("backward", "recompute") and moment.block >= 0:
            block = min(block, moment.block)
        after = n_layers - 1 - block
        if i > end:
            yield "end", n_layers
        elif block == n_layers:
            yield "loss", 0
        else:
            yield ("last" if after == 0 else "inner"), after


def held_at(inventory: Inventory, places: list[tuple[str, int]]) -> Matrix:
    """What the inventory holds at each primitive."""
    last = inventory.model.n_layers - 1
    at = {
        ("loss", 0): inventory.held_in_forward(),
        ("end", last + 1): inventory.held_at_end(),
        **{("last" if b == last else "inner", last - b): inventory.held_before(b) for b in range(last + 1)},
    }
    totals = {place: sum(held.values()) for place, held in at.items()}
    return np.array([totals[place] for place in places], dtype=float)


def solve(sizes: Matrix, measured: Matrix) -> Matrix:
    """Counts, (units, primitives), by least squares on bytes relative to each unit's mean size."""
    scale = sizes.mean(axis=0)
    found = np.linalg.lstsq(sizes / scale, measured, rcond=1e-9)[0]
    return np.asarray(found / scale[:, None])


def cover(
    members: list[int],
    places: list[tuple[str, int]],
    alive: Matrix,
    in_flight: Matrix,
    n_layers: int,
    settings: dict[str, Any],
) -> list[int]:
    """The few primitives whose largest is, for every realistic shape, within the tolerance of the largest of all."""
    if not members:
        return []
    held, sizes = realistic(n_layers, settings, [places[i] for i in members])
    total = held + sizes @ (alive + in_flight)[:, members]
    alone = held + sizes @ alive[:, members]
    both = np.concatenate([total, alone])
    best = both.max(axis=1)
    chosen: list[int] = []
    reached = np.full(len(both), -np.inf)
    while len(chosen) < MOST_VECTORS:
        short = reached < (1 - TOLERANCE) * best
        if not short.any():
            break
        gain = np.minimum(both[short] / best[short, None], 1.0)
        score = (gain >= 1 - TOLERANCE).sum(axis=0) + gain.mean(axis=0)
        pick = int(score.argmax())
        chosen.append(pick)
        reached = np.maximum(reached, both[:, pick])
    return [members[i] for i in chosen]


def realistic(
    n_layers: int, settings: dict[str, Any], places: list[tuple[str, int]]
) -> tuple[Matrix, Matrix]:
    """Shapes people train: bytes held at each place, (shapes, places), and unit sizes, (shapes, units)."""
    rng = random.Random(1)
    held, sizes = [], []
    for _ in range(SHAPES_TO_COVER):
        heads = rng.choice([2, 4, 8, 12, 16, 24, 32])
        width = heads * rng.choice([16, 32, 64, 64, 128])
        seq_len = rng.choice([64, 128, 256, 512, 1024, 2048, 4096])
        model = ModelConfig(
            n_layers=n_layers,
            d_model=width,
            n_heads=heads,
            d_mlp=width * rng.choice([2, 3, 4, 4]),
            context=seq_len,
            vocab_size=rng.choice([256, 256, 1024, 4096, 32768]),
        )
        inventory = Inventory(
            model, StepConfig(batch=rng.choice([1, 2, 4, 8, 16, 32, 64]), seq_len=seq_len, **settings)
        )
        held.append(held_at(inventory, places))
        sizes.append(list(inventory.units.values()))
    return np.array(held), np.array(sizes, dtype=float)


def named(names: list[str], counts: Matrix) -> dict[str, float]:
    """Counts by unit, rounded to the whole number they are near; without those that are nothing."""
    found = {}
    for name, value in zip(names, counts, strict=True):
        near = round(float(value))
        value = near if abs(value - near) < 0.1 else round(float(value), 2)
        if abs(value) > NEGLIGIBLE:
            found[name] = value
    return found


if __name__ == "__main__":
    run_tool(main)
