"""Seeded sequence lengths: the same on every machine and Python version."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from statistics import NormalDist


class BadLengths(ValueError):
    """A distribution that cannot be drawn from; the message says why and what is wanted."""


@lru_cache(maxsize=256)
def draw(
    distribution: str,
    *,
    shortest: int,
    longest: int,
    mean: float | None,
    sigma: float | None,
    tokens: int | None,
    sequences: int | None,
    seed: int,
    most: int,
) -> tuple[int, ...]:
    """Lengths that sum to `tokens` exactly (the last is cut to fit), or `sequences` of them.

    `mean` is that of the distribution before lengths are rounded and clipped to [`shortest`, `longest`], so that the
    drawn lengths' own mean lies below it where the tail is clipped. Only `random.Random.random` is used of the
    generator, whose sequence Python guarantees; the normal quantile comes from `statistics`.

    Raises:
        BadLengths: the fields contradict each other, or more than `most` sequences would be drawn.
    """
    if (tokens is None) == (sequences is None):
        raise BadLengths("wanted either `tokens` or `sequences`" + (", not both" if tokens is not None else ""))
    if shortest > longest:
        raise BadLengths(f"min {shortest} is above max {longest}; wanted min <= max")
    if distribution == "lognormal" and mean is None:
        raise BadLengths("a lognormal distribution wants `mean`, in tokens")
    if distribution == "uniform" and (mean is not None or sigma is not None):
        raise BadLengths("`mean` and `sigma` belong to lognormal; a uniform distribution wants `min` and `max` only")

    uniform = random.Random(seed).random
    if distribution == "uniform":

        def one() -> int:
            return shortest + int(uniform() * (longest - shortest + 1))
    else:
        assert mean is not None
        spread = 1.0 if sigma is None else sigma
        centre = math.log(mean) - spread * spread / 2
        quantile = NormalDist().inv_cdf

        def one() -> int:
            length = math.exp(min(centre + spread * quantile(max(uniform(), 2.0**-53)), 60.0))
            return round(min(max(length, shortest), longest))

    out: list[int] = []
    total = 0
    while (total < tokens) if tokens is not None else (len(out) < (sequences or 0)):
        if len(out) == most:
            raise BadLengths(f"needs more than {most:,} sequences to reach {tokens:,} tokens; wanted longer ones")
        length = one() if tokens is None else min(one(), tokens - total)
        out.append(length)
        total += length
    return tuple(out)
