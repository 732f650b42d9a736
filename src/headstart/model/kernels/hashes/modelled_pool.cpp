// The router's model of one prefix cache: blocks by hash, their references, order of eviction and uses. The same as
// ModelledPool in Python (router/index/modelled_pool.py), which its tests compare it with.
//
// A block hash is named by its first 16 bytes; it is SHA-256, so that is enough. A block takes 56 bytes and a slot of 8
// in a table filled to three quarters at most, a remembered eviction 16 and a slot. Blocks lie in chunks, so a pool that
// grows copies none. One thread at a time. Without memory it ends the process, as the system would do a little later.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr size_t HASH_BYTES = 32, CHUNK = 4096;
constexpr long AHEAD = 12;           // blocks whose slots are fetched before they are needed
constexpr long MIN_GROWTH = 1024;    // blocks by which a pool grows, and its initial size
constexpr long MAX_LOOKED_AT = 64;   // next evicted blocks whose value is estimated
constexpr uint8_t KEPT = 2;  // instead of 1 for an unsure block: its request has failed, probably after computing it
constexpr uint8_t HOT = 1, SEEN = 2; // marks, as in core/cache/eviction.py

struct Key {
    uint64_t first, second;
    bool operator==(const Key& other) const { return first == other.first && second == other.second; }
};

Key key_of(const uint8_t* hash) {
    Key key;
    std::memcpy(&key, hash, sizeof key);
    return key;
}

template <class T> class Chunks {
  public:
    T& operator[](size_t index) { return parts_[index / CHUNK][index % CHUNK]; }
    const T& operator[](size_t index) const { return parts_[index / CHUNK][index % CHUNK]; }
    size_t size() const { return size_; }
    void grow(size_t num) {
        for (size_ += num; parts_.size() * CHUNK < size_;) parts_.emplace_back(new T[CHUNK]());
    }
    // Frees the last chunk; returns its size, 0 when none is left.
    size_t shrink() {
        if (parts_.empty()) return 0;
        parts_.pop_back();
        return CHUNK;
    }

  private:
    std::vector<std::unique_ptr<T[]>> parts_;
    size_t size_ = 0;
};

// A hash table of tag -> number, by linear probing. The place follows from the tag alone, so entries need no look at
// their keys to be moved. `seed` keeps clients from choosing prompts that share a place.
class Table {
  public:
    explicit Table(size_t num, uint64_t seed) : seed_(seed | 1) {
        while ((size_t(1) << bits_) * 3 < num * 4) bits_++;
        slots_.reset(static_cast<uint64_t*>(std::calloc(size_t(1) << bits_, sizeof(uint64_t))));
        if (!slots_) throw std::bad_alloc();
    }
    size_t size() const { return used_; }
    uint32_t tag(const Key& key) const { return uint32_t(((key.first ^ key.second) * seed_) >> 32); }
    void fetch(uint32_t tag) const { __builtin_prefetch(&slots_[home(tag)]); }

    // Returns the number of the entry with this tag of which `is_it` holds; -1: there is none.
    template <class Is> int64_t find(uint32_t tag, const Is& is_it, size_t* place = nullptr) const {
        for (size_t at = home(tag);; at = (at + 1) & mask()) {
            const uint64_t slot = slots_[at];
            if (!slot) return -1;
            if (uint32_t(slot >> 32) == tag && is_it(uint32_t(slot) - 1)) {
                if (place != nullptr) *place = at;
                return uint32_t(slot) - 1;
            }
        }
    }
    void add(uint32_t tag, uint32_t number) {
        if (++used_ * 4 > (mask() + 1) * 3) widen();
        put(uint64_t(tag) << 32 | (number + 1));
    }
    void erase(size_t place) {
        used_--;
        for (size_t hole = place, at = place;;) {
            at = (at + 1) & mask();
            const uint64_t slot = slots_[at];
            if (slot && ((at - home(uint32_t(slot >> 32))) & mask()) < ((at - hole) & mask())) continue;
            slots_[hole] = slot;
            if (!slot) return;
            hole = at;
        }
    }

