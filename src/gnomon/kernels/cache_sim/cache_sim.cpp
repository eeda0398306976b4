// A prompt cache turn by turn: the decisions of methods/serve/tail_lru, exactly. Modes are in __init__.py.
#include <cmath>
#include <limits>
#include <queue>
#include <vector>

#include "../include/common.hpp"

namespace gnomon {
namespace cache_sim {

enum Order : int64_t { RECENCY, FURTHEST, ARRIVAL, FREQUENCY, EXPECTED };
enum Budget : int64_t { NO_BUDGET, FIXED, EXACT };
enum Admit : int64_t { ALL, LONG, RETURNING, WITHIN };

struct Settings {
  int64_t turns, conversations, capacity, block, forced, order, budget, admit, min_len, xi, qhat, samples;
};

// Conversations by the time of their last turn; one list holds all with cached blocks, one those above their budget.
struct Recency {
  std::vector<int32_t> before, after;
  int32_t end;
  explicit Recency(int64_t count) : before(size_t(count) + 1, -1), after(size_t(count) + 1, -1), end(int32_t(count)) {
    before[end] = after[end] = end;
  }
  bool has(int32_t at) const { return before[at] >= 0; }
  int32_t oldest() const { return after[end]; }
  void remove(int32_t at) {
    if (!has(at)) return;
    after[before[at]] = after[at];
    before[after[at]] = before[at];
    before[at] = -1;
  }
  void append(int32_t at) {
    before[at] = before[end], after[at] = end;
    after[before[end]] = at;
    before[end] = at;
  }
};

// Smallest key first, then least recently served. An entry counts while `version` is its conversation's.
template <class Key>
struct Entry {
  Key key;
  int64_t turn;
  int32_t conversation;
  int32_t version;
  bool operator<(const Entry& other) const {  // std::priority_queue puts the largest on top
    return key != other.key ? key > other.key : turn > other.turn;
  }
};
template <class Key>
using Heap = std::priority_queue<Entry<Key>>;

class Cache {
 public:
  Cache(const Settings& s, const double* rates, const double* time, const int64_t* conversation, const int64_t* prompt,
        const int64_t* response, const int64_t* following, const int64_t* samples)
      : s(s), death_rate(rates[0]), turn_rate(rates[1]), time(time), conversation(conversation), prompt(prompt),
        response(response), following(following), samples(samples), held(s.conversations, 0), tokens(s.conversations, 0),
        budget(s.conversations, 0), last(s.conversations, 0), since(s.conversations, 0), count(s.conversations, 0),
        version(s.conversations, 0), all(s.order == RECENCY ? s.conversations : 0),
        safe(s.order == RECENCY ? s.conversations : 0) {}

  void run(int64_t* out) {
    for (int64_t t = 0; t < s.turns; t++) {
      const int32_t c = int32_t(conversation[t]);
      out[t] = held[c];
      tokens[c] += prompt[t] + response[t];
      const int64_t history = (tokens[c] + s.block - 1) / s.block, most = tokens[c] / s.block;
      last[c] = t, count[c]++, version[c]++;
      if (held[c] == 0) since[c] = t;
      if (s.budget == FIXED) budget[c] = std::max<int64_t>(0, history + s.qhat - s.xi);
      if (s.budget == EXACT) budget[c] = following[t] < 0 ? 0 : std::max<int64_t>(0, history + prompt[following[t]] - s.xi);
      const int64_t keep = s.forced ? most : std::min(most, admitted(c, t, history));
      used += keep - held[c];
      held[c] = keep;
      if (s.order == EXPECTED) histories_of(c, history);
      if (s.order == RECENCY) all.remove(c), safe.remove(c);
      if (!s.forced) enter(c);
      if (used > s.capacity) evict();
      if (s.forced) enter(c);  // after the eviction, so that it can't be a victim
    }
  }

 private:
  const Settings s;
  const double death_rate, turn_rate;
  const double* time;
  const int64_t *conversation, *prompt, *response, *following, *samples;
  std::vector<int64_t> held, tokens, budget, last, since;
  std::vector<int64_t> count;
  std::vector<int32_t> version;
  std::vector<int64_t> history;  // of the expected order alone
  Recency all, safe;
  Heap<int64_t> by_key, safe_by_key;
  Heap<double> by_value;
  int64_t used = 0;

  int64_t admitted(int32_t c, int64_t t, int64_t length) const {
    switch (s.admit) {
      case LONG: return length >= s.min_len ? length : 0;
      case RETURNING: return following[t] < 0 ? 0 : length;
      case WITHIN: return std::min(length, budget[c]);
      default: return length;
    }
  }

  void histories_of(int32_t c, int64_t length) {
    if (history.empty()) history.assign(size_t(s.conversations), 0);
    history[c] = length;
  }

