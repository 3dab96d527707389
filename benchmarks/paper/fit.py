"""Fits the few constants of the paper's clusters on the paper's Megatron column and its figure 15 (a) alone.

    python -m benchmarks.paper.fit                      prints the constants of the A40 cluster
    python -m benchmarks.paper.fit --cluster a800x64    those of the A800 cluster

They are copied into the cluster's file by hand. Constants are factors on what the file says of products, attention,
links of a socket, between the sockets of a node (or between all its devices) and between nodes; and how much
computation and communication, and both kinds of communication, slow each other down.
The most probable ones are found: errors of speeds are taken to be 5 %, of the gains of figure 15 (a) 3 points, of
rates 20 % around those that were assumed before anything was fitted (`ASSUMED`), but between sockets, of which the
paper says nothing, a factor of two, and of contention 0.15 around the 1.25 that section 6.3.3 of the paper reports.
Of A800 there are two dense rows of the Megatron column and no figure 15: its rates are fitted, its contention is not.
Of H100 there is none.

Speeds change smoothly with the rates, so these are found by Gauss-Newton steps. Gains jump with the plan that is found;
each contention goes up and down in turn, in steps that become smaller. The two are fitted in turn.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.common import options_of
from benchmarks.paper.ablation import gains
from benchmarks.paper.published import FIGURE_11, FIGURE_12, FIGURE_13A, FIGURE_15, INCREMENTS, MEGATRON
from benchmarks.paper.runs import Runs
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.cluster import Cluster, Curve, Link, load_cluster

A40, A800 = "a40x64", "a800x64"
ROWS = {A40: (*FIGURE_11, *FIGURE_12), A800: FIGURE_13A}
CONTENTION = {
    "beside computation": ((Kind.COMPUTE, Kind.INTRA_NODE), (Kind.COMPUTE, Kind.INTER_NODE)),
    "beside communication": ((Kind.INTRA_NODE, Kind.INTER_NODE),),
}
REPORTED, SPREAD = 1.25, 0.15
LEAST, MOST = 1.0, 2.0
"""Bounds of contention: nothing is faster beside something else; two that share all they need take twice as long."""
SPEED_ERROR, GAIN_ERROR, RATE_ERROR = 0.05, 0.03, 0.2
ASSUMED = {
    A40: {"matmul": 0.65, "attention": 0.42, "island": 0.56, "node": 0.56, "network": 0.9},
    A800: {"matmul": 0.77, "attention": 0.55, "node": 0.8, "network": 0.9},
}
"""Efficiencies at the largest size before the fit: of long products and sequences, and of links.
The file holds what was fitted last, so a fit must not start from there again."""
SPREADS = {(A40, "node"): math.log(2)}
"""Errors of rates that are less certain: of the sockets of a node the paper says nothing."""
STEP = 0.05
"""By how much the logarithm of a rate changes to see what follows."""
LEAST_GAIN = 1e-3
"""The part of the error that a step must gain for a further one."""

Constants = dict[str, float]


def tuned(cluster: Cluster, constants: Constants) -> Cluster:
    """Returns a cluster with its rates multiplied, and with other contention if there is any among the constants."""
    device = replace(
        cluster.device,
        matmul={key: _scaled(curve, constants["matmul"]) for key, curve in cluster.device.matmul.items()},
        attention={key: _scaled(curve, constants["attention"]) for key, curve in cluster.device.attention.items()},
    )
    slow = dict(cluster.contention)
    for name, kinds in CONTENTION.items():
        for first, second in kinds if name in constants else ():
            slow[first, second] = slow[second, first] = Curve(((1.0, constants[name]),))
    island = cluster.island
    return replace(
        cluster,
        device=device,
        island=island and replace(island, link=_faster(island.link, constants["island"])),
        node=_faster(cluster.node, constants["node"]),
        network=_faster(cluster.network, constants["network"]),
        contention=slow,
    )


def efficiencies(cluster: Cluster) -> Constants:
    """Returns the efficiencies of a cluster at the largest size, by the names of the constants."""
    curves = {
        "matmul": cluster.device.matmul["bf16"],
        "attention": cluster.device.attention["bf16"],
        "node": cluster.node.efficiency,
        "network": cluster.network.efficiency,
    }
    if cluster.island is not None:
        curves["island"] = cluster.island.link.efficiency
    return {name: curve.points[-1][1] for name, curve in curves.items()}


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, share * factor) for size, share in curve.points))


def _faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth * factor)


class Fit:
    """The error of constants.

    Args:
        runs: with the cluster as its file has it.
        name: of the cluster.
    """

    def __init__(self, runs: Runs, name: str) -> None:
        self.runs, self.name = runs, name
        self.cluster = load_cluster(name)

    def with_constants(self, constants: Constants) -> Runs:
        """Returns runs on a cluster with these constants."""
        return self.runs.with_clusters({self.name: tuned(self.cluster, constants)})

    def speeds(self, constants: Constants) -> list[float]:
        """Returns the errors of the Megatron column and those of the rates, each in parts of what it may be."""
        runs, known = self.with_constants(constants), efficiencies(self.cluster)
        speeds = [runs.run(row, MEGATRON).speed / row.printed[MEGATRON] for row in ROWS[self.name]]
        rates = [
            math.log(constants[name] * known[name] / assumed) / SPREADS.get((self.name, name), RATE_ERROR)
            for name, assumed in ASSUMED[self.name].items()
        ]
        return [math.log(speed) / SPEED_ERROR for speed in speeds] + rates

    def steps(self, constants: Constants) -> float:
        """Returns the error of figure 15 (a), with that of contention."""
        row, total, error = FIGURE_15["a"], 0.0, 0.0
        for gain, more in zip(gains(self.with_constants(constants), row), INCREMENTS["a"], strict=True):
            total += more / 100
            error += ((gain - 1 - total) / GAIN_ERROR) ** 2
        return error + ((constants["beside computation"] - REPORTED) / SPREAD) ** 2


def gauss_newton(
    start: Constants, names: Sequence[str], errors: Callable[[Constants], list[float]], rounds: int
) -> Constants:
    """Returns the constants at which the sum of squared errors is least, found by linear steps of their logarithms.

    Args:
        start: all constants.
        names: those that change.
        errors: of constants.
        rounds: steps; fewer once a step gains nothing.
    """
    best, residuals = dict(start), np.array(errors(start))
    for _ in range(rounds):
        nearby = [errors(best | {name: best[name] * math.exp(STEP)}) for name in names]
        slopes = (np.array(nearby) - residuals).T / STEP
        step = np.linalg.lstsq(slopes, -residuals, rcond=None)[0]
        tried = best | {name: best[name] * math.exp(each) for name, each in zip(names, step, strict=True)}
        seen = np.array(errors(tried))
        if seen @ seen > (1 - LEAST_GAIN) * (residuals @ residuals):
            break
        best, residuals = tried, seen
        print(f"  error {residuals @ residuals:7.2f}: {_text(best)}", flush=True)
    return best


def descend(
    start: Constants, names: Sequence[str], error: Callable[[Constants], float], steps: Sequence[float]
) -> Constants:
    """Returns the contention at which the error is least, found by changing one after the other.

    Args:
        start: all constants.
        names: those that change.
        error: of constants.
        steps: by how much they change, the largest first; each as long as it helps.
    """

    @cache
    def error_at(values: tuple[float, ...]) -> float:
        return error(start | dict(zip(names, values, strict=True)))

    best = tuple(start[name] for name in names)
    for step in steps:
        moved = True
        while moved:
            tried = [
                (*best[:place], min(MOST, max(LEAST, round(best[place] + way, 6))), *best[place + 1 :])
                for place in range(len(names))
                for way in (step, -step)
            ]
            nearest = min(tried, key=error_at)
            moved = error_at(nearest) < error_at(best)
            best = nearest if moved else best
        print(f"  error {error_at(best):7.2f}: {_text(dict(zip(names, best, strict=True)))}", flush=True)
    return start | dict(zip(names, best, strict=True))


def _text(constants: Constants) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in constants.items())


def main() -> None:
    parser = options_of(__doc__, rounds=3, steps=3)
    parser.add_argument("--cluster", default=A40, choices=list(ASSUMED), help="whose constants are fitted")
    options = parser.parse_args()
    fit, rates = Fit(Runs(), options.cluster), list(ASSUMED[options.cluster])
    constants: Constants = dict.fromkeys(rates, 1.0)
    slows = list(CONTENTION) if options.cluster == FIGURE_15["a"].cluster else []
    constants |= dict.fromkeys(slows, 1.1)
    start = time.time()
    for _ in range(options.rounds if slows else 1):
        print("rates, on the Megatron column", flush=True)
        constants = gauss_newton(constants, rates, fit.speeds, options.steps)
        if slows:
            print("contention, on figure 15 (a)", flush=True)
            constants = descend(constants, slows, fit.steps, (0.1, 0.05, 0.02))
    error = sum(each**2 for each in fit.speeds(constants)) + (fit.steps(constants) if slows else 0.0)
    print(f"{_text(constants)}: error {error:.2f}, after {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