  private:
    struct Free {
        void operator()(uint64_t* slots) const { std::free(slots); }
    };
    size_t mask() const { return (size_t(1) << bits_) - 1; }
    size_t home(uint32_t tag) const { return tag >> (32 - bits_); }
    void put(uint64_t slot) {
        size_t at = home(uint32_t(slot >> 32));
        while (slots_[at]) at = (at + 1) & mask();
        slots_[at] = slot;
    }
    void widen() {
        std::unique_ptr<uint64_t[], Free> old(slots_.release());
        const size_t num = mask() + 1;
        bits_++;
        slots_.reset(static_cast<uint64_t*>(std::calloc(num * 2, sizeof(uint64_t))));
        if (!slots_) throw std::bad_alloc();
        for (size_t at = 0; at < num; at++)
            if (old[at]) put(old[at]);
    }

    uint64_t seed_;
    int bits_ = 6;
    size_t used_ = 0;
    std::unique_ptr<uint64_t[], Free> slots_;
};

// Evicted hashes of one generation, and whether they were evicted for space (core/cache/history.py).
class Generation {
  public:
    explicit Generation(uint64_t seed) : table_(0, seed), seed_(seed) {}
    size_t size() const { return table_.size(); }
    void fetch(const Key& key) const { table_.fetch(table_.tag(key)); }
    void add(const Key& key, bool for_space) {
        uint32_t index = free_;
        if (index) {
            free_ = uint32_t(keys_[index].first);
        } else {
            index = std::max<uint32_t>(uint32_t(keys_.size()), 1);
            keys_.grow(index + 1 - keys_.size());
        }
        keys_[index] = key;
        table_.add(table_.tag(key), index << 1 | for_space);
    }
    // Returns 1: evicted for space, 0: for another cause, -1: not remembered. Removes it if asked.
    int look(const Key& key, bool removes) {
        size_t place = 0;
        const auto is_it = [&](uint32_t number) { return keys_[number >> 1] == key; };
        const int64_t found = table_.find(table_.tag(key), is_it, &place);
        if (found < 0) return -1;
        if (removes) {
            table_.erase(place);
            keys_[found >> 1].first = free_;
            free_ = uint32_t(found >> 1);
        }
        return int(found & 1);
    }
    Generation emptied() const { return Generation(seed_); }

  private:
    Table table_;
    Chunks<Key> keys_;  // 0 is never used
    uint32_t free_ = 0;
    uint64_t seed_;
};

struct Block {
    Key key;
    int64_t serial;  // last time it was surely cached
    int64_t first;   // first use
    int32_t uses, refs;
    uint32_t before, after;  // in its order of eviction
    uint8_t marks, unsure, published;
};

struct Order {
    uint32_t head = 0, tail = 0;
    long size = 0;
};

struct Pool {
    Chunks<Block> blocks;  // block 0 is never used
    Table table;
    Generation young, old;
    Order orders[2];  // of idle blocks; with 2q the second is of protected ones
    std::vector<int32_t> scratch, ballast;
    long generation, max_protected, remembered, ungrown, num_new = 0, num_reused = 0;
    int64_t now;
    bool is_lru;

    Pool(long capacity, long max_blocks, bool lru, uint64_t seed, int64_t start)
        : table(size_t(max_blocks), seed), young(seed), old(seed), generation(std::max((max_blocks + 1) / 2, 1L)),
          max_protected(max_blocks / 2), remembered(2 * (max_blocks + 1)), now(start), is_lru(lru) {
        const long usable = std::min(MIN_GROWTH, capacity);
        ungrown = capacity - usable;
        blocks.grow(1);
        grow(usable);
    }