  int64_t key(int32_t c) const {
    if (s.order == FURTHEST) {
      const int64_t next = following[last[c]];
      return next < 0 ? std::numeric_limits<int64_t>::min() : -next;
    }
    return s.order == ARRIVAL ? since[c] : count[c];
  }

  // Samples that don't reach the last of `blocks` cached ones.
  int64_t first_sample(int32_t c, int64_t blocks) const {
    const int64_t shortest = blocks - history[c] + s.xi;
    return std::lower_bound(samples, samples + s.samples, shortest) - samples;
  }

  // What a block costs that the samples from `first` on reach.
  double value(int32_t c, int64_t first) const {
    const double weight = turn_rate * (double(s.samples - first) / double(s.samples));
    const volatile double aged = death_rate * time[last[c]];  // volatile: no fused multiply-add, as in Python
    return weight > 0 ? std::log(weight) + aged : -std::numeric_limits<double>::infinity();
  }

  void enter(int32_t c) {
    if (held[c] == 0) return;
    const bool over = s.budget != NO_BUDGET && held[c] > budget[c];
    if (s.order == RECENCY) {
      all.append(c);
      if (over) safe.append(c);
    } else if (s.order == EXPECTED) {
      by_value.push({value(c, first_sample(c, held[c])), last[c], c, version[c]});
    } else {
      by_key.push({key(c), last[c], c, version[c]});
      if (over) safe_by_key.push({key(c), last[c], c, version[c]});
    }
  }

  // Frees the tail beyond `down_to`, or as much as is needed; whether it was all of it.
  bool cut(int32_t c, int64_t down_to) {
    const int64_t freed = std::min(held[c] - down_to, used - s.capacity);
    held[c] -= freed, used -= freed;
    return held[c] == down_to;
  }

  void evict() {
    if (s.order == RECENCY) {
      while (used > s.capacity && safe.oldest() != safe.end) {
        const int32_t c = safe.oldest();
        if (cut(c, budget[c])) safe.remove(c);
        if (held[c] == 0) all.remove(c);
      }
      while (used > s.capacity && all.oldest() != all.end) {
        const int32_t c = all.oldest();
        if (cut(c, 0)) all.remove(c);
        if (held[c] <= budget[c]) safe.remove(c);
      }
    } else if (s.order == EXPECTED) {
      evict_expected();
    } else {
      evict_from(safe_by_key, true);
      evict_from(by_key, false);
    }
  }

  void evict_from(Heap<int64_t>& heap, bool to_budget) {
    while (used > s.capacity && !heap.empty()) {
      const Entry<int64_t> top = heap.top();
      const int32_t c = top.conversation;
      const int64_t down_to = to_budget ? budget[c] : 0;
      if (top.version != version[c] || held[c] <= down_to || cut(c, down_to)) heap.pop();
    }
  }

  void evict_expected() {
    while (used > s.capacity && drop_stale()) {
      Entry<double> top = by_value.top();
      const int32_t c = top.conversation;
      by_value.pop();
      // All blocks go that cost no more than the next conversation's: those that only samples from `low` on reach.
      int64_t low = 0, high = first_sample(c, held[c]);
      if (drop_stale()) {
        const Entry<double>& next = by_value.top();
        while (low < high) {
          const int64_t middle = low + (high - low) / 2;
          const double cost = value(c, middle);
          if (cost < next.key || (cost == next.key && top.turn < next.turn)) high = middle;
          else low = middle + 1;
        }
      }
      const int64_t down_to = low == 0 || high == 0 ? 0 : samples[high - 1] + history[c] - s.xi;
      cut(c, std::min(held[c], std::max<int64_t>(0, down_to)));
      if (held[c] > 0) by_value.push({value(c, first_sample(c, held[c])), last[c], c, version[c]});
    }
  }

  // Whether an entry is left once those that no longer count are gone.
  bool drop_stale() {
    while (!by_value.empty() && by_value.top().version != version[by_value.top().conversation]) by_value.pop();
    return !by_value.empty();
  }
};

}  // namespace cache_sim
}  // namespace gnomon

// 0, or 1 where memory ran out. `numbers` holds Settings, `rates` deaths and turns per second; out (turns,).
extern "C" int gnomon_cache_sim(const int64_t* numbers, const double* rates, const double* time,
                                const int64_t* conversation, const int64_t* prompt, const int64_t* response,
                                const int64_t* following, const int64_t* samples, int64_t* out) {
  using namespace gnomon::cache_sim;
  Settings s;
  static_assert(sizeof s == 12 * sizeof(int64_t), "numbers are copied as they lie");
  std::memcpy(&s, numbers, sizeof s);
  try {
    Cache(s, rates, time, conversation, prompt, response, following, samples).run(out);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
