"""Eviction by hit density: the block that is least likely to be used again soon goes first, leaves of chains first.

After LHD (Beckmann, Chen and Cidon, NSDI 2018). Blocks of a pool have the same bytes and are taken to cost the same to
compute, so the value of an idle block is its expected hits per time in the pool. `ReuseModel` learns it online from the
ages at which blocks of a class were used again, evicted ones included while their hashes are remembered; a class is the
number of uses so far and the number of blocks that the last request added behind what it found. `HitDensityOrder` is
the eviction order.

Time is counted in published blocks, so an idle pool does not age. It advances in epochs of 1 / EPOCHS of the pool;
within one, values are fixed. Only a leaf, a block without published blocks behind it, is evicted while there is one, so
what is cached stays prefix closed. Blocks of one class and epoch are one queue. An operation is O(1) per block, and an
epoch O(queues + classes x ages): per published block at most EPOCHS queues, and a constant for pools of 1,000 and more.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from headstart.core.cache.eviction import SEEN

EPOCHS = 16  # per pool
MAX_AGE = 4 * EPOCHS  # in epochs: as long as hashes of evicted blocks are remembered
USES, SIZES = 6, 8
CLASSES = USES * SIZES
DECAY = 0.99  # of what was learned, per epoch
SHARED, OWN = 256.0, 64.0  # weights of the common hazard, in blocks: of the factor of a class, and of each of its ages


def _widths() -> list[int]:
    """Return the lengths of the age buckets in epochs: four of each power of two."""
    widths: list[int] = []
    while sum(widths) <= MAX_AGE:
        widths.append(1 << len(widths) // 4)
    return widths


WIDTHS = _widths()
BUCKETS = [bucket for bucket, width in enumerate(WIDTHS) for _ in range(width)][: MAX_AGE + 1]


class ReuseModel:
    """State of all blocks of a pool: classes, children, and the learned value by class and age.

    The key of an idle block is its class and the epoch of its last use: `epoch * CLASSES + class`.
    """

    def __init__(self, num_blocks: int, size: int) -> None:
        self.epoch = 0
        self.keys = [-1] * num_blocks  # since the last use
        self.children = [0] * num_blocks  # published blocks directly behind a block
        self.parked: dict[int, HitDensityOrder] = {}  # idle blocks with children, and the order that each is in
        self._uses = bytearray(num_blocks)
        self._parents = [0] * num_blocks  # 0: not counted as a child
        self._former_parents = [0] * num_blocks
        self._serials = [0] * num_blocks  # of publication; 0: not published
        self._parent_serials = [0] * num_blocks
        self._num_published = 0
        self._ticks_per_epoch = max(size // EPOCHS, 1)
        self._ticks = 0
        self._at_risk: dict[int, int] = {}  # number of blocks not used again, cached or not, by key
        self._reuses = [[0.0] * len(WIDTHS) for _ in range(CLASSES)]
        self._exposure = [[0.0] * len(WIDTHS) for _ in range(CLASSES)]
        self._values = [[0.0] * len(WIDTHS) for _ in range(CLASSES)]

    def grow_capacity_by(self, num: int) -> None:
        """Add state for `num` more blocks."""
        self.keys += [-1] * num
        self._uses += bytes(num)
        for table in (self.children, self._parents, self._former_parents, self._serials, self._parent_serials):
            table += [0] * num

    def expected_hits_per_epoch(self, key: int) -> float:
        """Return the expected hits per epoch of a block, 0 to 1. Changes nothing."""
        epoch, kind = divmod(key, CLASSES)
        return self._values[kind][BUCKETS[min(self.epoch - epoch, MAX_AGE)]]

    # ---------------------------------------------------------------------------------------------- events of blocks

    def record_published(self, block: int, parent: int, memo: int) -> None:
        """Record a published block. `parent`: the block before it, 0: none; `memo`: of its eviction, -1: none."""
        self._num_published += 1
        self._serials[block] = self._num_published
        self._former_parents[block] = parent
        self._parent_serials[block] = self._serials[parent]
        self.children[block] = 0
        self.keys[block] = -1
        self._uses[block] = 0
        self.attach_child(block)
        if memo >= 0:
            key, self._uses[block] = divmod(memo, USES + 1)
            self._reused(key)
        self._ticks += 1
        if self._ticks >= self._ticks_per_epoch:
            self._ticks = 0
            self._end_epoch()

    def attach_child(self, block: int) -> None:
        """Count a block as a child of the one before it, unless that has lost its content."""
        parent = self._former_parents[block]
        if parent and not self._parents[block] and self._parent_serials[block] == self._serials[parent]:
            self._parents[block] = parent
            self.children[parent] += 1

    def detach_child(self, block: int) -> None:
        """Undo `attach_child`: the block is evicted, or set aside. A parent without other children may be evicted."""
        parent, self._parents[block] = self._parents[block], 0
        if not parent or self._parent_serials[block] != self._serials[parent]:
            return
        self.children[parent] -= 1
        if not self.children[parent] and parent in self.parked:
            self.parked[parent].enqueue_leaf(parent)

    def record_content_lost(self, block: int) -> int:
        """Record that a block lost its content; return what to remember of it."""
        self.detach_child(block)
        self._serials[block] = 0
        return self.keys[block] * (USES + 1) + self._uses[block] if self.keys[block] >= 0 else -1

    def record_use(self, blocks: Sequence[int]) -> None:
        """Record a use of blocks of one chain, which are idle from now on."""
        uses, keys = self._uses, self.keys
        size = min(sum(1 for block in blocks if not uses[block]).bit_length(), SIZES - 1)
        base = self.epoch * CLASSES + size - SIZES
        at_risk = self._at_risk
        for block in blocks:
            count = uses[block] = min(uses[block] + 1, USES)
            key = keys[block] = base + SIZES * count
            at_risk[key] = at_risk.get(key, 0) + 1

    def record_reuse(self, block: int) -> None:
        """Record that an idle block is used again."""
        self._reused(self.keys[block])

    def record_left_idle_unused(self, block: int) -> None:
        """Record that an idle block is no longer idle, without a use."""
        self._leave(self.keys[block])

    # ---------------------------------------------------------------------------------------------- learning

    def _reused(self, key: int) -> None:
        epoch, kind = divmod(key, CLASSES)
        if self.epoch - epoch <= MAX_AGE:
            self._reuses[kind][BUCKETS[self.epoch - epoch]] += 1.0
            self._leave(key)

    def _leave(self, key: int) -> None:
        count = self._at_risk.get(key, 0)
        if count > 1:
            self._at_risk[key] = count - 1
        elif count:
            del self._at_risk[key]

    def _end_epoch(self) -> None:
        """Advance the age of all blocks, and compute the values anew."""
        now = self.epoch
        old: list[int] = []
        for key, count in self._at_risk.items():
            epoch, kind = divmod(key, CLASSES)
            if now - epoch > MAX_AGE:
                old.append(key)
            else:
                self._exposure[kind][BUCKETS[now - epoch]] += count
        for key in old:
            del self._at_risk[key]
        self.epoch += 1
        self._learn()

    def _learn(self) -> None:
        """Estimate the hazard of reuse by class and age; with little data it is the common one, times a factor."""
        ages = range(len(WIDTHS))
        reuses = [sum(column) for column in zip(*self._reuses, strict=True)]
        exposure = [sum(column) for column in zip(*self._exposure, strict=True)]
        mean = (sum(reuses) + 1.0) / (sum(exposure) + SHARED)
        common = [min((reuses[age] + mean * SHARED) / (exposure[age] + SHARED), 1.0) for age in ages]
        usual = hit_densities(common)
        for kind in range(CLASSES):
            mine, time = self._reuses[kind], self._exposure[kind]
            if not any(time):
                self._values[kind] = usual
                continue
            expected = sum(map(float.__mul__, time, common))
            factor = (sum(mine) + SHARED * mean) / (expected + SHARED * mean)
            hazards = [min((mine[a] + OWN * factor * common[a]) / (time[a] + OWN), 1.0) for a in ages]
            self._values[kind] = hit_densities(hazards)
        for table in (self._reuses, self._exposure):
            for kind in range(CLASSES):
                table[kind] = [DECAY * value for value in table[kind]]


def hit_densities(hazards: Sequence[float]) -> list[float]:
    """Return for each age bucket the largest reuses / time over all times to keep an unused block from there on.

    This is the Gittins index of a block (Gittins, J. R. Statist. Soc. B 41, 1979). `hazards`: probability of reuse per
    epoch. One pass from old to young: a bucket joins the stretch behind it if that has a higher density.
    """
    found = [0.0] * len(hazards)
    stretches: list[tuple[float, float, float]] = []  # reuses, time, share not reused; of one block at its beginning
    for age in range(len(hazards) - 1, -1, -1):
        hazard, width = hazards[age], WIDTHS[age]
        left = (1.0 - hazard) ** width
        reuses, time = 1.0 - left, (1.0 - left) / hazard if hazard > 1e-9 else float(width)
        while stretches and stretches[-1][0] * time > reuses * stretches[-1][1]:
            more, longer, rest = stretches.pop()
            reuses, time, left = reuses + left * more, time + left * longer, left * rest
        stretches.append((reuses, time, left))
        found[age] = reuses / time
    return found


class HitDensityOrder:
    """The idle blocks of one class of tenant and priority; those with the lowest hit density are evicted first.

    Equal values: the older, then those of fewer uses; within a queue in the order in which they became leaves.
    """

    __slots__ = ("_heap", "_heap_epoch", "_marks", "_model", "_parked", "_queues", "_size")

    def __init__(self, marks: bytearray, max_protected: int = 0, model: ReuseModel | None = None) -> None:
        self._marks = marks
        self._model = model or ReuseModel(len(marks), len(marks))
        self._queues: dict[int, OrderedDict[int, None]] = {}  # leaves by key
        self._heap: list[tuple[float, int]] = []  # (value, key) of the queues
        self._heap_epoch = -1
        self._parked: OrderedDict[int, None] = OrderedDict()  # blocks with children
        self._size = 0

    def add_chain(self, blocks: Sequence[int], hot: int = 0) -> int:
        model = self._model
        model.record_use(blocks)
        self._size += len(blocks)
        for block in blocks:
            model.attach_child(block)
            self._place(block)
        return 0

    def remove(self, block: int) -> None:
        self._take(block)
        self._model.record_left_idle_unused(block)

    def remove_for_reuse(self, blocks: Sequence[int]) -> None:
        marks, revived = self._marks, self._model.record_reuse
        for block in blocks:
            self._take(block)
            revived(block)
            marks[block] = SEEN

    def pop_victim(self) -> int:
        model = self._model
        if self._heap_epoch != model.epoch:
            self._rebuild()
        while self._heap:
            key = self._heap[0][1]
            queue = self._queues[key]
            while queue:
                block, _ = queue.popitem(last=False)
                if not model.children[block]:
                    self._size -= 1
                    return block
                self._park(block)  # a child was published while it was idle
            heappop(self._heap)
            del self._queues[key]
        block, _ = self._parked.popitem(last=False)  # all blocks behind them are in use
        del model.parked[block]
        self._size -= 1
        return block

    def enqueue_leaf(self, block: int) -> None:
        """Move a block that has become a leaf to its queue."""
        del self._parked[block]
        del self._model.parked[block]
        self._place(block)

    @property
    def teardown_tables(self) -> tuple[OrderedDict[int, None], ...]:
        return (*self._queues.values(), self._parked)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: object) -> bool:
        keys = self._model.keys
        if block in self._parked or not isinstance(block, int) or block >= len(keys):
            return block in self._parked
        return block in self._queues.get(keys[block], ())

    def __iter__(self) -> Iterator[int]:
        """Iterate in eviction order, except that blocks with others behind them come last."""
        value = self._model.expected_hits_per_epoch
        for key in sorted(self._queues, key=lambda key: (value(key), key)):
            yield from self._queues[key]
        yield from self._parked

    def _place(self, block: int) -> None:
        model = self._model
        if model.children[block]:
            self._park(block)
            return
        key = model.keys[block]
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = OrderedDict()
            heappush(self._heap, (model.expected_hits_per_epoch(key), key))
        queue[block] = None

    def _park(self, block: int) -> None:
        self._parked[block] = None
        self._model.parked[block] = self

    def _take(self, block: int) -> None:
        if block in self._parked:
            del self._parked[block]
            del self._model.parked[block]
        else:
            del self._queues[self._model.keys[block]][block]
        self._size -= 1

    def _rebuild(self) -> None:
        """Order the queues by their values of this epoch; drop empty ones."""
        self._queues = {key: queue for key, queue in self._queues.items() if queue}
        value = self._model.expected_hits_per_epoch
        self._heap = [(value(key), key) for key in self._queues]
        heapify(self._heap)
        self._heap_epoch = self._model.epoch
