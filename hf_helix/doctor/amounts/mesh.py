"""The simulated mesh of one rank: axes have sizes, and nothing is sent.

In:   the sizes of the parallel dimensions.
Out:  a `Mesh` on the meta device without process groups; the log of its transfers.
Must hold: graphs over a simulated and a real mesh are equal.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_helix.config import PARAMETERS
from hf_helix.doctor.amounts.meter import Transfer
from hf_helix.operators.base import TransferFn
from hf_helix.operators.communication.transport import Axis, ReplicaAxes, Transport, bytes_moved
from hf_helix.operators.zero.host_shard import HostLink
from hf_helix.planning.graph.operator import Kind
from hf_helix.planning.timing.sizes import COPIES, EXPERT_COPIES, HOST
from hf_helix.runtime.distributed.mesh import Mesh
from hf_helix.runtime.distributed.pipe import Pipe

META = torch.device("meta")


class SimulatedTransport(Transport):
    """Logs transfers, and sends nothing; `sums_in_place`: a reduce-scatter adds up in fp32 at least, like NCCL's."""

    def __init__(self, axis: str, size: int, sums_in_place: bool, log: list[Transfer]) -> None:
        self.axis = axis
        self.size = size
        self.rank = 0
        self._sums_in_place = sums_in_place
        self._log = log

    def all_gather(self, out: Tensor, value: Tensor) -> None:
        self._note("all_gather", out, value)

    def exchange(self, out: Tensor, value: Tensor) -> None:
        self._note("exchange", out, value)

    def exchange_rows(self, out: Tensor, value: Tensor, arriving: Sequence[int], sent: Sequence[int]) -> None:
        self._note("exchange_rows", out, value, arriving, sent)

    def reduce_scatter(self, out: Tensor, value: Tensor) -> None:
        self._note("reduce_scatter", out, value)

    def shift(self, out: Tensor, value: Tensor) -> None:
        self._note("shift", out, value)

    def shift_back(self, out: Tensor, value: Tensor) -> None:
        self._note("shift_back", out, value)

    def prefers_exchange(self, value: Tensor) -> bool:
        return not self._sums_in_place or value.element_size() < 4

    def _note(self, method: str, out: Tensor, value: Tensor, *rows: Sequence[int]) -> None:
        both_ways = bytes_moved(method, out, value, self.size, self.rank, rows)
        self._log.append(Transfer(self.axis, method, max(both_ways)))


@dataclass(frozen=True)
class SimulatedMesh:
    """A simulated mesh, and the log of its transfers."""

    mesh: Mesh
    log: list[Transfer]


def simulated_mesh(
    sizes: Mapping[str, int],
    inter_node_axes: Collection[str] = (),
    sums_in_place: bool = True,
    spread: Mapping[str, int] | None = None,
    streams_weights: bool = False,
) -> SimulatedMesh:
    """Returns the mesh of the first rank of a layout, with the full model on one pipeline rank.

    Args:
        sizes: sizes of "tp", "cp" and "ep", 1 by default; and of "vocabulary".
        inter_node_axes: the axes between nodes.
        sums_in_place: see `SimulatedTransport`.
        spread: number of ranks by axis over which weights are sharded; None for full weights.
        streams_weights: whether weights lie on the host.
    """
    tp, cp, ep = (sizes.get(name, 1) for name in ("tp", "cp", "ep"))
    log: list[Transfer] = []

    def axis(name: str, size: int, *kinds: str) -> Axis:
        crosses = any(kind in inter_node_axes for kind in kinds)
        kind = Kind.INTER_NODE if crosses else Kind.INTRA_NODE
        return Axis(SimulatedTransport(name, size, sums_in_place, log), kind)

    def shard_axes(name: str) -> ReplicaAxes | None:
        size = (spread or {}).get(name, 1)
        if size == 1 and not streams_weights:
            return None
        return ReplicaAxes(axis(name, size, "dp", *["cp"] * (cp > 1)), axis(name, size, "dp"))

    def copy(sent: int, received: int, move: TransferFn) -> None:
        log.append(Transfer(HOST, "up" if received else "down", sent + received))

    over_tp = axis("tp", tp, "tp")
    experts = over_tp if ep == 1 else axis("experts", ep * tp, "ep", *["tp"] * (tp > 1))
    all_sizes = {"dp": ep, "pp": 1, "cp": cp, "tp": tp, "ep": ep}
    mesh = Mesh(
        all_sizes,
        META,
        None,
        over_tp,
        axis("cp", cp, "cp"),
        experts,
        Pipe([0]),
        replica_axes=shard_axes(COPIES),
        expert_replica_axes=shard_axes(EXPERT_COPIES),
        host_link=HostLink(PARAMETERS if streams_weights else None, copy),
        vocabulary=axis("vocabulary", sizes.get("vocabulary", tp)),
    )
    return SimulatedMesh(mesh, log)
