// Stresses the answers of workers: one driver and several workers, as threads under
// ThreadSanitizer.
//
// Each model consists of the number of the command and the rank, so a mean shows whether a segment
// was read or written out of turn. Every seventh answer of a worker is no weights: then the driver
// finds all answers unread, and reads them itself.
#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "flatweights/worker_answers.hpp"
#include "peers.hpp"

namespace {

using namespace flatweights;

constexpr std::size_t kWorkers = 3;
constexpr std::uint64_t kCommands = 20000;
constexpr std::array<char, 4> kDigest{'d', 'i', 'g', 's'};

bool is_value(std::uint64_t number, std::size_t rank) { return (number + rank) % 7 == 0; }

void be_worker(std::size_t rank, const Peer& worker, const Bell& bell) {
  Mailbox& box = *worker.box;
  for (std::uint64_t number = 1; number <= kCommands; ++number) {
    worker.take();
    expect(box.holds(Mailbox::Side::kDriver, 0) == 0, "the driver holds what it has read");
    if (is_value(number, rank)) {
      const std::array<std::uint32_t, 2> value{kValue, 0};
      box.answer_and_stay(std::as_bytes(std::span(value)));
    } else {
      std::fill_n(worker.numbers(), kNumbers, static_cast<double>(number + rank));
      struct {
        std::uint32_t kind = kWeights, count = 1;
        Extent extent{0, 1, 0, kNumbers * sizeof(double)};
        std::array<char, 4> digest = kDigest;
        std::uint32_t rest = 0;  // the size of a struct is a multiple of 8
      } weights;
      box.add_hold(Mailbox::Side::kDriver, 0);
      const auto bytes = std::as_bytes(std::span(&weights, 1));
      box.answer_and_stay(bytes.first(bytes.size() - sizeof weights.rest));
    }
    bell.count_down();
  }
}

}  // namespace

int main() {
  Bell bell;
  std::vector<Peer> workers(kWorkers);
  std::vector<Mailbox*> boxes;
  for (const Peer& worker : workers) boxes.push_back(worker.box.get());
  WorkerAnswers answers(boxes, layout_of_model(), std::string(kDigest.begin(), kDigest.end()));
  for (std::size_t k = 0; k < kWorkers; ++k) answers.know(k, {{0, 1, workers[k].segment}});

  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kWorkers; ++rank)
    threads.emplace_back(be_worker, rank, std::cref(workers[rank]), std::cref(bell));
  const Sleep sleep{bell.door.get(), bell.bell, bell.poll};
  std::vector<double> mean(kNumbers);
  for (std::uint64_t number = 1; number <= kCommands && !failed; ++number) {
    const std::vector<WorkerAnswers::Command> commands(kWorkers, {{}, {}, 1});
    const auto uncalled = answers.post(commands);
    expect(uncalled && uncalled->empty(), "not all workers were waiting");
    bool is_any_value = false;
    for (std::size_t rank = 0; rank < kWorkers; ++rank)
      is_any_value = is_any_value || is_value(number, rank);
    // Some waits poll, and some sleep.
    const WorkerAnswers::Patience patience{number % 2 == 0 ? 50e-6 : 0.0, 30.0};
    const auto ended = answers.mean(std::vector<double>(kWorkers, 1.0), false, patience, sleep,
                                    reinterpret_cast<std::byte*>(mean.data()));
    if (!is_any_value) {
      expect(ended == WorkerAnswers::Ended::kAll, "a mean was not made");
      const double expected = static_cast<double>(number) + (kWorkers - 1) / 2.0;
      expect(std::ranges::all_of(mean, [=](double value) { return value == expected; }),
             "a mean is wrong");
      continue;
    }
    expect(ended == WorkerAnswers::Ended::kOther, "a value was averaged");
    for (std::size_t rank = 0; rank < kWorkers; ++rank) {
      while (!boxes[rank]->is_answered()) std::this_thread::yield();
      if (is_value(number, rank)) continue;
      expect(workers[rank].numbers()[7] == static_cast<double>(number + rank), "a model is wrong");
      boxes[rank]->drop_hold(Mailbox::Side::kDriver, 0);
    }
  }
  for (std::thread& thread : threads) thread.join();
  return failed ? 1 : 0;
}
