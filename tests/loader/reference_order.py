"""Order 1 written down as slowly and plainly as docs/order.md tells it."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def key(seed: int, epoch: int, word: int, index: int) -> int:
    state = 0
    for part in (seed, epoch, word, index):
        state = splitmix64(state ^ part)
    return state


def chunks(rows_per_shard: list[int], chunk_size: int) -> list[list[int]]:
    cut: list[list[int]] = []
    row = 0
    for rows in rows_per_shard:
        pieces = (rows + chunk_size - 1) // chunk_size
        for piece in range(pieces):
            length = rows // pieces + (1 if piece < rows % pieces else 0)
            cut.append(list(range(row, row + length)))
            row += length
    return cut


def epoch_order(
    rows_per_shard: list[int], *, chunk_size: int, streams: int, window: int, seed: int, epoch: int
) -> list[int]:
    cut = chunks(rows_per_shard, chunk_size)
    permuted = sorted(range(len(cut)), key=lambda chunk: (key(seed, epoch, 1, chunk), chunk))
    sequence = [row for chunk in permuted for row in cut[chunk]]
    shuffled: list[list[int]] = []
    place = 0
    for stream in range(streams):
        length = len(sequence) // streams + (1 if stream < len(sequence) % streams else 0)
        blocks: dict[int, list[int]] = {}
        for i in range(length):
            block = (i + stream * window // streams) // window
            blocks.setdefault(block, []).append(place + i)
        mixed: list[int] = []
        for block in sorted(blocks):
            mixed += sorted(blocks[block], key=lambda at: (key(seed, epoch, 2, at), at))
        shuffled.append([sequence[at] for at in mixed])
        place += length
    taken = [0] * streams
    order = []
    for position in range(len(sequence)):
        stream = position % streams
        order.append(shuffled[stream][taken[stream]])
        taken[stream] += 1
    return order


def bucketed(
    order: list[int], lengths: list[float], *, window: int, size: int, seed: int, epoch: int
) -> list[int]:
    sorted_order = []
    for start in range(0, len(order), window):
        rows = order[start : start + window]
        places = sorted(range(len(rows)), key=lambda place: (lengths[rows[place]], place))
        buckets: dict[int, list[int]] = {}
        for at, place in enumerate(places):
            buckets.setdefault((start + at) // size, []).append(rows[place])
        whole = [bucket for bucket, found in buckets.items() if len(found) == size]
        whole.sort(key=lambda bucket: key(seed, epoch, 4, bucket))
        rest = [bucket for bucket, found in buckets.items() if len(found) < size]
        for bucket in whole + rest:
            sorted_order += buckets[bucket]
    return sorted_order
