"""Statistics of logits: seven numbers per token, enough for every loss and figure here, with a join over parts.

In:   logits of some rows of the vocabulary [tokens, rows], in their own type; targets [tokens], counted from the first
      of these rows.
Out:  statistics [3 to 7, tokens] in fp32; of parts of a vocabulary, joined; losses; the gradient of the logits.
Must hold: `join` serves every division of a vocabulary: tiles of rows, tensor-parallel ranks, slices of a pipeline.
At most a chunk of logits is in fp32 at a time. The maximum is a constant to every gradient: it scales sums, and leaves
the loss as it is.

    number    of a token, over the logits z of a part                          over joined parts
    MAXIMUM   the largest logit m                                              the largest
    TOTAL     the sum of e = exp(z - m)                                        the sum, scaled by f = exp(m - largest m)
    TARGET    the logit of the target; 0 in a part without the target          the sum
    WEIGHTED  the sum of e * z                                                 the sum, scaled by f
    RIGHT     1 if the largest logit, of equal ones the first, is the target   of the first part with the largest
    SQUARED   the sum of e * e                                                 the sum, scaled by f * f
    PLAIN     the sum of z                                                     the sum

Losses read the first three, entropy and accuracy the next two. TOTAL, TARGET and WEIGHTED have a gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

MAXIMUM, TOTAL, TARGET, WEIGHTED, RIGHT, SQUARED, PLAIN = range(7)
LOSS = (MAXIMUM, TOTAL, TARGET)
FIGURES = (*LOSS, WEIGHTED, RIGHT)
_SCALED = {WEIGHTED: 1, SQUARED: 2, PLAIN: 0}
"""How often a sum is scaled when parts join."""

CHUNK = {"cpu": 2**20, "cuda": 2**26}
"""The most logits computed in fp32 at a time. On CUDA 256 MiB, which is 512 tokens of 128 thousand rows, so that
kernels are few; on a CPU 4 MiB, which stay in its caches."""

Parts = Callable[[Sequence[slice], int], Iterable[slice]]

_run: ContextVar[Parts] = ContextVar("_run", default=lambda parts, settled: iter(parts))


def run_parts(parts: Sequence[slice], settled: int = 2) -> Iterable[slice]:
    """Returns the parts to run of a loop over tiles or chunks, in order: all, unless `counting` says otherwise.

    Args:
        parts: of the loop.
        settled: the number of equal parts in a row of which the last holds as much memory as a later one would, with
            what is left of the parts before.
    """
    return _run.get()(parts, settled)


@contextmanager
def counting(run: Parts) -> Iterator[None]:
    """Returns a context in which loops over tiles or chunks run the parts that a function yields. For counts without
    values, where equal parts take equally long."""
    before = _run.set(run)
    try:
        yield
    finally:
        _run.reset(before)


def type_of_sums(value: Tensor) -> torch.dtype:
    """Returns a type in which sums of values are exact enough: fp32 for narrower ones."""
    return torch.promote_types(value.dtype, torch.float32)


def places(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns the place of each id, counted from the first of some rows, among these rows, and whether it lies there;
    an id elsewhere gets the nearest place."""
    return ids.clamp(0, rows - 1), (ids >= 0) & (ids < rows)


# Compiled by torch 2.11 to 2.13, a function that writes to its arguments loses its writes once a second shape comes, so
# `statistics` and `gradient` return their results.