    long num_usable() const { return long(blocks.size()) - 1; }
    long num_idle() const { return orders[0].size + orders[1].size; }
    long num_free() const { return long(scratch.size()) + num_idle(); }
    long num_held() const { return num_usable() - num_free() - long(ballast.size()); }
    long capacity() const { return num_usable() - long(ballast.size()) + ungrown; }
    double share() const { return double(num_reused) / double(std::max(num_new, 1L)); }

    void grow(long num) {
        const long start = long(blocks.size());
        blocks.grow(size_t(num));
        for (long block = start + num - 1; block >= start; block--) scratch.push_back(int32_t(block));
        generation = std::max(generation, long(blocks.size()) / 2);
    }
    int64_t find(const Key& key, size_t* place = nullptr) const {
        return table.find(table.tag(key), [&](uint32_t number) { return blocks[number].key == key; }, place);
    }
    bool has(const uint8_t* hashes, long index) const { return find(key_of(hashes + size_t(index) * HASH_BYTES)) >= 0; }

    // ------------------------------------------------------------------------------------------------------- order

    Order& order_of(const Block& block) { return orders[!is_lru && (block.marks & HOT)]; }
    void append(Order& order, uint32_t number) {
        Block& block = blocks[number];
        block.before = order.tail;
        block.after = 0;
        (order.tail ? blocks[order.tail].after : order.head) = number;
        order.tail = number;
        order.size++;
    }
    void remove(Order& order, uint32_t number) {
        const Block& block = blocks[number];
        (block.before ? blocks[block.before].after : order.head) = block.after;
        (block.after ? blocks[block.after].before : order.tail) = block.before;
        order.size--;
    }
    // Calls `act` for idle blocks in the order of eviction, until it returns false.
    template <class Act> void in_order(const Act& act) const {
        for (const Order& order : orders)
            for (uint32_t number = order.head; number; number = blocks[number].after)
                if (!act(blocks[number])) return;
    }
    // Adds idle blocks of one chain, tails first; returns HOT if the last one is.
    uint8_t add_idle(const std::vector<int32_t>& idle) {
        uint8_t hot = 0;
        for (const int32_t number : idle) {
            Block& block = blocks[number];
            if (!is_lru && (hot || (block.marks & HOT))) {
                hot = HOT;
                block.marks |= HOT;
            }
            append(order_of(block), uint32_t(number));
        }
        while (!is_lru && orders[1].size > max_protected) {
            const uint32_t number = orders[1].head;
            remove(orders[1], number);
            blocks[number].marks &= uint8_t(~HOT);
            append(orders[0], number);
        }
        return hot;
    }

    // ------------------------------------------------------------------------------------------------------ blocks

    void remember(const Key& key, bool for_space) {
        if (long(young.size()) >= generation) {
            old = std::move(young);
            young = old.emptied();
        }
        young.add(key, for_space);
    }
    void forget(const int32_t* numbers, size_t num, bool for_space) {
        for (size_t i = 0; i < num; i++) {
            if (i + AHEAD < num) {
                const Key& next = blocks[numbers[i + AHEAD]].key;
                table.fetch(table.tag(next));
                young.fetch(next);
            }
            Block& block = blocks[numbers[i]];
            const uint32_t number = uint32_t(numbers[i]);
            size_t place = 0;
            table.find(table.tag(block.key), [&](uint32_t other) { return other == number; }, &place);
            table.erase(place);
            block.published = 0;
            remember(block.key, for_space);
        }
    }
    // Writes `num` new blocks, scratch ones first, then those evicted; there are as many.
    void allocate(long num, int32_t* found) {
        long have = 0;
        for (; have < num && !scratch.empty(); scratch.pop_back()) found[have++] = scratch.back();
        const long evicted = have;
        for (; have < num; have++) {
            Order& order = orders[orders[0].size == 0];
            found[have] = int32_t(order.head);
            remove(order, order.head);
        }
        forget(found + evicted, size_t(have - evicted), true);
        for (long i = 0; i < num; i++) blocks[found[i]].refs = 1;
    }
    void release(const int32_t* numbers, long num) {
        std::vector<int32_t> idle, held;
        idle.reserve(size_t(num));
        for (long i = num - 1; i >= 0; i--) {
            Block& block = blocks[numbers[i]];
            block.refs--;
            if (block.published)
                (block.refs ? held : idle).push_back(numbers[i]);
            else if (!block.refs)
                scratch.push_back(numbers[i]);
        }
        uint8_t hot = add_idle(idle);
        for (const int32_t number : held) {
            Block& block = blocks[number];
            hot |= block.marks & HOT;
            block.marks |= uint8_t(hot | SEEN);
        }
    }
    void mark_used(const int32_t* numbers, long num) {
        now++;
        for (long i = 0; i < num; i++) blocks[numbers[i]].serial = now;
    }

