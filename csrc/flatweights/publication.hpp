// Weights that one process publishes and others of its machine read, in memory that all map.
//
// A data file has slots of one size, which readers map read-only. A publication, in a control file
// that all write, says which slot has the newest weights. Nobody waits for anybody:
//
//   word       the number of the newest publication, and its slot
//   stamps     per slot: the number of the publication that is in it; 0 while it is written
//   holds      per reader: the slot that it reads, plus one; 0 if none
//
// Reader:  read the word, store the hold, read the stamp of the slot. If it is still the number,
//          the slot is not written until the hold is cleared; else clear the hold, begin again.
// Writer:  choose a slot that is neither the newest nor held, store 0 to its stamp, read all holds.
//          If a reader came meanwhile, restore the stamp and choose another; else write the slot,
//          store its stamp, then the word.
//
// Hold, stamp and word are sequentially consistent. So either the reader sees that the stamp is 0,
// or the writer sees the hold. A slot that is read is never written: there is no torn read to be
// discarded, and no data race. Each reader holds one slot at most, so with two slots more than
// readers there is always one to write to. A process that stops for an hour keeps its slot for that
// time. One that dies keeps it until the process that watches it clears its hold. A writer that
// dies leaves the newest publication as it is.
//
// A reader may sleep until there is news. Before it reads the word a last time, it sets its bit in
// `asleep`; the writer stores the word, then looks at the bits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace flatweights {

class Publication {
 public:
  static constexpr std::uint32_t kReaders = 129;  // 128, and one that reads for other nodes
  static constexpr std::uint32_t kSlots = kReaders + 2;

  // A publication and its slot; number 0 means none.
  struct News {
    std::uint64_t number = 0;
    std::uint32_t slot = 0;
    std::int64_t time = 0;  // when it was published, by the writer's clock
  };

  // Zeros, as in a new memory file, are a publication without news.

  // The number of the newest publication; 0 if there is none.
  [[nodiscard]] std::uint64_t newest() const noexcept {
    return number_of(word_.load(std::memory_order_acquire));
  }

  // Writer, one thread at a time. `begin` returns a slot to write to; a slot that is not committed
  // is as free as before. `commit` takes a number above that of the newest, and below 2**56.
  [[nodiscard]] std::uint32_t begin() noexcept;
  void commit(std::uint32_t slot, std::uint64_t number, std::int64_t time) noexcept;

  // Reader number `reader`. `hold` returns the newest publication if its number is above `seen`:
  // its slot stays as it is until `release`. A reader that holds a slot must release it first.
  // Throws std::runtime_error if a process has overwritten the memory, with nothing held.
  [[nodiscard]] News hold(std::uint32_t reader, std::uint64_t seen);
  void release(std::uint32_t reader) noexcept { holds_[reader].slot.store(0); }
  [[nodiscard]] bool is_holding(std::uint32_t reader) const noexcept {
    return holds_[reader].slot.load() != 0;
  }
  // Sleeps until there is a publication with a number above `seen`, `nanoseconds` have passed or a
  // signal came; returns whether there is one. The bit in `asleep` stays set, since threads that
  // wait for one reader share it: the last of them calls `note_awake`, which clears it.
  bool wait(std::uint32_t reader, std::uint64_t seen, std::int64_t nanoseconds) noexcept;
  void note_awake(std::uint32_t reader) noexcept;

  // Clears the hold and the bit in `asleep` of a reader that has died.
  void clear(std::uint32_t reader) noexcept {
    release(reader);
    note_awake(reader);
  }

 private:
  static std::uint64_t number_of(std::uint64_t word) noexcept { return word >> 8; }
  static std::uint32_t slot_of(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word & 0xff);
  }
  static_assert(kSlots <= 256, "a word has 8 bits for the slot");

  [[nodiscard]] bool is_held(std::uint32_t slot) const noexcept;

  struct alignas(64) Slot {
    std::atomic<std::uint64_t> stamp;
    std::atomic<std::int64_t> time;
  };
  // A line of its own for each reader, so that none slows down another.
  struct alignas(64) Hold {
    std::atomic<std::uint32_t> slot;
  };

  alignas(64) std::atomic<std::uint64_t> word_;
  alignas(64) std::atomic<std::uint64_t> asleep_[(kReaders + 63) / 64];  // a bit for each reader
  std::atomic<std::uint32_t> turns_;  // what readers sleep on: changes before they are woken
  Slot slots_[kSlots];
  Hold holds_[kReaders];
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace flatweights
