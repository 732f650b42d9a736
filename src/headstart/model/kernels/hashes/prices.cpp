// The prices of a prompt at all replicas of a fleet: what price_all in router/pricing.py computes by arrays, to the last
// bit. The caller holds the interpreter's lock.

#include <algorithm>
#include <cmath>

// `state`: a column of `num` values for each value of Load.row. `own`: tokens to compute. `out`: six columns, of Price.
extern "C" __attribute__((visibility("default"))) void headstart_prices(
    long num, const double* state, const double* own, const double* pace, const double* numbers, double* out) {
    const double rate_step = numbers[0], stream = numbers[1], resident_rate = numbers[2], token = numbers[3],
                 pair = numbers[4], output = numbers[5], prompt = numbers[6], now = numbers[7];
    const bool uses_steps = numbers[8] != 0;
    const double stale_steps = numbers[9], stale_ms = numbers[10], max_age = numbers[11], lateness = numbers[12],
                 grace = numbers[13], decode_weight = numbers[14];
    const double decode_own = stream + resident_rate * (prompt + output / 2);
    for (long i = 0; i < num; i++) {
        const auto at = [&](int column) { return state[column * num + i]; };
        const double all = at(0), pending = at(2), streams = at(3), resident = at(4), head_tokens = at(6);
        const double room = at(14), size = at(15), began_at = at(16), step_tokens = at(21), new_tokens = own[i];
        const bool is_reported = now - at(12) <= max_age;
        const double decoding = streams + (is_reported ? at(23) : 0.0);
        const double attended = resident + (is_reported ? at(24) : 0.0);
        const double step = rate_step + stream * decoding + resident_rate * (attended + decoding * (output / 2));
        const double head = token * head_tokens + pair * at(7) + std::ceil(head_tokens / step_tokens) * step;
        const bool is_busy = pending > 0;
        double tokens = all, steps = std::ceil(tokens / step_tokens);
        double backlog = token * tokens + pair * at(1) + steps * step;
        const double done = is_busy ? std::min(std::max(1e3 * (now - at(8)), 0.0), head) : 0.0;
        backlog = std::max(backlog - done, 0.0);
        if (!is_busy && streams > 0) backlog += 0.5 * step;
        if (uses_steps && began_at > -INFINITY && (streams > 0 || is_busy)) {
            const double running = step + token * at(17) + pair * at(18), elapsed = 1e3 * (now - began_at) / pace[i];
            if (streams <= 0 || elapsed < stale_steps * running + stale_ms) {
                tokens = at(19) - at(17);
                steps = std::max(std::ceil(tokens / step_tokens), at(22));
                double queued = token * tokens + pair * (at(20) - at(18)) + steps * step;
                if (streams <= 0)  // the ends of steps are not seen
                    queued -= std::min(std::max(elapsed - running, 0.0), std::max(head - running, 0.0));
                backlog = std::max(running - elapsed, 0.0) + std::max(queued, 0.0);
            }
        }
        if (is_reported) backlog += at(11) * at(13);
        const double answers = (streams + pending) * output;
        const double missing = streams > 0 ? std::max(new_tokens + output + answers - room, 0.0) : 0.0;
        const double claimed = std::max(std::max(size - room + answers, 1.0) * streams, 1.0);
        const double release_ms = (streams + pending) * output * step / claimed, wait = missing * release_ms;
        const double later = missing > 0 ? new_tokens * (streams + pending) * release_ms : 0.0;
        backlog = std::max(backlog, wait);
        const double more = std::max(std::ceil((tokens + new_tokens) / step_tokens) - steps, 0.0);
        const double others = stream * (decoding + pending) +
                              resident_rate * (attended + at(5) + (decoding + pending) * (output / 2));
        const double expected = head + token * std::min(all - head_tokens, step_tokens);
        const double late = is_busy ? 1e3 * (now - at(9)) / (lateness * expected + grace) : 1.0;
        out[i] = backlog;
        out[num + i] = token * new_tokens + pair * new_tokens * (prompt - new_tokens / 2) + more * step;
        out[2 * num + i] = decode_weight * output * (others + decode_own * (decoding + pending)) + later;
        out[3 * num + i] = std::max(late, 1.0) * pace[i];
        out[4 * num + i] = wait;
        out[5 * num + i] = numbers[15] != 0 ? decoding + pending : 0.0;
    }
}