    // ----------------------------------------------------------------------------------------------------- matching

    long match(const uint8_t* hashes, long num, long near) const {
        long low = 0, high = num;
        if (0 < near && near <= num) {
            if (!has(hashes, near - 1))
                high = near - 1;
            else if (near == num || !has(hashes, near))
                return near;
            else
                low = near + 1;
        }
        if (low < high && !low) {
            if (!has(hashes, 0)) return 0;
            low = 1;
        }
        if (low < high && high == num) {
            if (has(hashes, num - 1)) return num;
            high--;
        }
        while (low < high) {
            const long middle = (low + high) / 2;
            if (has(hashes, middle))
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }

    // Acquires published blocks; returns 0 if one of them is not there, and then changes nothing.
    int acquire(const uint8_t* hashes, long num, int32_t* found, int64_t* serials) {
        for (long i = 0; i < num; i++) {
            if (i + AHEAD < num) table.fetch(table.tag(key_of(hashes + size_t(i + AHEAD) * HASH_BYTES)));
            const int64_t number = find(key_of(hashes + size_t(i) * HASH_BYTES));
            if (number < 0) return 0;
            found[i] = int32_t(number);
        }
        for (long i = 0; i < num; i++) {
            Block& block = blocks[found[i]];
            serials[i] = block.serial;
            if (!block.refs++) {
                remove(order_of(block), uint32_t(found[i]));
                block.marks = is_lru ? SEEN : HOT | SEEN;
            }
            num_reused += block.uses++ == 1;
        }
        return 1;
    }

    // Adds the blocks after those that are there, as many as there is space for; returns their number.
    long extend(const uint8_t* hashes, long num, uint8_t unsure, int32_t* found) {
        if (num > long(scratch.size()) && ungrown) {
            const long more = std::min(std::max(num - long(scratch.size()), MIN_GROWTH), ungrown);
            ungrown -= more;
            grow(more);
        }
        num = std::min(num, num_free());
        allocate(num, found);
        for (long i = 0; i < num; i++) {
            if (i + AHEAD < num) {
                const Key next = key_of(hashes + size_t(i + AHEAD) * HASH_BYTES);
                table.fetch(table.tag(next));
                young.fetch(next);
                old.fetch(next);
            }
            Block& block = blocks[found[i]];
            const Key key = key_of(hashes + size_t(i) * HASH_BYTES);
            block.unsure = unsure;
            block.uses = 1;
            block.first = now;
            if (find(key) >= 0) continue;  // it stays private
            block.key = key;
            block.published = 1;
            table.add(table.tag(key), uint32_t(found[i]));
            int evicted = young.look(key, true);
            if (evicted < 0) evicted = old.look(key, true);
            block.marks = evicted == 1 ? HOT : 0;
        }
        num_new += num;
        if (num_new > remembered) {
            num_new /= 2;
            num_reused /= 2;
        }
        return num;
    }

    double loss(long num_blocks) const {
        const long num = std::min(num_blocks - long(scratch.size()) - ungrown, num_idle());
        if (num <= 0) return 0.0;
        const long looked_at = std::min(num, MAX_LOOKED_AT);
        double worth = 0.0;
        long left = looked_at;
        in_order([&](const Block& block) {
            double chance = share();
            if (block.uses >= 2) {
                const double gap = double(block.serial - block.first) / double(block.uses - 1);
                chance = gap / std::max(gap + double(now) - double(block.serial), 1.0);
            }
            worth += chance;
            return --left > 0;
        });
        return worth * double(num) / double(looked_at);
    }

    void resize(long wanted) {
        long change = capacity() - wanted;
        if (change > 0) {
            const long cut = std::min(change, ungrown);
            ungrown -= cut;
            const long num = std::min(change - cut, num_free()), before = long(ballast.size());
            ballast.resize(size_t(before + num));
            allocate(num, ballast.data() + before);
        } else if (change < 0) {
            const long keep = std::max(long(ballast.size()) + change, 0L), back = long(ballast.size()) - keep;
            ungrown += -change - back;
            release(ballast.data() + keep, back);
            ballast.resize(size_t(keep));
        }
    }

    // Returns 0 if all counts and places agree, else the number of the first check that fails.
    int check() const {
        std::vector<uint8_t> seen(blocks.size());
        for (const int32_t number : scratch)
            if (seen[number]++ || blocks[number].refs || blocks[number].published) return 1;
        for (int i = 0; i < 2; i++) {
            long size = 0;
            for (uint32_t number = orders[i].head; number; number = blocks[number].after, size++)
                if (seen[number]++ || blocks[number].refs || !blocks[number].published ||
                    (!is_lru && bool(blocks[number].marks & HOT) != (i == 1)))
                    return 2;
            if (size != orders[i].size) return 3;
        }
        size_t published = 0;
        for (size_t number = 1; number < blocks.size(); number++) {
            const Block& block = blocks[number];
            if (seen[number] == (block.refs > 0)) return 4;
            published += block.published;
            if (block.published && find(block.key) != int64_t(number)) return 5;
        }
        return published == table.size() ? 0 : 6;
    }
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// A pool of `capacity` blocks that may become `max_blocks`, with the clock and the statistics of `former` if not null.
EXPORT Pool* headstart_pool_new(long capacity, long max_blocks, int is_lru, uint64_t seed, const Pool* former) {
    auto* pool = new Pool(capacity, max_blocks, is_lru, seed, former ? former->now : 0);
    if (former) {
        pool->num_new = former->num_new;
        pool->num_reused = former->num_reused;
    }
    return pool;
}

EXPORT void headstart_pool_free(Pool* pool) { delete pool; }

// Frees a part of a pool that is used no more; returns the number of entries, 0 when nothing is left.
EXPORT long headstart_pool_dismantle(Pool* pool) { return long(pool->blocks.shrink()); }

// Writes capacity, published, idle and held blocks, and the clock.
EXPORT void headstart_pool_sizes(const Pool* pool, int64_t* sizes) {
    sizes[0] = pool->capacity();
    sizes[1] = int64_t(pool->table.size());
    sizes[2] = pool->num_idle();
    sizes[3] = pool->num_held();
    sizes[4] = pool->now;
}

EXPORT long headstart_pool_match(const Pool* pool, const uint8_t* hashes, long num, long near) {
    return pool->match(hashes, num, near);
}

// Writes how many leading blocks each pool has.
EXPORT void headstart_pool_match_all(const Pool* const* pools, long num_pools, const uint8_t* hashes, long num,
                                     int32_t* hits) {
    long near = 0;
    for (long i = 0; i < num_pools; i++) hits[i] = int32_t(near = pools[i]->match(hashes, num, near));
}

// Returns how many leading blocks requests in flight use.
EXPORT long headstart_pool_held(const Pool* pool, const uint8_t* hashes, long num) {
    long low = 0, high = num;
    while (low < high) {
        const long middle = (low + high) / 2;
        const int64_t number = pool->find(key_of(hashes + size_t(middle) * HASH_BYTES));
        if (number >= 0 && pool->blocks[size_t(number)].refs)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Returns 1 if the block was evicted for space and is remembered, else 0.
EXPORT int headstart_pool_was_evicted(Pool* pool, const uint8_t* hash) {
    const int evicted = pool->young.look(key_of(hash), false);
    return (evicted < 0 ? pool->old.look(key_of(hash), false) : evicted) == 1;
}

// Returns whether the block is idle and was last used after `serial`.
EXPORT int headstart_pool_is_idle_since(const Pool* pool, const uint8_t* hash, int64_t serial) {
    const int64_t number = pool->find(key_of(hash));
    return number >= 0 && !pool->blocks[size_t(number)].refs && pool->blocks[size_t(number)].serial > serial;
}

EXPORT int headstart_pool_acquire(Pool* pool, const uint8_t* hashes, long num, int32_t* found, int64_t* serials) {
    return pool->acquire(hashes, num, found, serials);
}

EXPORT long headstart_pool_extend(Pool* pool, const uint8_t* hashes, long num, int unsure, int32_t* found) {
    return pool->extend(hashes, num, uint8_t(unsure), found);
}

// Returns the index of the first block that is still being computed, `num` if there is none.
EXPORT long headstart_pool_first_unsure(const Pool* pool, const int32_t* numbers, long num) {
    for (long i = 0; i < num; i++)
        if (pool->blocks[size_t(numbers[i])].unsure) return i;
    return num;
}

// Returns how many of the blocks only one request uses.
EXPORT long headstart_pool_num_own(const Pool* pool, const int32_t* numbers, long num) {
    long found = 0;
    for (long i = 0; i < num; i++) found += pool->blocks[size_t(numbers[i])].refs == 1;
    return found;
}

EXPORT void headstart_pool_computed(Pool* pool, const int32_t* numbers, long num) {
    for (long i = 0; i < num; i++) pool->blocks[size_t(numbers[i])].unsure = 0;
}

EXPORT void headstart_pool_mark_used(Pool* pool, const int32_t* numbers, long num) { pool->mark_used(numbers, num); }

EXPORT void headstart_pool_release(Pool* pool, const int32_t* numbers, long num) {
    pool->mark_used(numbers, num);
    pool->release(numbers, num);
}

// Marks those blocks that no request is known to have computed as kept when their request failed.
EXPORT void headstart_pool_keep(Pool* pool, const int32_t* numbers, long num) {
    for (long i = 0; i < num; i++) {
        uint8_t& unsure = pool->blocks[size_t(numbers[i])].unsure;
        unsure = unsure ? KEPT : 0;
    }
}

// Withdraws those blocks that only one request uses and that are not computed yet.
EXPORT void headstart_pool_distrust(Pool* pool, const int32_t* numbers, long num) {
    std::vector<int32_t> gone;
    for (long i = 0; i < num; i++) {
        const Block& block = pool->blocks[size_t(numbers[i])];
        if (block.unsure == 1 && block.refs == 1 && block.published) gone.push_back(numbers[i]);
    }
    pool->forget(gone.data(), gone.size(), false);
}

// Drops the next `num` blocks in the order of eviction; so many are idle.
EXPORT void headstart_pool_drop(Pool* pool, long num) {
    std::vector<int32_t> gone(pool->scratch.size() + size_t(num));
    pool->allocate(long(gone.size()), gone.data());
    pool->release(gone.data(), long(gone.size()));
}

EXPORT void headstart_pool_resize(Pool* pool, long capacity) { pool->resize(capacity); }

EXPORT double headstart_pool_loss(const Pool* pool, long num_blocks) { return pool->loss(num_blocks); }

// Returns how many idle blocks are evicted before any that was used after `serial`.
EXPORT long headstart_pool_num_unused_since(const Pool* pool, int64_t serial) {
    long found = 0;
    pool->in_order([&](const Block& block) {
        found += block.serial <= serial;
        return block.serial <= serial;
    });
    return found;
}

EXPORT int headstart_pool_check(const Pool* pool) { return pool->check(); }
