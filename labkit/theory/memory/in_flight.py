"""How many layers' activations a pipeline stage holds at once.

Sources: Huang et al., "GPipe" (2019); Narayanan et al. (2021), section 2.2, for 1F1B and interleaving; Korthikanti et
al. (2022), section 4.2.3 and appendix B, for the factor 1 + (p−1)/(pv).
"""

from __future__ import annotations

from labkit.theory.communication.given import a_rank, whole
from labkit.theory.memory.shape import divides, one_of


def layers_in_flight(
    layers: int, stages: int, micro_batches: int, schedule: str = "1f1b", rank: int = 0, chunks: int = 1
) -> int:
    """Layers × micro-batches whose activations a stage holds at the peak: multiply with one layer's bytes.

    Of its own layers, ⌈L/p⌉ or ⌊L/p⌋, a stage r holds: GPipe m micro-batches, 1F1B min(m, p−r): on the first stage L
    layers' worth, whatever p is. Interleaved 1F1B with v chunks a stage holds min(mv, (v−1)p + 2(p−1−r) + 1) chunks of
    L/(pv) layers: on the first stage L·(1 + (p−1)/(pv)).

    Args:
        layers: L.
        stages: p.
        micro_batches: m.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` (2 chunks or more, m a multiple of p, pv divides L).
        rank: r, the stage, from 0.
        chunks: v.

    Raises:
        TypeError: No whole number.
        ValueError: Out of range, an unknown schedule, fewer layers than stages, what interleaving demands.

    >>> layers_in_flight(48, stages=4, micro_batches=8), layers_in_flight(48, stages=8, micro_batches=8)
    (48, 48)
    >>> layers_in_flight(48, 4, 8, schedule="interleaved", chunks=3) / 48  # 1 + 3/12
    1.25
    """
    for name, value in (("layers", layers), ("micro_batches", micro_batches), ("chunks", chunks), ("stages", stages)):
        whole(name, value, 1)
    one_of("schedule", schedule, ("gpipe", "1f1b", "interleaved"))
    if stages > layers:
        raise ValueError(f"stages is {stages}, but there are {layers} layers: expected a layer for each stage")
    a_rank("rank", rank, stages)
    if schedule == "interleaved":
        return _interleaved(layers, stages, micro_batches, rank, chunks)
    if chunks > 1:
        raise ValueError(f"chunks is {chunks}, but {schedule} has one a stage: leave it out, or use 'interleaved'")
    own = layers // stages + (rank < layers % stages)
    return own * (micro_batches if schedule == "gpipe" else min(micro_batches, stages - rank))


def _interleaved(layers: int, p: int, m: int, rank: int, v: int) -> int:
    if v < 2:
        raise ValueError("interleaved needs chunks=2 or more; with one it is '1f1b'")
    divides("stages", p, "micro_batches", m)
    divides("stages·chunks", p * v, "layers", layers)
    warm_up = (v - 1) * p + 2 * (p - 1 - rank)
    return layers // (p * v) * min(m * v, warm_up + 1)