def statistics(
    logits: Tensor,
    ids: Tensor,
    wanted: Sequence[int] = range(7),
    smoothing: float = 0.0,
    share: float = 0.0,
    masked: bool = False,
) -> Tensor:
    """Returns the statistics of a part up to the last wanted one [3 to 7, tokens]; unwanted ones are 0.

    Args:
        logits: [tokens, rows].
        ids: the targets [tokens], counted from the first row; in another part if outside of the rows.
        wanted: the numbers of the statistics, of which the first three are always there.
        smoothing: the part of a target for an even share over the vocabulary. With smoothing, TARGET is the mean logit
            by the smoothed target: the logarithm of the full sum is common to all terms, so no loss has to know.
        share: of a row in the smoothing.
        masked: whether all logits of a token may be -inf, in one part and not in all.
    """
    probabilities = _softmax(logits, masked)  # the largest is exp(0) by the sum
    column, inside = places(ids.unsqueeze(-1), logits.shape[-1])
    if masked and RIGHT not in wanted:  # on a CPU, two maxima take less time than the place of one
        largest, place, maximum = probabilities.amax(-1, keepdim=True), column, logits.amax(-1)
    else:
        largest, place = probabilities.max(-1, keepdim=True)
        maximum = logits.gather(-1, place).squeeze(-1)
    total, dtype = largest.reciprocal().squeeze(-1), probabilities.dtype
    target = logits.gather(-1, column).to(dtype).masked_fill(~inside, 0).squeeze(-1)
    if smoothing:
        target = (1 - smoothing) * target + share * logits.sum(-1, dtype=dtype)
    result = {MAXIMUM: maximum.to(dtype), TOTAL: total, TARGET: target}
    if SQUARED in wanted:
        result[SQUARED] = torch.linalg.vecdot(probabilities, probabilities) * total.square()
    if WEIGHTED in wanted:
        result[WEIGHTED] = probabilities.mul_(logits).sum(-1) * total
    if RIGHT in wanted:
        result[RIGHT] = ((place == column) & inside).squeeze(-1).to(dtype)
    if PLAIN in wanted:
        result[PLAIN] = logits.sum(-1, dtype=dtype)
    numbers = range(1 + max(wanted))
    return torch.stack([result[each] if each in result else torch.zeros_like(total) for each in numbers])


def gradient(
    logits: Tensor,
    ids: Tensor,
    factors: Tensor,
    smoothing: float = 0.0,
    share: float = 0.0,
    masked: bool = False,
) -> Tensor:
    """Returns the gradient of the logits of a part [tokens, rows], in their type.

    Args:
        logits, ids, smoothing, share, masked: see `statistics`.
        factors: see `factors_of`.
    """
    of_probability, of_target, *of_weighted = factors.unsqueeze(-1)
    result = _softmax(logits, masked)
    column, inside = places(ids.unsqueeze(-1), logits.shape[-1])
    result.mul_((logits * of_weighted[0]).add_(of_probability) if of_weighted else of_probability)
    if smoothing:
        result.add_(of_target, alpha=share)
    return result.scatter_add_(-1, column, (1 - smoothing) * of_target * inside).to(logits.dtype)


def _softmax(logits: Tensor, masked: bool) -> Tensor:
    """Returns the probabilities within a part. They are read from the logits in their own type, in one kernel."""
    logits = logits.clamp(min=torch.finfo(logits.dtype).min) if masked else logits
    return torch.softmax(logits, -1, dtype=type_of_sums(logits))


def factors_of(of_statistics: Tensor, totals: Tensor) -> Tensor:
    """Returns the factors of a part's gradient [2 or 3, tokens]: of a probability, of the target's logit, and of a
    probability by its logit.

    Args:
        of_statistics: the gradient of joined statistics [3, tokens], or [4 or more, tokens] if WEIGHTED has one.
        totals: the part's TOTAL, as it counts in the joined one [tokens].
    """
    _, of_total, of_target, *of_weighted = of_statistics[: 1 + WEIGHTED]
    if not of_weighted:
        return torch.stack((of_total * totals, of_target))
    return torch.stack(((of_total + of_weighted[0]) * totals, of_target, of_weighted[0] * totals))


def join(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the statistics of all rows [numbers, ...] from the statistics of parts of the rows [parts, numbers, ...],
    in the order of the rows, and every part's TOTAL as it counts in the joined one [parts, ...]."""
    joined, totals = join_numbers(parts.unbind(1))
    return torch.stack(joined), totals


def join_numbers(numbers: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Returns what `join` does, each number by itself, and so without a gradient if nobody reads it.

    Args:
        numbers: the statistics of parts of the rows [parts, ...].
    """
    maxima, totals, targets, *others = numbers
    maxima = maxima.detach()
    maximum = maxima.amax(0)
    factors = (maxima - maximum).exp()
    totals = totals * factors
    joined = [maximum, totals.sum(0), targets.sum(0)]
    for number, values in enumerate(others, WEIGHTED):
        if number == RIGHT:
            joined.append(values.gather(0, maxima.argmax(0, keepdim=True)).squeeze(0))
        else:
            joined.append((values * factors ** _SCALED[number]).sum(0))
    return joined, totals


# -- of joined statistics [numbers, ...], per token ----------------------------------------------------------------


def log_total(joined: Sequence[Tensor]) -> Tensor:
    """Returns the logarithm of the sum of exponentials over the vocabulary."""
    return joined[MAXIMUM] + joined[TOTAL].log()


def losses(joined: Sequence[Tensor]) -> Tensor:
    """Returns the cross-entropy: the negative log-probability of the target, smoothed if `statistics` smoothed it."""
    return log_total(joined) - joined[TARGET]


def entropies(joined: Sequence[Tensor]) -> Tensor:
    """Returns the entropy of the probabilities."""
    return log_total(joined) - joined[WEIGHTED] / joined[TOTAL]


# -- in tiles and chunks -------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Some tokens and some rows of the logits.

    Attributes:
        number: counts the parts of the rows.
        tokens: the position of the tokens.
        first: the first row.
        products: logits, or what logits are made of [tokens, rows].
        into: receives the gradient of the products; None for any memory, such as the products'.
        take: called with the gradient of the products.
    """

    number: int
    tokens: slice
    first: int
    products: Tensor
    into: Tensor | None = None
    take: Callable[[Tensor], object] = lambda gradient: None


def whole_tile(logits: Tensor, into: Tensor | None = None) -> list[Tile]:
    """Returns all logits [tokens, rows] as the only tile."""
    return [Tile(0, slice(0, len(logits)), 0, logits, into)]


def _chunks(logits: Tensor) -> list[slice]:
    """Returns chunks of the tokens; they are even, so that a compiler sees one shape, or two."""
    tokens = len(logits)
    count = -(-logits.numel() // CHUNK.get(logits.device.type, CHUNK["cuda"]))
    size = max(1, -(-tokens // max(1, count)))
    return [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]


def statistics_of(
    tiles: Iterable[Tile], ids: Tensor, parts: int, of: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns the statistics of this rank's rows [3 to 7, tokens], and every part's total as it counts there [parts,
    tokens].

    Args:
        tiles: of `parts` parts of the rows.
        ids: the targets [tokens], counted from the first of this rank's rows.
        parts: see above.
        of: `statistics` of products and targets.
    """
    result: Tensor | None = None
    for tile in tiles:
        inner = _ids_in(tile, ids)
        for chunk in run_parts(_chunks(tile.products)):
            values = of(tile.products[chunk], inner[chunk])
            result = values.new_empty((parts, len(values), len(ids))) if result is None else result
            result[tile.number, :, tile.tokens][:, chunk] = values
    assert result is not None
    return join(result) if parts > 1 else (result[0], result[:, TOTAL])


def hand_gradients(
    tiles: Iterable[Tile],
    ids: Tensor,
    of_statistics: Tensor,
    totals: Tensor,
    of: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    """Hands the gradients of their products to tiles.

    Args:
        tiles, ids: see `statistics_of`.
        of_statistics: the gradient of the statistics [3 or more, tokens].
        totals: from `statistics_of`.
        of: `gradient` of products, targets and factors.
    """
    factors = [factors_of(of_statistics, part) for part in totals]
    for tile in tiles:
        inner, known, chunks = _ids_in(tile, ids), factors[tile.number][:, tile.tokens], _chunks(tile.products)
        into = tile.products if tile.into is None else tile.into
        for chunk in run_parts(chunks):
            part = of(tile.products[chunk], inner[chunk], known[:, chunk])
            if tile.into is None and len(chunks) == 1:
                into = part
            else:
                into[chunk] = part
        tile.take(into)


def _ids_in(tile: Tile, ids: Tensor) -> Tensor:
    return ids[tile.tokens] - tile.first if tile.first else ids[tile.tokens]
